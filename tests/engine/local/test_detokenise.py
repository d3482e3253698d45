"""Text comes in whole characters and never shows a stop string."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv.engine.local.detokenise import Detokeniser, StopGate
from agentkv.engine.local.tokeniser import Tokeniser

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines

TEXTS = [
    "👨‍👩‍👧 family",
    "한글 처리",
    "příliš žluťoučký kůň",
    "def f():\n    return 1\n",
    " leading space",
    "日本語。\n\n ~2",
]


@pytest.fixture(scope="module")
def tokeniser(make_tokenizer):
    return Tokeniser(make_tokenizer())


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_text(tokeniser, text):
    """One token per byte: every character beyond ASCII arrives in parts (E10)."""
    ids = tokeniser.encode(text).ids
    detokeniser = Detokeniser(tokeniser.decode, tokeniser.encode("before").ids)
    pieces = [detokeniser.feed(id_) for id_ in ids]
    assert text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" == detokeniser.finish()


@PATIENT
@given(data=st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_join_to_what_decoding_at_once_gives(data):
    """Even for bytes that are no UTF-8, and for characters cut at the end."""
    letters = [bytes([byte]) for byte in data]

    def decode(ids):
        return b"".join(letters[i] for i in ids).decode("utf-8", errors="replace")

    detokeniser = Detokeniser(decode)
    pieces = [detokeniser.feed(i) for i in range(len(letters))]
    assert decode(range(len(letters))) == "".join(pieces) + detokeniser.finish()


def test_a_replacement_character_that_was_meant_is_not_held_for_ever(tokeniser):
    """A run of broken bytes comes out after a few tokens, not at the end of the answer."""
    detokeniser = Detokeniser(tokeniser.decode)
    broken = tokeniser.encode("é").ids[0]
    assert "" != "".join(detokeniser.feed(broken) for _ in range(12))


def test_sentencepiece_keeps_the_space_before_the_first_token():
    """Such tokenizers drop a leading space that has no left neighbour; the prompt's last tokens are one."""

    def decode(ids):
        return "".join(["▁Hello", "▁wide", "▁world"][i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokeniser = Detokeniser(decode, [0])
    assert [" wide", " world"] == [detokeniser.feed(1), detokeniser.feed(2)]


@PATIENT
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_stop_strings_end_the_text_wherever_the_pieces_are_cut(text, stops, cuts):
    """The shown text ends before the stop string that is complete first; without one it is all of the text."""
    gate = StopGate(stops)
    shown, at = "", 0
    for cut in cuts:
        shown += gate.feed(text[at : at + cut])
        at += cut
        assert not any(stop in shown for stop in stops)
    shown += gate.finish()
    if gate.hit is None:
        assert text == shown
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + gate.hit)


def test_a_near_miss_is_released_at_once():
    """Only what can still become the stop string is held back."""
    gate = StopGate(["STOP"])
    assert ["a ", "", "STA", "RT"] == [gate.feed("a "), gate.feed("ST"), gate.feed("A"), gate.feed("RT")]
