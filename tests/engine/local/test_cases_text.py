"""Users' reports about text, stops and seeds, on tokens of several bytes (E10, E12, E17)."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers import models as kinds

from agentkv.core.message import Message
from agentkv.core.task import Caller
from agentkv.engine.base import Request, Sampling
from agentkv.engine.local.detokenise import Detokeniser
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import load_model
from agentkv.errors import RequestInvalid

_numbers = itertools.count()
TEXTS = [
    "👨‍👩‍👧 family 👩🏽‍💻", "한글 처리, 漢字", "příliš žluťoučký kůň", "def f():\n    return  1\n", " starts with a space",
    "\n\n~2 the\tthe", "e\u0301 combining", "12 in there é", "\u200f\u05e2\u05d1\u05e8", "a\x00b",
]  # fmt: skip


@pytest.fixture(scope="module")
def merged(models, tmp_path_factory):
    """A tiny model whose tokenizer merges: tokens of one to three bytes."""
    folder = models.save(tmp_path_factory.mktemp("merged"), merges=True)
    return load_model(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def engine(merged):
    with LocalEngine(merged, device_memory=128 * merged.geometry.block_bytes) as made:
        yield made


def _ids(loaded, text):
    return tuple(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def _ask(prompt="Go.", *, forced=None, task=None, turns=None, **options):
    words = {"messages": turns} if turns else {"prompt": prompt}
    caller = Caller(task=task or f"t{next(_numbers)}")
    return Request(**words, forced_ids=forced, sampling=Sampling(**options), caller=caller)


def _both(engine, request):
    """(streamed text, whole answer), which are one."""
    stream = engine.submit(request)
    pieces = [chunk.text for chunk in stream]
    told = stream.result(60)
    assert told.text == "".join(pieces)
    return pieces, told


# -- E10


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_whole_text_is_the_decoded_text(engine, merged, text):
    """Whole characters only, wherever tokens cut them; a cut in a character is one replacement at the very end."""
    ids = _ids(merged, text)
    pieces, told = _both(engine, _ask(forced=ids, max_tokens=200))
    assert text == told.text == merged.tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    for cut in range(1, len(ids), 3):
        pieces, told = _both(engine, _ask(forced=ids, max_tokens=cut))
        assert merged.tokenizer.decode(ids[:cut]) == told.text
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert ids[:cut] == told.token_ids


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_sentencepiece_tokenizers_keeps_its_spaces_and_characters(text):
    """Word tokens with a leading space, bytes for all else, as Llama 2's and Mistral's tokenizers have them."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁": 256,
        "▁the": 257,
        "▁a": 258,
        "▁space": 259,
        "in": 260,
    }
    backend = Tokenizer(kinds.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    ids, rest = [], text
    while rest:
        word = next((w for w in ("▁space", "▁the", "▁a", "in", "▁") if rest.startswith(w.replace("▁", " "))), None)
        ids += [vocabulary[word]] if word else list(rest[0].encode())
        rest = rest[len(word) if word else 1 :]
    for prompt in ([260], [257, 256], list(" 한".encode()), [260] * 9):
        detokeniser = Detokeniser(backend.decode, prompt, {byte: byte for byte in range(256)})
        pieces = [detokeniser.feed(id_) for id_ in ids]
        assert text == "".join(pieces) + detokeniser.finish()
        assert not any("\ufffd" in piece for piece in pieces)


def test_what_completes_a_character_of_the_prompt_is_shown(engine, merged):
    """An answer that was cut inside of a character, and gone on with: not a byte of the rest is swallowed."""
    ids = _ids(merged, "ok 😀!")
    first = engine.submit(_ask("Cut.", forced=ids, max_tokens=len(ids) - 3, task="cut")).result(60)
    assert first.text.endswith("\ufffd")
    _, told = _both(engine, _ask("Cut." + first.text, forced=ids[-3:], max_tokens=9, task="cut"))
    assert merged.tokenizer.decode(ids[-3:]) == told.text
    assert told.text.endswith("!")


# -- E12

SAID = "the thin STOP there, 1212 then"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("STOP",), "the thin "), ((" thin",), "the"), (("in ST",), "the th"), (("e th", "thin"), "th"), (("thin", "e th"), "th"),
        (("STOX", "there!"), SAID), (("STOP there, 1213", "121"), "the thin STOP there, "), ((SAID + " and more",), SAID),
        (("t",), ""), (("n",), "the thi"), ((SAID,), ""), (("2 t", "12 then"), "the thin STOP there, 121"),
    ],
)  # fmt: skip
def test_stop_texts_over_tokens_end_the_text_before_them(engine, merged, stop, text):
    """Over one token and over many, near misses, overlapping ones, longer than the answer: streamed as whole."""
    ids = _ids(merged, SAID)
    assert len(ids) < len(SAID)  # tokens of several characters
    pieces, told = _both(engine, _ask(forced=ids, stop=stop, max_tokens=100))
    assert (text, "stop") == (told.text, told.finish_reason)
    assert not any(one in "".join(pieces) for one in stop)


def test_a_stop_text_of_nothing_is_refused():
    """It would end every answer before its first token."""
    with pytest.raises(RequestInvalid, match="stop"):
        _ask(stop=("",))


def test_the_turn_after_a_stop_text_reuses_the_turn_before_it(engine, merged, models):
    """The prompt and what was told of the answer; and it answers as from a cold start."""
    turns = [Message(role="user", content="Tell me the thing about the thin one. " * 2)]
    known = 0
    for number in range(4):
        _, told = _both(
            engine,
            _ask(forced=(*_ids(merged, f"Then {number} STOP the rest"),), stop=("STOP",), task="s", turns=tuple(turns)),
        )
        assert f"Then {number} " == told.text
        assert told.usage.cached_tokens >= known - 16
        known = told.usage.input_tokens
        turns += [Message(role="assistant", content=told.text), Message(role="user", content="And then?")]
    with LocalEngine(merged, device_memory=128 * merged.geometry.block_bytes) as cold:
        wanted = cold.submit(_ask(turns=tuple(turns), max_tokens=12)).result(60)
    told = engine.submit(_ask(turns=tuple(turns), max_tokens=12, task="s")).result(60)
    assert told.usage.cached_tokens > known // 2
    assert wanted.token_ids == told.token_ids


# -- E17


def test_two_equal_prompts_at_once_differ_unless_they_say_a_seed(engine):
    """Without a seed nothing is secretly seeded; with one, neighbours change nothing."""
    warm = {"max_tokens": 16, "temperature": 1.5}
    streams = [engine.submit(_ask(**warm)) for _ in range(6)]
    seeded = [engine.submit(_ask(**warm, seed=9)) for _ in range(3)]
    assert 6 == len({stream.result(60).token_ids for stream in streams})
    alone = engine.submit(_ask(**warm, seed=9)).result(60).token_ids
    assert {alone} == {stream.result(60).token_ids for stream in seeded}
    assert alone != engine.submit(_ask(**warm, seed=10)).result(60).token_ids


@pytest.mark.parametrize("busy", [False, True])
def test_choices_with_a_seed_are_the_same_set_whoever_else_is_there(engine, busy):
    """Three of three differ, again and again the same three, also among neighbours and with the KV warm."""
    streams = [engine.submit(_ask(f"Neighbour {number}", max_tokens=40, temperature=1.0)) for number in range(5 * busy)]
    sets = []
    for _ in range(2):
        request = _ask("Choose.", max_tokens=12, temperature=1.2, seed=3)
        told = engine.submit(Request(prompt="Choose.", n=3, sampling=request.sampling, caller=request.caller)).result(
            60
        )
        sets.append(tuple(choice.token_ids for choice in told.choices))
    assert 3 == len(set(sets[0]))
    assert sets[0] == sets[1]
    for stream in streams:
        stream.result(60)
    _seen.add(sets[0])
    assert 1 == len(_seen)


_seen: set[tuple[tuple[int, ...], ...]] = set()
