"""Users' reports about tool calls in formats of the model's own, and about held answers (E14 to E16).

Texts are forced token by token; what is shown while it streams is always what is told at the end.
"""

import json
import random
from dataclasses import replace

import jsonschema
import pytest

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, TokenLogprob, ToolChoice
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.chat import spec_of
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.families import family_of
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.responses import BREAK, TemplateGate
from agentkv.engine.local.schemas import closed, finite
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import TagGate
from agentkv.errors import RequestInvalid

MISTRAL, ARGS, PHI, LLAMA, HARMONY = (
    "[TOOL_CALLS]",
    "[TOOL_CALLS] [ARGS]",
    "<|tool_call|>",
    "<|python_tag|>",
    "<|channel|>",
)
CONTROLS = [
    "[TOOL_CALLS]", "[ARGS]", "</s>", "<|tool_call|>", "<|/tool_call|>", "<|end|>", "<|python_tag|>", "<|eot_id|>",
    "<|eom_id|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>",
]  # fmt: skip
TOOLS = tuple(ToolSpec(name=name, parameters={"type": "object"}) for name in ("get", "put"))
THINK = "<|channel|>analysis<|message|>Secret.<|end|><|start|>assistant"
CLOSES = {
    "mistral": "</s>",
    "args": "[TOOL_CALLS]",
    "phi": "<|/tool_call|>",
    "llama": "<|eot_id|>",
    "harmony": "<|call|>",
}
MARKS = {"mistral": MISTRAL, "args": ARGS, "phi": PHI, "llama": LLAMA, "harmony": HARMONY}


def _written(kind, arguments, name="get"):
    """A call as a family writes it, with an end token behind."""
    return {
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]</s>',
        "args": f"[TOOL_CALLS]{name}[ARGS]{arguments}</s>",
        "phi": f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|><|end|>',
        "llama": f'{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>',
        "harmony": f"{THINK}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    }[kind]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    """The bytes and all families' control tokens."""
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": CONTROLS})
    return made


@pytest.fixture
def forced(tokenizer):
    """`forced(mark, *parts)`: (text, calls, reason) of an answer that is `parts`; "\\0" before one: plain text throughout."""

    def run(mark, *parts, limit=4000, tools=TOOLS, **more):
        tokeniser = Tokeniser(tokenizer)
        ids = []
        for part in parts:
            ids += tokeniser.encode(tokeniser.guard(part[1:]) if part[:1] == "\0" else part).ids
        specs = [spec_of(tool) for tool in tools]
        gate = TemplateGate(tokenizer, tokeniser, prompt="", tools=specs, family=family_of(mark), **more)
        answer = Answer(tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=limit, forced_ids=ids, gate=gate)
        shown = ""
        for id_ in ids:
            shown += answer.add(id_)
            if answer.reason is not None:
                break
        rest, calls = answer.finish()
        assert shown + rest == answer.text
        assert BREAK not in answer.text
        return answer.text, calls, answer.reason

    return run


# -- calls


@pytest.mark.parametrize("kind", MARKS)
def test_an_argument_may_spell_every_mark_of_the_family(forced, kind):
    """Spelled as text a mark is text: the call is whole, its arguments are as written (E14)."""
    evil = {"text": "".join(CONTROLS) + 'x </s> "[', "[TOOL_CALLS]": [{"a": {"b": "<|end"}}], "end": "<|call|"}
    head, arguments, tail = (
        _written(kind, "\1").partition("\1")[0],
        json.dumps(evil),
        _written(kind, "\1").partition("\1")[2],
    )
    text, calls, reason = forced(MARKS[kind], head, "\0" + arguments, tail)
    assert ("", "tool_calls", ["get"]) == (text, reason, [call.name for call in calls])
    assert evil == json.loads(calls[0].arguments)


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("arguments", ['{"q": ', "{q: 1}", '{"t": "a "b" c"}', "[1]", "7", '"text"', "null and void"])
def test_a_call_that_is_none_is_text(forced, kind, arguments):
    """Half an object, unquoted names, raw quotes, no object at all: never called, never lost (E14)."""
    if kind == "llama" and arguments == '{"q": ':
        arguments += "1"
    text, calls, reason = forced(MARKS[kind], _written(kind, arguments))
    assert ((), "stop") == (calls, reason)
    assert arguments in text
    assert "Secret" not in text


@pytest.mark.parametrize(
    ("kind", "arguments"), [("phi", "{}"), ("harmony", "{}"), ("args", "{}"), ("mistral", '{"q":1}')]
)
def test_text_around_a_call_is_told_once(forced, kind, arguments):
    """At every place where max_tokens may cut it, in the text or in the call."""
    before, after = ("", "") if kind == "harmony" else ("  Look:\n ", " done. " if kind == "phi" else "")
    written = _written(kind, arguments).removesuffix("<|end|>")
    for limit in range(1, 400, 1 if kind == "phi" else 3):
        text, calls, reason = forced(MARKS[kind], before, written, after, limit=limit)
        assert text.count("Look") <= 1
        assert text.count('"get"') <= 1
        assert bool(calls) == (reason == "tool_calls")
        if reason != "length" and limit > 250:
            break
    assert ["get"] == [call.name for call in calls]
    assert before + after == text


def test_a_second_call_that_is_cut_takes_the_first_with_it(forced):
    """Half of what the model meant is not what it meant (E16); both stay readable."""
    one, two = '{"a": 1}', '{"b": 2}'
    text = f"[TOOL_CALLS]get[ARGS]{one}[TOOL_CALLS]put[ARGS]{two}</s>"
    _, calls, _ = forced(ARGS, text)
    assert ["get", "put"] == [call.name for call in calls]
    for limit in range(len("get") + 2 + len(one), len("getput") + 4 + len(one + two)):
        said, calls, reason = forced(ARGS, text, limit=limit)
        assert ((), "length") == (calls, reason), limit
        assert one in said


def test_a_broken_call_does_not_spoil_the_next(forced):
    """The bad one is text, the good one is called."""
    bad, good = "<|tool_call|>[{bad]<|/tool_call|>", '<|tool_call|>[{"name": "get", "arguments": {}}]<|/tool_call|>'
    text, calls, reason = forced(PHI, "a ", bad, " b ", good, " c")
    assert (["get"], "tool_calls") == ([call.name for call in calls], reason)
    assert "a [{bad] b  c" == text


def test_a_recipient_may_stand_before_the_channel(forced):
    """GPT-OSS writes it in either place; its own template shows it in this one."""
    before = '<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    for text in (f" to=functions.get{before}", f"{THINK} to=functions.get{before}"):
        said, calls, _ = forced(HARMONY, text)
        assert ("", [("get", '{"a": 1}')]) == (said, [(call.name, call.arguments) for call in calls])


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_a_control_token_is_never_shown(forced, mark):
    """Whichever ends the answer, and one in the middle, too."""
    for control in ("<|im_end|>", "<|endoftext|>", "<|eom_id|>"):
        text, calls, _ = forced(mark, "Hello", control, " there", control)
        assert ("Hello there", ()) == (text, calls)


def test_half_a_character_in_an_argument_can_be_sent(forced):
    """JSON may hold it as an escape; then it stays one."""
    _, (call,), _ = forced(MISTRAL, _written("mistral", '{"a": "\\ud83d", "b": "\\u00e9"}'))
    call.arguments.encode()
    assert {"a": "\ud83d", "b": "é"} == json.loads(call.arguments)


def test_tags_that_are_control_tokens_are_tags_all_the_same(make_tokenizer):
    """Some makers marked them so; decoding leaves them out, the calls are there nevertheless, to be sent again as well."""
    made = make_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokeniser = Tokeniser(made)
    said = 'I look. <tool_call>{"name": "get", "arguments": {}}</tool_call>'
    for text, count in ((said, 1), (said * 2, 2), (said[:-3], 0)):
        ids = tokeniser.encode(text).ids
        answer = Answer(tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=500, forced_ids=ids, gate=TagGate())
        shown = "".join(answer.add(id_) for id_ in ids)
        rest, calls = answer.finish()
        assert count == len(calls)
        assert text == answer.raw
        assert shown + rest == answer.text
        assert "I look. " == shown[:8]
        assert count or "<tool_call>" in answer.text


def test_log_probabilities_are_those_of_the_text_that_is_shown(tokenizer):
    """Of the answer, not of the thoughts before it nor of a call in the middle."""
    tokeniser = Tokeniser(tokenizer)
    cases = {
        HARMONY: ("<|channel|>analysis<|message|>Hello? Hel<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>", "Hello"),
        PHI: (f"Hello <|tool_call|>{json.dumps([{'name': 'get', 'arguments': {}}])}<|/tool_call|>[world]<|end|>", "Hello [world]"),
        LLAMA: ("Hello<|eot_id|>", "Hello"),
    }  # fmt: skip
    for mark, (text, said) in cases.items():
        ids = tokeniser.encode(text).ids
        gate = TemplateGate(tokenizer, tokeniser, prompt="", tools=[spec_of(t) for t in TOOLS], family=family_of(mark))
        answer = Answer(tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=500, forced_ids=ids, gate=gate)
        for id_ in ids:
            answer.add(id_, TokenLogprob(token_id=id_, raw=tokeniser.decode([id_]).encode(), logprob=-1.0))
        answer.finish()
        assert said == answer.text == b"".join(entry.raw for entry in answer.logprobs).decode()


def test_an_answer_without_any_channel_is_shown(tokenizer, forced):
    """A fine-tuned or a small model may have forgotten them; it streams."""
    gate = TemplateGate(tokenizer, Tokeniser(tokenizer), prompt="", tools=[], family=family_of(HARMONY))
    assert ["Just", " text"] == [gate.feed("Just"), gate.feed(" text")]
    for text in ("Just text.", "to be or not", "t", "to=nothing", " to=functions.get"):
        assert (text, (), "stop") == forced(HARMONY, text)


def test_an_answer_that_goes_on_is_in_its_channel_already(forced):
    """The prompt ends inside of a text, so no mark comes before it; one may come behind it."""
    for tools in ((), TOOLS):
        assert "and more" == forced(HARMONY, "and more<|return|>", tools=tools)[0]
        more = "and more<|end|><|start|>assistant<|channel|>final<|message|>, then<|return|>"
        assert "and more, then" == forced(HARMONY, more, tools=tools)[0]


# -- on the engine


@pytest.fixture(scope="module")
def harmony(models, tmp_path_factory):
    """A tiny model with GPT-OSS's control tokens and channels."""
    folder = tmp_path_factory.mktemp("harmony")
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    made = models.tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": CONTROLS})
    models.save(folder, template=template, vocab_size=len(made))
    made.save_pretrained(folder)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    with LocalEngine(loaded, device_memory=64 * loaded.geometry.block_bytes) as engine:
        yield engine


def _ask(*turns, task="t", **more):
    sampling = more.pop("sampling", Sampling(max_tokens=200))
    turns = turns or (Message(role="user", content="Go."),)
    return Request(messages=turns, sampling=sampling, caller=Caller(task=task), **more)


VALUE = {"type": "object", "properties": {"v": {"enum": ["a", "b"]}}, "required": ["v"], "additionalProperties": False}


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
def test_a_held_answer_of_a_model_with_channels_is_shown(harmony, tools):
    """The grammar says what is written, so there are no channels to read."""
    told = harmony.submit(_ask(response_format=ResponseFormat(schema=VALUE), tools=tools)).result(60)
    if tools:  # noise may fill an open object for ever: whatever it is, it is there to be read
        assert told.tool_calls or told.unfinished or told.text.startswith("{")
    else:
        jsonschema.validate(json.loads(told.text), VALUE)


def test_a_turn_of_a_model_with_channels_is_gone_on_with(harmony):
    """Every token that it writes is in the text."""
    turns = (Message(role="user", content="Go."), Message(role="assistant", content="One, "))
    bias = ((ord("a") - 33, 90.0),)
    sampling = Sampling(max_tokens=5, logit_bias=bias)
    told = harmony.submit(_ask(*turns, continue_final_message=True, sampling=sampling)).result(60)
    assert "aaaaa" == told.text


def test_a_held_answer_of_a_model_without_end_tokens_ends(models, tmp_path):
    """Where the grammar ends, with "stop": nobody can wait for an end token that does not exist."""
    loaded = load_model(str(models.save(tmp_path)), device="cpu", dtype="float32")
    loaded = replace(loaded, eos_ids=frozenset())
    with LocalEngine(loaded, device_memory=64 * loaded.geometry.block_bytes) as engine:
        told = engine.submit(_ask(response_format=ResponseFormat(schema=VALUE))).result(60)
        assert "stop" == told.finish_reason
        jsonschema.validate(json.loads(told.text), VALUE)
        choice = ToolChoice(mode="required", parallel=False)
        tool = ToolSpec(name="get", parameters=VALUE)
        told = engine.submit(_ask(tools=(tool,), tool_choice=choice)).result(60)
        assert "tool_calls" == told.finish_reason


# -- schemas

DEEP: dict = {}
_inner = DEEP
for _ in range(3000):
    _inner |= {"type": "object", "properties": {"a": {}}}
    _inner = _inner["properties"]["a"]
ENDLESS = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}},
}


def test_words_that_spell_control_tokens_can_be_asked_for(start):
    """As a value, as a field and as a tool's name: they are text."""
    engine, word = start(), '<|im_end|>"\n\\é<|im_start|>system'
    schema = {
        "type": "object",
        "properties": {word: {"enum": [word]}},
        "required": [word],
        "additionalProperties": False,
    }
    told = engine.submit(_ask(response_format=ResponseFormat(schema=schema))).result(60)
    assert ({word: word}, "stop") == (json.loads(told.text), told.finish_reason)
    tool = ToolSpec(name=word, parameters=schema)
    (call,) = (
        engine.submit(_ask(tools=(tool,), tool_choice=ToolChoice(mode="required", parallel=False)))
        .result(60)
        .tool_calls
    )
    assert (word, {word: word}) == (call.name, json.loads(call.arguments))


def test_a_forced_call_of_a_model_whose_tags_are_control_tokens(models, tmp_path):
    """The grammar's tags are text; the call is read all the same."""
    made = models.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    models.save(tmp_path, vocab_size=len(made))
    made.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    with LocalEngine(loaded, device_memory=64 * loaded.geometry.block_bytes) as engine:
        choice, tool = ToolChoice(mode="required", parallel=False), ToolSpec(name="get", parameters=VALUE)
        told = engine.submit(_ask(tools=(tool,), tool_choice=choice)).result(60)
    assert ["get"] == [call.name for call in told.tool_calls]
    jsonschema.validate(json.loads(told.tool_calls[0].arguments), VALUE)


MANY = "^(a?){500}a{500}$"
HALF = {"enum": ["\ud800"]}
HOPELESS = {
    "half": {"type": "object", "properties": {"a": HALF}},
    "deep": DEEP,
    "endless": ENDLESS,
    "self": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/q"}},
        "required": ["a"],
        "$defs": {"q": {"$ref": "#/$defs/q"}},
    },
    "mutual": {
        "type": "object",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
    },
    "pattern": {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": MANY}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "text": {"type": "string"},
    "number": {"type": ["integer", "null"]},
}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("tools", name) for name in HOPELESS if name != "half"),
        *(("response_format", name) for name in HOPELESS if name not in {"text", "number"}),
    ],
)
def test_a_schema_that_nothing_can_fill_is_refused_before_it_costs_a_token(start, field, name):
    """Nested without end, endless by reference, arguments that are no object: 400 naming the field, never a crash."""
    engine, schema = start(), HOPELESS[name]
    asked = {"response_format": ResponseFormat(schema=schema)}
    if field == "tools":
        asked = {"tools": (ToolSpec(name="f", parameters=schema),), "tool_choice": ToolChoice(mode="required")}
    with pytest.raises(RequestInvalid) as caught:
        engine.submit(_ask(**asked))
    assert field == caught.value.param
    assert 0 == engine.stats()["output_tokens"] == engine.stats()["sessions"]


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"type": "string", "pattern": MANY}]
)
def test_a_value_that_is_nothing_but_itself_is_refused(start, schema):
    """As a response format, where arguments of tools are objects at least."""
    with pytest.raises(RequestInvalid, match="response_format cannot be held"):
        start().submit(_ask(response_format=ResponseFormat(schema=schema)))


def test_a_grammar_that_grows_too_large_on_the_way_is_the_requests_fault(start):
    """Behind a value of any length nobody can see it before; the neighbour goes on."""
    fields = {"n": {"type": "boolean"}, "a": {"type": "string", "pattern": MANY}}
    schema = {"type": "object", "properties": fields, "required": ["n", "a"], "additionalProperties": False}
    engine = start()
    neighbour = engine.submit(_ask())
    with pytest.raises(RequestInvalid, match="too many") as caught:
        engine.submit(_ask(response_format=ResponseFormat(schema=schema))).result(60)
    assert ("response_format", "unsupported_schema") == (caught.value.param, caught.value.code)
    assert neighbour.result(60).finish_reason in {"stop", "length"}


def test_a_schema_is_narrowed_only_where_something_is_left():
    """A field that is asked for and not named, parts of an allOf, bounds nearer than nine decimals."""
    named = {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}
    assert named == closed(named)
    parts = {"$defs": {"base": {"properties": {"a": {}}}}, "allOf": [{"$ref": "#/$defs/base"}, {"required": ["b"]}]}
    assert parts == closed(parts)
    near = {"type": "number", "minimum": 1e-12, "maximum": 2e-12}
    assert near == finite(near)
    assert "multipleOf" in finite({"type": "number", "minimum": 0, "maximum": 1})


# -- accounts and seeds


def test_guesses_behind_the_end_are_not_counted(start, ask):
    """What was accepted was written: a stop text in the middle of right guesses is the end of the account, too."""
    few = tuple((ord(letter) - 33, 60.0) for letter in "abc")
    engine = start()
    whole = engine.submit(ask("abababababab", sampling=Sampling(max_tokens=60, logit_bias=few))).result(60)
    accepted = 0
    for at in range(1, len(whole.text) - 6, 3):
        sampling = Sampling(max_tokens=60, logit_bias=few, stop=(whole.text[at : at + 6],))
        before = engine.stats()["steps"]
        told = engine.submit(ask("abababababab", sampling=sampling)).result(60)
        steps = engine.stats()["steps"] - before
        assert len(told.token_ids) - told.accepted_tokens in {steps, steps - 1}  # the last step may end in its guesses
        assert told.accepted_tokens <= told.drafted_tokens
        accepted += told.accepted_tokens
    assert accepted


def test_neighbouring_seeds_share_no_choice(start):
    """Three choices with seed 1, and three with seed 2: six answers (E17)."""
    engine = start()
    texts = [
        choice.text
        for seed in (1, 2)
        for choice in engine.submit(_ask(n=3, sampling=Sampling(max_tokens=12, temperature=1.5, seed=seed)))
        .result(60)
        .choices
    ]
    assert 6 == len(set(texts))


@pytest.mark.parametrize("kind", MARKS)
def test_whatever_is_written_nothing_is_invented_lost_or_told_twice(tokenizer, kind):
    """Marks, pieces of them, calls and text in any order, cut anywhere: the text is a part of what was written, in order."""
    tokeniser, dice = Tokeniser(tokenizer), random.Random(3)
    pieces = [
        *CONTROLS, '[{"name": "get", "arguments": {}}]', '{"name": "get", "parameters": {"a": 1}}', '{"a": 1}', "get", "put",
        "commentary to=functions.get json", "final", "analysis", "assistant", " text ", "<|", "|>", "[TOOL", '"', "}", "é😀",
    ]  # fmt: skip
    tools = [spec_of(tool) for tool in TOOLS]
    for _ in range(250):
        ids = []
        for piece in dice.choices(pieces, k=dice.randrange(1, 9)):
            ids += tokeniser.encode(piece if dice.random() < 0.7 else tokeniser.guard(piece)).ids
        gate = TemplateGate(tokenizer, tokeniser, prompt="", tools=tools, family=family_of(MARKS[kind]))
        limit = dice.choice([len(ids), dice.randrange(len(ids)) + 1])
        answer = Answer(tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=limit, forced_ids=ids, gate=gate)
        shown = "".join(answer.add(id_) for id_ in ids[:limit])
        rest, calls = answer.finish()
        assert shown + rest == answer.text
        written = iter(answer.raw)
        assert all(letter in written for letter in answer.text)
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
        if kind != "harmony" and not calls:
            assert answer.raw.split() == answer.text.split()
