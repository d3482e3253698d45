"""Each family writes its tool calls in its own way; all are read, whole and in pieces, and what is none stays text."""

import json

import pytest

from agentkv.core.message import ToolSpec
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.chat import spec_of
from agentkv.engine.local.families import family_of
from agentkv.engine.local.responses import TemplateGate
from agentkv.engine.local.tokeniser import Tokeniser

TOOLS = [spec_of(ToolSpec(name=name, description="", parameters={"type": "object"})) for name in ("get", "put")]
CALL = {"name": "get", "arguments": {"key": "a", "deep": {"of": ["[/x]", 'q"']}}}
WRITTEN = {
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS]{json.dumps([CALL, CALL | {'name': 'put'}])}</s>", 2),
    "mistral-args": (
        "[TOOL_CALLS] [ARGS]",
        f"[TOOL_CALLS]get[ARGS]{json.dumps(CALL['arguments'])}[TOOL_CALLS]put[ARGS]{json.dumps(CALL['arguments'])}</s>",
        2,
    ),
    "phi": ("<|tool_call|>", f"<|tool_call|>{json.dumps([CALL])}<|/tool_call|><|end|>", 1),
    "llama": (
        "<|python_tag|>", json.dumps({"name": "get", "parameters": CALL["arguments"]}) + "<|eot_id|>", 1,
    ),
    "llama-tag": (
        "<|python_tag|>", "<|python_tag|>" + json.dumps({"name": "get", "parameters": CALL["arguments"]}) + "<|eom_id|>", 1,
    ),
    "gpt-oss": (
        "<|channel|>",
        (f"<|channel|>analysis<|message|>A key.<|end|><|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json"
        f"<|message|>{json.dumps(CALL['arguments'])}<|call|>"),
        1,
    ),
}  # fmt: skip
CONTROLS = [
    "[TOOL_CALLS]", "[ARGS]", "</s>", "<|tool_call|>", "<|/tool_call|>", "<|end|>", "<|python_tag|>", "<|eot_id|>",
    "<|eom_id|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    """The bytes and all families' control tokens."""
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": CONTROLS})
    return made


def _answer(tokenizer, family, text, *, limit=4000, tools=TOOLS):
    """(pieces that were shown, text, calls, reason) of an answer that is forced to be `text`."""
    tokeniser = Tokeniser(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    gate = TemplateGate(tokenizer, tokeniser, prompt="", tools=list(tools), family=family)
    answer = Answer(tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=limit, forced_ids=ids, gate=gate)
    shown = []
    for id_ in ids:
        shown.append(answer.add(id_))
        if answer.reason is not None:
            break
    rest, calls = answer.finish()
    return [*shown, rest], answer.text, calls, answer.reason


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_of_every_family_are_read(tokenizer, kind):
    """Names and arguments, every call with an id of its own, and no mark of any in the text."""
    mark, text, count = WRITTEN[kind]
    shown, said, calls, reason = _answer(tokenizer, family_of(mark), text)
    assert "tool_calls" == reason
    assert ["get", "put"][:count] == [call.name for call in calls]
    assert all(CALL["arguments"] == json.loads(call.arguments) for call in calls)
    assert count == len({call.id for call in calls})
    assert "" == said == "".join(shown)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_call_that_is_cut_is_none(tokenizer, kind):
    """At every place before its end the reason is "length", and nothing is called."""
    mark, text, _ = WRITTEN[kind]
    total = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    for limit in range(1, total - 1, 5):
        _, _, calls, reason = _answer(tokenizer, family_of(mark), text, limit=limit)
        assert ((), "length") == (calls, reason)


@pytest.mark.parametrize("kind", WRITTEN)
def test_text_without_a_call_is_text(tokenizer, kind):
    """As it was written, piece by piece equal to the whole."""
    mark = WRITTEN[kind][0]
    text = "Look: {not json} [x] and done."
    if kind == "gpt-oss":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
    shown, said, calls, reason = _answer(tokenizer, family_of(mark), text)
    assert ("Look: {not json} [x] and done.", (), "stop") == (said, calls, reason)
    assert said == "".join(shown)


@pytest.mark.parametrize("kind", ["mistral", "phi"])
def test_a_broken_call_stays_text(tokenizer, kind):
    """Nothing that the model wrote is lost."""
    mark, text, _ = WRITTEN[kind]
    broken = text.replace('"arguments"', "arguments")
    _, said, calls, reason = _answer(tokenizer, family_of(mark), broken)
    assert ((), "stop") == (calls, reason)
    assert "arguments: {" in said.replace('"', "")


def test_json_of_a_bare_family_is_a_call_only_of_a_known_tool(tokenizer):
    """A person who is called Bob is no tool."""
    text = json.dumps({"name": "Bob", "parameters": {"age": 3}})
    _, said, calls, _ = _answer(tokenizer, family_of("<|python_tag|>"), text)
    assert () == calls
    assert json.loads(text) == json.loads(said)


def test_hidden_thoughts_are_not_shown(tokenizer):
    """Also where there are no tools, and where the answer is cut inside of them."""
    family = family_of("<|channel|>")
    text = "<|channel|>analysis<|message|>secret<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    total = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    for limit in range(1, total + 1):
        _, said, _, _ = _answer(tokenizer, family, text, limit=limit, tools=[])
        assert "Hello".startswith(said)
    assert "Hello" == said


def test_thoughts_in_a_channel_are_told_apart(tokenizer):
    """Streamed and whole the same, wherever they are cut; several are joined by a line end; the turn's own text is the answer."""
    family, tokeniser = family_of("<|channel|>"), Tokeniser(tokenizer)
    text = (
        "<|channel|>analysis<|message|> 1 <2 STOP\n<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello STOP<|return|>"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = " 1 <2 STOP\n\nHm"
    for limit in range(1, len(ids) + 1):
        gate = TemplateGate(tokenizer, tokeniser, prompt="", tools=[], family=family)
        answer = Answer(
            tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=limit, forced_ids=ids, gate=gate, stop=("STOP",)
        )
        shown = thought = ""
        for id_ in ids[:limit]:
            shown += answer.add(id_)
            thought += answer.aside.take()[0]
            if answer.reason is not None:
                break
        rest, _ = answer.finish()
        assert (answer.text, answer.aside.thought) == (shown + rest, thought + answer.aside.take()[0])
        assert whole.startswith(answer.aside.thought)
        assert "Hello STO".startswith(answer.text)
        assert answer.raw == answer.text
    assert (whole, "Hello ", "stop") == (answer.aside.thought, answer.text, answer.reason)
    assert len(" 1 <2 STOP\nHm") <= answer.reasoning_tokens <= len(" 1 <2 STOP\nHm") + 2


def test_a_family_is_known_by_the_marks_in_its_chat_template():
    """And <tool_call> tags need none."""
    assert family_of("{{ '<tool_call>' }}") is None
    assert ["mistral", "mistral with [ARGS]", "phi-4", "llama-3", "gpt-oss"] == [
        family_of(WRITTEN[kind][0]).name for kind in ("mistral", "mistral-args", "phi", "llama", "gpt-oss")
    ]
