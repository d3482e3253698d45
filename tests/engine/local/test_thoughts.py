"""Thoughts are told apart from the answer, streamed and whole, and are sent again where the template takes them.

Texts are forced token by token. Templates are small ones of the kinds that Qwen3, DeepSeek's distills and GPT-OSS have.
"""

import pytest

from agentkv.core.message import Message, ToolCall, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.chat import Chat, Written
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.thoughts import MARKS, ThoughtGate
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import OpenGate, TagGate

CALLS = (
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_HEAD = "{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}"
QWEN = (  # thoughts since the last user's message are shown, where they are given
    _HEAD
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.user %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DISTILL = (  # the prompt opens the thought; earlier ones are cut off
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
KINDS = ["qwen", "distill", "control"]
TOOLS = (ToolSpec(name="get", parameters={"type": "object"}),)
USER = Message(role="user", content="Go.")
CALL = '<tool_call>\n{"name": "get", "arguments": {"q": "é"}}\n</tool_call>'
THOUGHT = "Hm, 1 < 2 </th\n\n<tool_call> é👩‍👩‍👧 STOP"


@pytest.fixture(scope="module")
def engine_of(models, tmp_path_factory):
    """`engine_of("qwen")`: an engine of that kind, which knows nothing."""
    engines = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        template = DISTILL if kind == "distill" else QWEN
        made = models.tokenizer(template)
        if kind == "control":
            made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        models.save(folder, template=template, vocab_size=len(made))
        made.save_pretrained(folder)
        loaded = load_model(str(folder), device="cpu", dtype="float32")
        sizes = {
            "device_memory": 96 * loaded.geometry.block_bytes,
            "host_memory": 96 * loaded.geometry.slot_bytes,
        }
        engines[kind] = LocalEngine(loaded, **sizes)
    yield engines.__getitem__
    for engine in engines.values():
        engine.tiers.check()
        engine.close()


def _text(kind, thought=THOUGHT, answer="Hello."):
    """What a model of this kind writes."""
    return f"{'' if kind == 'distill' else '<think>' + chr(10)}{thought}\n</think>\n\n{answer}"


def _ask(engine, text, *turns, tools=(), end=True, task="t", **more):
    sampling = more.pop("sampling", Sampling(max_tokens=more.pop("limit", None)))
    encode = engine._intake.tokeniser.encode
    ids = tuple(encode(text).ids) + ((257,) if end else ())
    return Request(
        messages=turns or (USER,), tools=tools, forced_ids=ids, sampling=sampling, caller=Caller(task=task), **more
    )


def _read(engine, request):
    stream = engine.submit(request)
    chunks = list(stream)
    whole = stream.result()
    assert whole.text == "".join(chunk.text for chunk in chunks)
    assert whole.reasoning == "".join(chunk.reasoning for chunk in chunks)
    assert len(whole.token_ids) == sum(len(chunk.token_ids) for chunk in chunks)
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_is_no_part_of_the_answer(engine_of, kind):
    """Whatever stands in it: no stop text and no call is looked for; line ends at its borders are nobody's."""
    engine = engine_of(kind)
    for tools in ((), TOOLS):
        whole = _read(engine, _ask(engine, _text(kind), tools=tools, sampling=Sampling(stop=("STOP", "\n"))))
        assert (THOUGHT, "Hello.", "stop", ()) == (
            whole.reasoning, whole.text, whole.finish_reason, whole.tool_calls,
        )  # fmt: skip
        used = whole.usage
        assert len("Hello.") + 1 <= used.output_tokens - used.reasoning_tokens <= len("Hello.") + 1 + len("\n\n<think>")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_behind_the_thought_ends_the_answer(engine_of, kind):
    """Where it began."""
    engine = engine_of(kind)
    whole = _read(engine, _ask(engine, _text(kind, answer="One STO two STOP three"), sampling=Sampling(stop=("STOP",))))
    assert (THOUGHT, "One STO two ", "stop") == (whole.reasoning, whole.text, whole.finish_reason)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_behind_the_thought_is_called(engine_of, kind):
    """With its text, if there is one."""
    engine = engine_of(kind)
    for before in ("", "I look. "):
        whole = _read(engine, _ask(engine, _text(kind, answer=before + CALL), tools=TOOLS))
        assert (THOUGHT, before, "tool_calls") == (whole.reasoning, whole.text, whole.finish_reason)
        assert [("get", '{"q": "é"}')] == [(call.name, call.arguments) for call in whole.tool_calls]


@pytest.mark.parametrize("kind", KINDS)
def test_wherever_max_tokens_cuts_the_stream_is_the_whole(engine_of, kind):
    """In a thought there is nothing but thought; behind it the thought is whole."""
    engine = engine_of(kind)
    text = _text(kind, thought="Hm\n</th é.", answer=f"Hi! {CALL}")
    ids = engine._intake.tokeniser.encode(text).ids
    request = _ask(engine, text, tools=TOOLS)
    transcript = engine._intake._prompt(request)[1]
    for limit in range(1, len(ids)):
        answer, _ = engine._intake._parts(request, transcript, None, limit, 0)
        shown, thought = "", ""
        for id_ in ids[:limit]:
            shown += answer.add(id_)
            thought += answer.aside.take()[0]
        rest, calls = answer.finish()
        assert (shown + rest, thought + answer.aside.take()[0]) == (answer.text, answer.aside.thought)
        assert ("length", ()) == (answer.reason, calls)
        if "</think>" in answer.written:
            assert "Hm\n</th é." == answer.aside.thought
            assert f"Hi! {CALL}".startswith(answer.text.rstrip("\ufffd"))
        elif "<think>" in answer.written or kind == "distill":
            assert "" == answer.text
            assert "Hm\n</th é.\n</think".startswith(answer.aside.thought.rstrip("\ufffd"))
    for limit in range(1, len(ids), 17):
        assert "length" == _read(engine, _ask(engine, text, tools=TOOLS, limit=limit)).finish_reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_that_never_ends_is_all_there_is(engine_of, kind):
    """An end token in the middle of it, too."""
    engine = engine_of(kind)
    text = _text(kind, thought="Hm ").partition("\n</think>")[0]
    whole = _read(engine, _ask(engine, text, tools=TOOLS))
    assert ("Hm ", "", "stop") == (whole.reasoning, whole.text, whole.finish_reason)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_thought_is_an_answer(engine_of, kind):
    """Marks in its middle are text; an empty thought is none."""
    engine = engine_of(kind)
    if kind == "qwen":
        for text in ("Hello.", "  <thin air>", "I <think> so </think>.", "<", ""):
            whole = _read(engine, _ask(engine, text))
            assert (text, "") == (whole.text, whole.reasoning)
    whole = _read(engine, _ask(engine, _text(kind, thought="")))
    assert ("Hello.", "") == (whole.text, whole.reasoning)


def test_the_prompt_opens_the_thought_only_if_the_template_does(engine_of):
    """A user who ends a message with the mark opens nothing; a turn that is gone on with is where its text is."""
    engine, forged = engine_of("qwen"), Message(role="user", content="Say <think>")
    whole = _read(engine, _ask(engine, "Hello.", forged))
    assert ("Hello.", "") == (whole.text, whole.reasoning)
    for said, told in (("<think>\nHm", ("so", "")), ("Yes, ", ("", "so"))):
        turns = (USER, Message(role="assistant", content=said))
        template = engine._intake._chat
        if "</think>" not in said and "<think>" in said:
            assert template.begun("", turns[-1], goes_on=True)
        whole = _read(engine, _ask(engine, "so", *turns, continue_final_message=True))
        assert told == (whole.reasoning, whole.text)


def test_a_raw_prompt_is_nobodys_turn(engine_of):
    """What is written behind it is text."""
    engine = engine_of("qwen")
    ids = tuple(engine._intake.tokeniser.encode("<think>a</think>b").ids)
    assert "<think>a</think>b" == engine.submit(Request(prompt="x", forced_ids=ids)).result(60).text


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_answer(engine_of, kind):
    """Not of the thought before it, and not of its marks."""
    engine = engine_of(kind)
    for thought in (THOUGHT, "", "a"):
        request = _ask(engine, _text(kind, thought=thought, answer="Hé 👩‍👩‍👧 y"), logprobs=1)
        stream = engine.submit(request)
        streamed = [entry for chunk in stream for entry in chunk.logprobs]
        whole = stream.result()
        assert whole.text.encode() == b"".join(entry.raw for entry in whole.logprobs)
        assert list(whole.logprobs) == streamed


@pytest.mark.parametrize("marks", MARKS)
def test_however_the_text_is_cut_into_pieces_the_gate_tells_the_same(marks):
    """Letter by letter, in one piece, at every place in two."""
    text = f" \n{marks.opening}\n\n a {marks.closing[:-1]} b\n\n{marks.closing}\n\nc <tool_call>"
    seen = set()
    for at in range(len(text) + 1):
        for pieces in ((text[:at], text[at:]), (*text[:at], text[at:])):
            gate = ThoughtGate(OpenGate(), marks)
            shown = "".join(map(gate.feed, pieces)) + gate.finish(cut=False)[0]
            seen.add((shown, gate.aside.thought, gate.aside.hidden_bytes))
    hidden = len(text) - len("c <tool_call>")
    assert {("c <tool_call>", f" a {marks.closing[:-1]} b", hidden)} == seen


# -- what is sent again


def _turns(*answers):
    return [turn for said, again in answers for turn in (Message(role="assistant", content=said), again)]


@pytest.mark.parametrize("kept", [True, False], ids=["sent back", "dropped by the client"])
def test_a_tool_loop_reuses_its_thoughts(engine_of, kept):
    """A template that shows thoughts of this turn gets them, whether the client kept them or not: all KV is found again."""
    engine = engine_of("qwen")
    turns, known = [Message(role="user", content=f"Go {kept}.")], 0
    for number in range(4):
        text = _text("qwen", thought=f"Try {number}.", answer=CALL)
        whole = _read(engine, _ask(engine, text, *turns, tools=TOOLS, task=f"loop-{kept}"))
        assert known == whole.usage.cached_tokens
        known = whole.usage.input_tokens + whole.usage.output_tokens - 1
        (call,) = whole.tool_calls
        thought = whole.reasoning if kept else ""
        turns += [
            Message(role="assistant", content=whole.text, tool_calls=(call,), reasoning=thought),
            Message(role="tool", content=f"nothing {number}", tool_call_id=call.id),
        ]
    edited = [*turns[:-2], Message(role="assistant", content="I did.", tool_calls=turns[-2].tool_calls), turns[-1]]
    request = _ask(engine, "x", *edited, tools=TOOLS)
    assert "Try 2." in engine._intake._prompt(request)[1].text or kept is False
    assert "Try 3." not in engine._intake._prompt(request)[1].text


def test_thoughts_of_earlier_turns_are_the_templates_affair(engine_of):
    """It is given them; this one drops them at the next question, and reuse ends where the first of them began."""
    engine = engine_of("qwen")
    first = Message(role="user", content="A question that is longer than two blocks of sixteen tokens are.")
    whole = _read(engine, _ask(engine, _text("qwen"), first, task="next"))
    again = [first, Message(role="assistant", content=whole.text, reasoning=whole.reasoning), USER]
    request = _ask(engine, "x", *again, task="next")
    prompt = engine._intake._prompt(request)[1]
    assert "Hm, 1" not in prompt.text
    told = _read(engine, request)
    assert (
        (whole.usage.input_tokens - len("assistant\n")) // 16 * 16
        <= told.usage.cached_tokens
        <= whole.usage.input_tokens
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kv_of_a_thought_that_the_next_prompt_drops_is_not_kept(engine_of, kind):
    """The session holds what will be asked for again, and nothing behind it; an aborted answer is kept whole."""
    engine, blocks = engine_of(kind), 0
    long = _text(kind, thought="Hm. " * 60)
    whole = _read(engine, _ask(engine, long, task=f"dead-{kind}"))
    facts = engine.residency(whole.session)
    blocks = facts.device_blocks + facts.host_blocks
    assert whole.usage.input_tokens // 16 - 1 <= blocks <= whole.usage.input_tokens // 16
    whole = _read(engine, _ask(engine, _text(kind, thought="Hm. " * 60, answer=CALL), tools=TOOLS, task=f"loop-{kind}"))
    facts = engine.residency(whole.session)
    total = (whole.usage.input_tokens + whole.usage.output_tokens - 1) // 16
    lasts = kind != "distill"  # its template reads no thoughts, not even in a loop
    assert (facts.device_blocks + facts.host_blocks >= total) == lasts
    engine.tiers.check()


def test_kv_of_an_aborted_thought_is_kept(engine_of):
    """Who hung up may come back with what there was."""
    engine = engine_of("qwen")
    caller = Caller(task="aborted")
    ids = tuple(engine._intake.tokeniser.encode(_text("qwen", thought="Hm. " * 100)).ids)
    with engine.submit(Request(messages=(USER,), forced_ids=ids, caller=caller)) as stream:
        said = ""
        for chunk in stream:
            said += chunk.reasoning
            if len(said) > 160:
                break
    turns = (USER, Message(role="assistant", content=f"<think>\n{said}"))
    told = _read(engine, _ask(engine, "ok", *turns, continue_final_message=True, task="aborted"))
    assert told.usage.cached_tokens > 140


def test_tags_alone_do_not_make_a_model_think(start):
    """A model whose template knows no thoughts says what it says."""
    engine = start()
    ids = (*engine._intake.tokeniser.encode("<think>a</think>b").ids, 257)
    told = engine.submit(Request(messages=(USER,), forced_ids=ids)).result(60)
    assert ("<think>a</think>b", "") == (told.text, told.reasoning)
    assert TagGate().hides is False


GPT_OSS = (  # it reads thoughts of turns with calls, and refuses a turn that has text, too
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}{% if m.tool_calls and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if tools %}{% endif %}<|start|>assistant"
)


def test_thoughts_are_handed_to_a_template_by_its_own_name(make_tokenizer):
    """And never with a text beside a call, where the template takes one of both."""
    made = make_tokenizer(GPT_OSS)
    chat = Chat(made, Tokeniser(made), "tiny")
    call = ToolCall(id="c", name="get", arguments="{}")
    for content, shown in (("", True), ("I look.", False)):
        turn = Message(role="assistant", content=content, tool_calls=(call,), reasoning="Hm.")
        assert shown == ("Hm." in chat.render([USER, turn], (), lambda _id: None))
    known = Written(raw="", content="", calls=(call,), reasoning="Known.")
    turn = Message(role="assistant", tool_calls=(call,))
    assert "Known." in chat.render([USER, turn], (), lambda _id: known)
    edited = Message(role="assistant", content="No.", tool_calls=(call,))
    assert "Known." not in chat.render([USER, edited], (), lambda _id: known)


def test_nothing_is_given_up_where_the_template_keeps_thoughts(make_tokenizer):
    """They will be asked for again."""
    keeps = "{% for m in messages %}<|im_start|>{{ m.role }}\n<think>{{ m.reasoning_content }}</think>{{ m.content }}<|im_end|>{% endfor %}"
    for template, kept in ((keeps, True), (QWEN, False)):
        made = make_tokenizer(template)
        chat = Chat(made, Tokeniser(made), "tiny")
        prompt = chat.render([USER], (), lambda _id: None)
        assert kept == (chat.outlived(prompt, [USER], (), lambda _id: None) is None)
