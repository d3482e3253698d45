"""Calls that a grammar holds are told while they are written, and say at the end what they said on the way (E14 to E16)."""

import json
import random

import pytest
import torch
from tokenizers import pre_tokenizers

from agentkv.core.message import Message, ToolSpec
from agentkv.core.task import Caller
from agentkv.engine.base import Request, ResponseFormat, Sampling, ToolChoice
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.grammar import grammar_of
from agentkv.engine.local.guide import Guides
from agentkv.engine.local.held import HeldGate
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.toolcalls import TagGate, parse
from agentkv.errors import ModelError

NAMES = ("get", 'put "it"', "gé")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOOLS = tuple(ToolSpec(name=name, parameters={"type": "object"}) for name in NAMES)
EVIL = ["}}</tool_call>", '<tool_call>{"name": "get"', "a\nb\\", '"', "\\", "{[", "é👩‍👩‍👧", "", "STOP", "\ud83d", "]}"]


def _spelled(name, arguments):
    return f'<tool_call>{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}</tool_call>'


def _arguments(dice, depth=0):
    """Some JSON object, in the one spelling that a grammar allows."""

    def value(depth):
        kind = dice.randrange(6 if depth < 3 else 4)
        if kind == 4:
            return [value(depth + 1) for _ in range(dice.randrange(3))]
        if kind == 5:
            return {key: value(depth + 1) for key in dice.sample(EVIL, dice.randrange(3))}
        return [dice.choice(EVIL), dice.choice([0, -1.5, 10**9]), True, None][kind]

    return json.dumps(
        {key: value(depth) for key in dice.sample(EVIL, dice.randrange(4))}, ensure_ascii=dice.random() < 0.5
    )


class Told:
    """What a reader of the stream has seen of an answer, put together as clients do it."""

    def __init__(self) -> None:
        self.text, self.calls, self.ids = "", {}, []

    def take(self, text, deltas) -> None:
        self.text += text
        for delta in deltas:
            if delta.id:
                assert (len(self.calls), "") == (delta.index, delta.arguments)
                self.calls[delta.index] = [delta.name, ""]
                self.ids.append(delta.id)
            assert delta.id or delta.arguments
            self.calls[delta.index][1] += delta.arguments


def _write(tokenizer, written, *, among="text", stop=(), limit=10_000):
    """(what streamed, the answer, its calls) of an answer that is forced to be `written`."""
    tokeniser = Tokeniser(tokenizer)
    ids = tokeniser.encode(written).ids
    gate = HeldGate(TOOLS, among=among)
    answer = Answer(
        tokeniser, prompt_ids=[], eos_ids=frozenset(), max_tokens=limit, stop=stop, forced_ids=ids, gate=gate
    )
    told = Told()
    for id_ in ids:
        text = answer.add(id_)
        told.take(text, answer.aside.take()[1])
        if answer.reason is not None:
            break
    rest, calls = answer.finish()
    told.take(rest, answer.aside.take()[1])
    return told, answer, calls


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer()


def test_pieces_add_up_to_the_call_whatever_its_arguments(tokenizer):
    """Tags, braces, quotes and line ends inside of strings; text and calls in any order; as a reader of the whole finds it."""
    dice = random.Random(5)
    for _ in range(150):
        parts = [dice.choice(["", " ", "I look.\n", "\n<tool", "é "])]
        for _ in range(dice.randrange(5)):
            parts += [_spelled(dice.choice(NAMES), _arguments(dice)), dice.choice(["", "\n", " then ", "<"])]
        written = "".join(parts).encode("utf-8", "replace").decode()
        told, answer, calls = _write(tokenizer, written)
        head, _, _ = written.partition("<tool_call>{")
        text, wanted = parse(written[len(head) :])
        assert [(w.name, w.arguments) for w in wanted] == [(call.name, call.arguments) for call in calls]
        assert [[call.name, call.arguments] for call in calls] == list(told.calls.values())
        assert [call.id for call in calls] == told.ids
        assert told.text == answer.text == head + text
        assert () == answer.unfinished
        assert written == answer.raw


@pytest.mark.parametrize("among", ["text", "calls"])
def test_a_call_is_told_while_it_is_written(tokenizer, among):
    """Its name before its arguments, and each letter of these when it is there, but for the last brace."""
    tokeniser = Tokeniser(tokenizer)
    gate = HeldGate(TOOLS, among=among)
    written = _spelled("get", '{"q": "abc"}')
    seen = []
    for letter in written:
        gate.feed(letter)
        seen += [(delta.name, delta.arguments) for delta in gate.aside.take()[1]]
    assert [("get", "")] + [("", letter) for letter in '{"q": "abc"}'] == seen
    assert tokeniser.control(0) is None


@pytest.mark.parametrize("among", ["text", "calls"])
def test_wherever_a_call_is_cut_it_is_none(tokenizer, among):
    """The reason is the length, what streamed stays what it was, it is no JSON, and nobody is given it to run (E16)."""
    one, two = _spelled("get", '{"a": "}", "b": {}}'), _spelled('put "it"', '{"c": [1, {"d": "\\""}]}')
    written = f"{one}\n{two}"
    for limit in range(1, len(written) + 1):
        told, answer, calls = _write(tokenizer, written, among=among, limit=limit)
        whole = limit in (len(one), len(written)) or (among == "text" and len(one) <= limit < len(one) + 12)
        assert ("tool_calls" if whole else "length") == answer.reason, limit
        assert bool(calls) == whole
        assert [[call.name, call.arguments] for call in calls or answer.unfinished] == list(told.calls.values())
        assert [call.id for call in calls or answer.unfinished] == told.ids
        assert told.text == answer.text
        inside = len(one) + 12 < limit
        if not whole and told.calls and (inside or limit < len(one)):
            *before, last = told.calls.values()
            assert all(json.loads(call[1]) is not None for call in before)
            if len(told.calls) == 1 + inside:
                with pytest.raises(ValueError, match=r"."):
                    json.loads(last[1])


def test_a_stop_text_inside_of_a_held_call_is_an_argument(tokenizer):
    """Around it, it ends the answer; a stop text that begins in the text counts before the call."""
    call = _spelled("get", '{"q": "STOP"}')
    told, answer, calls = _write(tokenizer, f"Look: {call} and STOP here", stop=("STOP",))
    assert ("Look: and", ["get"], "tool_calls") == (told.text, [call.name for call in calls], answer.reason)
    assert '{"q": "STOP"}' == told.calls[0][1]
    assert told.text == answer.text
    told, answer, calls = _write(tokenizer, f"STO {call}", stop=("STOP",))
    assert ("STO ", 1) == (told.text, len(calls))
    told, answer, calls = _write(tokenizer, f"STOP {call}", stop=("STOP",))
    assert ("", (), "stop") == (told.text, calls, answer.reason)
    told, answer, calls = _write(tokenizer, call, stop=("<tool_call>",))
    assert ("", (), "stop") == (told.text, calls, answer.reason)
    told, answer, calls = _write(tokenizer, call, stop=("<tool_call>", "{"), among="calls")
    assert 1 == len(calls)


def test_calls_may_stand_in_a_json_value(tokenizer):
    """Where the answer is a value or calls, tags inside of a value are text."""
    value = json.dumps({"a": _spelled("get", "{}")})
    for among in ("value", "text"):
        told, _, calls = _write(tokenizer, value if among == "value" else "no <tool_call", among=among)
        assert () == calls
        assert (value if among == "value" else "no <tool_call") == told.text
    told, _, calls = _write(tokenizer, _spelled("get", "{}"), among="value")
    assert ("", 1) == (told.text, len(calls))


def test_what_keeps_no_grammar_is_an_error():
    """It cannot come; if it does, nobody is told something that is wrong."""
    for bad in ("nonsense", '{"name": "other", '):
        with pytest.raises(ModelError, match="held call begins"):
            HeldGate(TOOLS, among="calls").feed(f"<tool_call>{bad}")
    gate = HeldGate(TOOLS, among="calls")
    with pytest.raises(ModelError, match="held call ends"):
        gate.feed('<tool_call>{"name": "get", "arguments": {}, "more": 1}</tool_call>')


# -- on the engine

GET = ToolSpec(
    name="get", strict=True,
    parameters={
        "type": "object", "required": ["path", "deep"],
        "properties": {"path": {"const": 'a "}}</tool_call>\\.py'}, "deep": {"const": {"x": [1, {"y": "é"}]}}},
    },
)  # fmt: skip
ARGUMENTS = '{"path": "a \\"}}</tool_call>\\\\.py", "deep": {"x": [1, {"y": "é"}]}}'
_USER = Message(role="user", content="Go.")


def _ask(task="t", **more):
    sampling = more.pop("sampling", Sampling(max_tokens=400))
    return Request(messages=(_USER,), tools=(GET,), sampling=sampling, caller=Caller(task=task), **more)


def _read(stream):
    told = [Told() for _ in range(4)]
    chunks = 0
    for chunk in stream:
        told[chunk.choice].take(chunk.text, chunk.calls)
        chunks += bool(chunk.calls)
    return told, stream.result(), chunks


REQUIRED = ToolChoice(mode="required")


def _several():
    """Two tools that may be called eight times in a turn; a line end is what this model likes best."""
    empty = {"type": "object", "properties": {}}
    tools = tuple(ToolSpec(name=name, parameters=empty) for name in ("a", "b"))
    line_end = next(id_ for id_, letter in enumerate(LETTERS) if letter == "Ċ")
    sampling = Sampling(max_tokens=480, logit_bias=((line_end, 90.0),))
    return Request(messages=(_USER,), tools=tools, tool_choice=REQUIRED, sampling=sampling, caller=Caller(task="s"))


def test_a_required_call_streams_from_its_first_token(start):
    """In several pieces, which add up to the whole, with the id that it keeps."""
    told, whole, chunks = _read(start().submit(_ask(tool_choice=REQUIRED)))
    (call,) = whole.tool_calls
    assert chunks > 3
    assert {0: ["get", ARGUMENTS]} == told[0].calls
    assert (ARGUMENTS, [call.id], "") == (call.arguments, told[0].ids, told[0].text)
    assert json.loads(ARGUMENTS)["path"] == 'a "}}</tool_call>\\.py'


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": REQUIRED, "n": 3},
        {"tool_choice": ToolChoice(mode="required", names=("get",))},
        {"tool_choice": ToolChoice(parallel=False)},
        {"tool_choice": REQUIRED, "response_format": ResponseFormat()},
        {},
    ],
    ids=["three choices", "named", "not parallel", "with a format", "strict"],
)
def test_however_calls_are_held_the_stream_is_the_whole(start, more):
    """Whatever this model writes, text or calls."""
    engine = start()
    for seed in range(3):
        sampling = Sampling(max_tokens=300, temperature=1.0, seed=seed)
        told, whole, _ = _read(engine.submit(_ask(sampling=sampling, **more)))
        for choice, seen in zip(whole.choices, told, strict=False):
            calls = choice.tool_calls or choice.unfinished
            assert choice.text == seen.text
            assert [[call.name, call.arguments] for call in calls] == list(seen.calls.values())
            assert [call.id for call in calls] == seen.ids


@pytest.mark.parametrize("parallel", [True, False])
def test_behind_the_tag_nothing_but_a_call_can_be_written(tiny, parallel):
    """What makes it safe to tell a call that the model began by itself, in the middle of its text."""
    tokeniser = Tokeniser(tiny.tokenizer)
    guides = Guides(tokeniser, vocabulary=259, eos_ids=[257])
    guide = guides.guide(grammar_of(_ask(tool_choice=ToolChoice(parallel=parallel))))
    call = _spelled("get", ARGUMENTS)
    for letter in tiny.ids("I look. <tool_call>"):
        assert (guide.mask(torch.zeros(259)) == 0).sum() > 100
        guide.accept(letter)
    for letter in tiny.ids(call)[len("<tool_call>") :]:
        assert [letter] == (guide.mask(torch.zeros(259)) == 0).nonzero().flatten().tolist()
        guide.accept(letter)
    assert guide.ended == (not parallel)


def test_several_calls_have_indexes_and_ids_of_their_own(start):
    """0 to 7, each id once in the task, over turns, too (E15)."""
    engine, ids = start(blocks=128), []
    for _ in range(2):
        told, whole, _ = _read(engine.submit(_several()))
        assert list(range(8)) == list(told[0].calls)
        assert [call.id for call in whole.tool_calls] == told[0].ids
        assert all(isinstance(json.loads(call[1]), dict) for call in told[0].calls.values())
        ids += told[0].ids
    assert 16 == len(set(ids))


def test_every_place_at_which_max_tokens_may_cut(start):
    """Until the call is complete the reason is the length, and there is no call to run (E16)."""
    engine = start()
    total = len(engine.submit(_ask(tool_choice=REQUIRED)).result(60).token_ids) - 1
    for limit in range(1, total + 1):
        told, whole, _ = _read(engine.submit(_ask(tool_choice=REQUIRED, sampling=Sampling(max_tokens=limit))))
        if limit == total:
            assert ("tool_calls", 1, ()) == (whole.finish_reason, len(whole.tool_calls), whole.unfinished)
            continue
        assert ("length", (), "") == (whole.finish_reason, whole.tool_calls, whole.text)
        assert [[call.name, call.arguments] for call in whole.unfinished] == list(told[0].calls.values())
        for call in whole.unfinished:  # half a character at the end is shown as U+FFFD, as in any text
            assert ARGUMENTS.startswith(call.arguments.rstrip("\ufffd"))
            assert call.arguments != ARGUMENTS


def test_a_free_call_comes_whole(start, tiny):
    """Half of one may turn out to be text, so nothing is told before its end."""
    engine = start()
    ids = (*tiny.ids(f"I look. {_spelled('get', ARGUMENTS)}"), 257)
    told, whole, _ = _read(engine.submit(_ask(forced_ids=ids)))
    assert ({}, "I look. ", 1) == (told[0].calls, told[0].text, len(whole.tool_calls))


def test_tags_and_gates_agree():
    """The gate of free calls finds in held text what the gate of held ones told."""
    dice = random.Random(9)
    for _ in range(100):
        text = "\n".join(_spelled(dice.choice(NAMES), _arguments(dice)) for _ in range(dice.randrange(1, 4)))
        free, held = TagGate(), HeldGate(TOOLS, among="calls")
        assert ("", "") == (free.feed(text), held.feed(text))
        found, told = free.finish(cut=False)[1], held.finish(cut=False)[1]
        assert [(one.name, one.arguments) for one in found] == [(one.name, one.arguments) for one in told]
