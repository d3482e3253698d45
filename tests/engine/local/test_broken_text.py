"""Text of tokens that are bytes and no characters: cut anywhere, broken anywhere (E10, E13).

The oracle knows each token's bytes and reads them with Python's own decoder; it never asks the tokenizer.
"""

from __future__ import annotations

import codecs
import itertools
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import models as kinds

from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling, TokenLogprob
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.detokenise import Detokeniser
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.engine.local.thoughts import MARKS, ThoughtGate
from agentkv.engine.local.tokeniser import MARK, Tokeniser
from agentkv.engine.local.toolcalls import TagGate

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
PIECES = [b"ab", b" a", b" hello", b"x\xf0", b"\x9f\x98", b"\x80y", b"\xc3\xa9", b"\xa9\xc3", b"\xef\xbf", b"\xff\xff"]
_numbers = itertools.count()


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and what its tokens are: bytes, or None for a control token."""

    tokeniser: Tokeniser
    spelled: dict[int, bytes | None]
    strips: bool = False

    def text(self, ids, prompt=()) -> str:
        """What `ids` are as text: bytes up to the next control token are read together, by a decoder that gets them
        one by one. Some tokenizers leave a space out that is the first thing of all.
        """
        read = codecs.getincrementaldecoder("utf-8")("replace")
        told = ""
        for id_ in ids:
            raw = self.spelled[id_]
            told += read.decode(b"", final=True) if raw is None else ""
            told += "".join(read.decode(bytes([byte])) for byte in raw or b"")
        told += read.decode(b"", final=True)
        alone = self.strips and all(self.spelled[id_] is None for id_ in prompt)
        return told.removeprefix(" ") if alone else told

    def written(self, ids, prompt=()) -> str:
        """The same with control tokens in their places; what a transcript marks spelled ones with is no text of it."""
        ids, told = list(ids), ""
        for place, id_ in enumerate([*ids, None]):
            if id_ is None or self.spelled[id_] is None:
                start = max((n + 1 for n in range(place) if self.spelled[ids[n]] is None), default=0)
                told += self.text(ids[start:place], [*prompt, *ids[:start]]).replace(MARK, "\ufffd")
                told += "" if id_ is None else self.tokeniser.control(id_)
        return told

    def logprob(self, id_) -> TokenLogprob:
        return TokenLogprob(token_id=id_, raw=self.spelled[id_] or b"", logprob=-1.0)

    def detokeniser(self, prompt=()) -> Detokeniser:
        return Detokeniser(self.tokeniser.decode, prompt, self.tokeniser.byte_ids)


def _fallback(models, *, strips) -> Kind:
    spelled: dict[int, bytes | None] = {byte: bytes([byte]) for byte in range(256)}
    spelled |= dict.fromkeys((256, 257, 258))
    spelled |= {259 + number: word.replace("▁", " ").encode() for number, word in enumerate(models.WORDS)}
    return Kind(Tokeniser(models.fallback_tokenizer(strips=strips)), spelled, strips)


def _byte_level() -> Kind:
    """A token for each byte, and some of several bytes, which begin and end inside of characters."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    raws = [bytes([byte]) for byte in range(256)] + PIECES
    vocab = {"".join(letters[byte] for byte in raw): number for number, raw in enumerate(raws)}
    backend = Tokenizer(kinds.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    spelled: dict[int, bytes | None] = {**dict(enumerate(raws)), len(raws): None}
    return Kind(Tokeniser(SimpleNamespace(backend_tokenizer=backend)), spelled)


@pytest.fixture(scope="module", params=["strips", "keeps", "byte level"])
def kind(request, models):
    """Llama 2's kind, Gemma's and GPT-2's."""
    return _byte_level() if request.param == "byte level" else _fallback(models, strips=request.param == "strips")


_CHARACTERS = st.sampled_from(["é", "好", "😀", "\ufffd", "👨‍👩‍👧", "\x00", " ", "▁", "a"]) | st.characters(
    exclude_categories=["Cs"]
)
_BYTES = (
    _CHARACTERS.map(str.encode)
    | st.sampled_from("é好😀".encode()).map(lambda byte: bytes([byte]))
    | st.binary(max_size=4)
)
_LARGE = st.integers(256, 270)
"""Words, pieces and control tokens, where a tokenizer has one of that number."""
_IDS = st.lists(_BYTES.map(list) | _LARGE.map(lambda id_: [id_]), max_size=12).map(
    lambda runs: list(itertools.chain(*runs))
)


def _known(kind, ids):
    return [id_ for id_ in ids if id_ in kind.spelled]


def _pieces(kind, ids, prompt):
    detokeniser = kind.detokeniser(prompt)
    for id_ in ids:
        yield detokeniser.finish() if kind.spelled[id_] is None else detokeniser.feed(id_)
    yield detokeniser.finish()
    assert "" == detokeniser.finish()


@PATIENT
@given(ids=_IDS, prompt=_IDS)
@example(ids=[263, 263], prompt=list("你好".encode()))
@example(ids=list("😀😁".encode())[:5], prompt=[260])
@example(ids=[255] * 11 + list("😀".encode()) + [97], prompt=[])
@example(ids=[0xF0] * 40 + list("é".encode()), prompt=[97])
@example(ids=[0x98, 0x80, 97], prompt=[97, 0xF0, 0x9F])
@example(ids=[263], prompt=[97] + [256] * 9)
@example(ids=[0xED, 0xA0, 0x80, 97], prompt=[])
@example(ids=[0xF0, 266, 0x9F, 0x98, 0x80, 97], prompt=[97])
def test_pieces_join_to_the_text_wherever_it_is_broken(kind, ids, prompt):
    """Each beginning of the answer too: what was told of it stays, and at most one half character is held."""
    ids, prompt = _known(kind, ids), _known(kind, prompt)
    pieces = list(_pieces(kind, ids, prompt))
    assert kind.text(ids, prompt) == "".join(pieces)
    told = ""
    for cut, piece in enumerate(pieces[:-1], 1):
        told += piece
        sure = kind.text(ids[:cut], prompt)
        assert sure in {told, told + "\ufffd"}
        assert kind.text(ids, prompt).startswith(told)


@PATIENT
@given(ids=_IDS, prompt=_IDS)
def test_valid_text_of_an_answer_is_what_decoding_all_at_once_gives(kind, ids, prompt):
    """The oracle agrees with the tokenizer itself where nothing is broken."""
    ids, prompt = _known(kind, ids), _known(kind, prompt)
    if "\ufffd" in kind.text(ids) + kind.text(prompt):
        return
    before = kind.tokeniser.decode(prompt)
    assert kind.tokeniser.decode(prompt + ids) == before + "".join(_pieces(kind, ids, prompt))


def _answer(kind, ids, prompt=(), stop=()):
    return Answer(
        kind.tokeniser,
        prompt_ids=prompt,
        eos_ids=frozenset(),
        max_tokens=999,
        stop=stop,
        forced_ids=ids,
        gate=TagGate(),
    )


@PATIENT
@given(ids=_IDS.filter(bool), prompt=_IDS)
@example(ids=[0xF0, 0xF0, 97, 97], prompt=[97])
@example(ids=[263, 97, 97], prompt=[])
@example(ids=[0xF0, 256, 0x9F, 97], prompt=[97])
@example(ids=list(MARK.encode()), prompt=[97])
def test_an_answers_text_and_what_is_kept_of_it_are_this_text(kind, ids, prompt):
    """Shown, raw and written; every token of it has its log probability, told with its text and not before."""
    ids, prompt = _known(kind, ids), _known(kind, prompt)
    answer, shown, told = _answer(kind, ids, prompt), "", []
    for cut, id_ in enumerate(ids, 1):
        shown += answer.add(id_, kind.logprob(id_))
        told += answer.take_logprobs()
        known = [one for one in ids[:cut] if kind.spelled[one] is not None]
        assert known[: len(told)] == [entry.token_id for entry in told]
        assert len(kind.text([entry.token_id for entry in told])) <= len(shown) + kind.strips
        if shown == kind.text(ids[:cut], prompt):
            assert len(known) == len(told)
    shown += answer.finish()[0]
    told += answer.take_logprobs()
    assert kind.text(ids, prompt) == shown == answer.text == answer.raw
    assert [id_ for id_ in ids if kind.spelled[id_] is not None] == [entry.token_id for entry in told]
    if len(told) == len(ids):
        joined = b"".join(entry.raw for entry in told).decode(errors="replace")
        assert shown in {joined, joined.removeprefix(" ")}
    assert kind.written(ids, prompt) == answer.written


@pytest.mark.parametrize("stop", ["b", "\ufffd", "\ufffdb", "😀", " "])
@PATIENT
@given(ids=_IDS.filter(bool), prompt=_IDS)
@example(ids=[0xF0, 0xF0, 98, 97], prompt=[97])
@example(ids=[0xED, 0xA0, 98], prompt=[97])
def test_stop_texts_end_broken_text_before_them(kind, stop, ids, prompt):
    """Log probabilities are those of the tokens that lie before it to their last byte."""
    ids, prompt = [id_ for id_ in _known(kind, ids) if kind.spelled[id_] is not None], _known(kind, prompt)
    answer = _answer(kind, ids, [*prompt, 97], (stop,))
    for id_ in ids:
        answer.add(id_, kind.logprob(id_))
        if answer.reason is not None:
            break
    answer.finish()
    text = kind.text(ids, [97])
    assert text.partition(stop)[0] == answer.text
    fits = [id_ for cut, id_ in enumerate(ids, 1) if len(kind.text(ids[:cut], [97])) <= len(answer.text)]
    assert fits == [entry.token_id for entry in answer.logprobs]


def test_halves_on_both_sides_of_a_control_token_are_two(kind):
    """Each with its log probability, up to the stop text."""
    control = next(id_ for id_, raw in kind.spelled.items() if raw is None)
    ids = [97, 0xF0, control, 0xF0, 98]
    answer = _answer(kind, ids, [97], ("b",))
    for id_ in ids:
        answer.add(id_, kind.logprob(id_))
    answer.finish()
    assert "a\ufffd\ufffd" == answer.text
    assert [97, 0xF0, 0xF0] == [entry.token_id for entry in answer.logprobs]


@PATIENT
@given(thought=_IDS, said=_IDS)
@example(thought=[0xF0] * 5, said=[0xF0, 0xF0, 97])
def test_thoughts_and_answers_with_broken_bytes_are_told_apart(kind, thought, said):
    """Log probabilities are those of what was said, wherever bytes were made longer by what they became."""
    thought, said = ([id_ for id_ in _known(kind, ids) if kind.spelled[id_] is not None] for ids in (thought, said))
    ids = [*b"<think>", *thought, *b"</think>", *said]
    answer = Answer(
        kind.tokeniser, prompt_ids=[97], eos_ids=frozenset(), max_tokens=999, gate=ThoughtGate(TagGate(), MARKS[0])
    )
    for id_ in ids:
        answer.add(id_, kind.logprob(id_))
    answer.finish()
    inside, _, behind = kind.text(ids, [97]).removeprefix("<think>").partition("</think>")
    assert (inside.strip("\r\n"), behind.lstrip("\r\n")) == (answer.aside.thought, answer.text)
    hidden = len(kind.text(ids, [97])) - len(answer.text)
    expected = [id_ for cut, id_ in enumerate(ids) if len(kind.text(ids[:cut], [97])) >= hidden]
    assert expected == [entry.token_id for entry in answer.logprobs]


def test_a_broken_character_in_a_call_is_one_replacement(kind):
    """Its arguments are what the text says; good characters beside it stay."""
    call = b'<tool_call>{"name": "get", "arguments": {"q": "\xf0\x9f\x98\x80\xf0\x9f\xe5\xa5\xbd"}}</tool_call>'
    answer = _answer(kind, [*b"\xf0 ", *call])
    for id_ in [*b"\xf0 ", *call]:
        answer.add(id_, kind.logprob(id_))
    _, calls = answer.finish()
    assert ["get"] == [one.name for one in calls]
    assert {"q": "😀\ufffd好"} == json.loads(calls[0].arguments)
    assert "\ufffd " == answer.text
    assert list(b"\xf0 ") == [entry.token_id for entry in answer.logprobs]


@pytest.mark.parametrize("raw", [b"\xff", b"\xf0", b"\xf0\x9f", b"\x80", "\ufffd".encode(), "😀".encode(), b"\xf0a"])
def test_an_endless_run_is_told_as_it_comes(kind, raw):
    """With the work of a few tokens for each, and one character held at most."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return kind.tokeniser.decode(ids)

    detokeniser = Detokeniser(decode, [97], kind.tokeniser.byte_ids)
    told = "".join(detokeniser.feed(id_) for _ in range(500) for id_ in raw)
    wanted = (raw * 500).decode(errors="replace")
    assert wanted in {told, told + "\ufffd"}
    assert wanted + "é" == told + "".join(map(detokeniser.feed, "é".encode()))
    assert longest < 50


# -- in an engine


@pytest.fixture(scope="module")
def fallen(models, tmp_path_factory):
    """A tiny model with words and byte tokens."""
    folder = models.save(tmp_path_factory.mktemp("fallback"), fallback=True)
    return load_model(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def engine(fallen):
    with LocalEngine(fallen, device_memory=128 * fallen.geometry.block_bytes) as made:
        yield made


def _ask(prompt, forced, *, task=None, **options):
    caller = Caller(task=task or f"broken{next(_numbers)}")
    words = {"messages": prompt} if isinstance(prompt, tuple) else {"prompt": prompt}
    return Request(**words, forced_ids=tuple(forced), logprobs=1, sampling=Sampling(**options), caller=caller)


@pytest.mark.parametrize("prompt", ["a", "你好", "ab 😀😀", "é", "🙂" * 40, (Message(role="user", content="你好"),)])
def test_an_answer_keeps_its_first_space_whatever_the_prompt_ends_with(engine, prompt):
    """The prompt's last tokens are its neighbours, bytes or words."""
    told = engine.submit(_ask(prompt, (263, 263))).result(60)
    assert " hello hello" == told.text


@pytest.mark.parametrize(
    ("forced", "cut", "text"),
    [
        ([*"😀😁".encode()], 5, "😀\ufffd"), ([*"😀😁".encode()], 7, "😀\ufffd"), ([*"你好吗".encode()], 7, "你好\ufffd"),
        ([*"😀".encode(), 0xF0, 260, 261], 9, "😀\ufffdab"), ([260, *"好".encode()[:2], 263], 9, "a\ufffd hello"),
        ([0x80, 0x80, *"é".encode()], 9, "\ufffd\ufffdé"), ([*"👨‍👩‍👧".encode()], 99, "👨‍👩‍👧"), ([0xF0, 256, 0x9F, 260], 9, "\ufffd\ufffda"),
    ],
)  # fmt: skip
def test_good_characters_stay_where_others_are_cut(engine, fallen, forced, cut, text):
    """Streamed as whole, with log probabilities; and the next turn, which sends this one again, finds all of it."""
    name = f"again{next(_numbers)}"
    stream = engine.submit(_ask("Tell me of it, at some length.", forced, task=name, max_tokens=cut))
    pieces = [chunk.text for chunk in stream]
    told = stream.result(60)
    assert text == told.text == "".join(pieces)
    if 256 not in forced:
        assert text == b"".join(entry.raw for entry in told.logprobs).decode(errors="replace")
    sent = f"Tell me of it, at some length.{told.text}"
    again = engine.submit(_ask(sent, (260,), task=name, max_tokens=1)).result(60)
    if 256 not in forced:
        known = len(fallen.tokenizer("Tell me of it, at some length.")["input_ids"]) + len(told.token_ids)
        assert (known, known - 1) == (again.usage.input_tokens, again.usage.cached_tokens)
