"""Retrieve, then decide: score, price, room and novelty; and passages, and what stands in a prompt."""

import importlib
import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.context.memory import Injection, Recalled, Shingles, decide
from agentkv.context.memory.decide import MARK
from agentkv.context.memory.passages import cut
from agentkv.context.memory.terms import shingles
from agentkv.errors import ConfigError


def recalled(text, score=0.8, tokens=20, number=1, source=""):
    return Recalled(text=text, score=score, kind="semantic", source=source, tokens=tokens, id=number)


PORT = "The staging database listens on port 6543 and wants a certificate."
OTHER = "Backups of the production cluster are kept in Zurich for thirty days."


def test_what_scores_is_injected_best_first():
    """With its tokens, ids and sources."""
    injection = decide([recalled(OTHER, 0.5, 15, 2), recalled(PORT, 0.9, 12, 1, "ops.md")])
    assert ((PORT, OTHER), 27, (1, 2)) == (injection.texts, injection.tokens, injection.ids)
    assert f"{MARK}\n- (ops.md) {PORT}\n- {OTHER}" == injection.text()


def test_nothing_to_say_is_an_empty_text():
    """So that no note is made."""
    assert "" == Injection().text()
    assert not decide([])
    assert not decide([recalled(PORT, 0.1)])


def test_a_weak_passage_stays_out_and_the_reason_has_the_numbers():
    """Retrieval always finds something; that is no reason to send it."""
    injection = decide([recalled(PORT, 0.2)], min_score=0.3)
    assert "score 0.20 is below 0.30" in injection.skipped[0].reason
    assert 1 == injection.skipped[0].id


def test_a_long_passage_has_to_score_more_than_a_short_one():
    """Tokens have a price."""
    texts = {"short": recalled(PORT, 0.35, 50), "long": recalled(OTHER, 0.35, 700)}
    assert (PORT,) == decide(texts.values(), min_score=0.3, price=0.1).texts
    assert (PORT, OTHER) == decide(texts.values(), min_score=0.3, price=0).texts


def test_what_does_not_fit_stays_out_and_a_smaller_one_may_follow():
    """The bound on tokens is never exceeded."""
    injection = decide(
        [recalled(PORT, 0.9, 60, 1), recalled(OTHER, 0.8, 50, 2), recalled("A b c d", 0.7, 40, 3)], max_tokens=100
    )
    assert ((1, 3), 100) == (injection.ids, injection.tokens)
    assert "50 tokens do not fit: 60 of 100 are taken" == injection.skipped[0].reason


def test_what_stands_in_the_prompt_is_not_said_again():
    """Whatever the case and the white space around it."""
    prompt = f"user: hello\ntool: {PORT.upper()}\n   and more"
    assert "100% of it stands in the prompt already" == decide([recalled(PORT)], prompt=prompt).skipped[0].reason
    assert decide([recalled(PORT)], prompt="The staging database is slow today.")


def test_two_passages_that_say_the_same_are_one():
    """Passages of a document overlap, and facts are written down twice."""
    twin = PORT.replace("wants", "needs")
    injection = decide(
        [recalled(PORT, 0.9), recalled(f"{PORT} Ask Eva.", 0.8, number=2), recalled(OTHER, 0.7, number=3)]
    )
    assert (1, 3) == injection.ids
    assert "stands in a better one" in injection.skipped[0].reason
    assert 2 == len(decide([recalled(PORT, 0.9), recalled(twin, 0.8)], max_overlap=1.0).texts)


def test_a_growing_prompt_is_read_once(monkeypatch):
    """Shingles are kept up message by message and are not changed by a decision, which reads what was recalled alone."""
    there = Shingles()
    for number in range(300):
        there.add(f"message {number} " + "some words of a tool output " * 40)
    size = len(there._held)
    read = []
    monkeypatch.setattr(
        importlib.import_module("agentkv.context.memory.decide"),
        "shingles",
        lambda text: read.append(text) or shingles(text),
    )
    assert decide([recalled(PORT)], prompt=there)
    assert {PORT} == set(filter(None, read))
    assert size == len(there._held)
    there.add(PORT)
    assert not decide([recalled(PORT)], prompt=there)


def test_numbers_below_zero_are_refused():
    """A limit of 0 is none allowed, not no limit."""
    assert not decide([recalled(PORT)], max_tokens=0)
    for wrong in ({"max_tokens": -1}, {"price": -0.1}, {"max_overlap": -1}):
        with pytest.raises(ConfigError):
            decide([recalled(PORT)], **wrong)


def test_a_text_with_lines_stays_one_note():
    """Later lines are set in, so a memory cannot pass for a new message."""
    assert "- (a b) first\n  second" in decide([recalled("first\nsecond", source="a\nb")]).text()


@given(
    st.lists(st.tuples(st.text(min_size=1), st.floats(0, 1), st.integers(0, 500)), max_size=8),
    st.text(),
    st.integers(0, 1000),
)
def test_any_decision_keeps_its_bounds(found, prompt, max_tokens):
    """Never more tokens than allowed, each passage in or out with a reason, the same answer twice."""
    given_ = [recalled(text, score, tokens, number) for number, (text, score, tokens) in enumerate(found)]
    injection = decide(given_, prompt=prompt, max_tokens=max_tokens)
    assert injection.tokens <= max_tokens
    assert sorted(range(len(given_))) == sorted([*injection.ids, *(one.id for one in injection.skipped)])
    assert injection == decide(given_, prompt=prompt, max_tokens=max_tokens)


@given(st.text(max_size=3000), st.integers(40, 300))
def test_passages_hold_the_whole_text_and_are_never_too_long(text, size):
    """Every character that is no white space is in one of them, in order."""
    pieces = list(cut(text, size))
    assert all(0 < len(piece) <= size and piece == piece.strip() for piece in pieces)
    kept = "".join("".join(piece.split()) for piece in pieces)
    remaining = iter(kept)
    assert all(character in remaining for character in "".join(text.split()))


def test_passages_end_where_sentences_do_and_overlap():
    """No sentence is only ever seen in halves."""
    sentences = [f"Sentence number {n} says something of its own about the machine." for n in range(60)]
    pieces = list(cut(" ".join(sentences), 400))
    assert all(piece.endswith(".") for piece in pieces)
    assert all(any(sentence in piece for piece in pieces) for sentence in sentences)
    assert all(len(piece) > 150 for piece in pieces[:-1])


def test_where_there_are_no_sentences_passages_repeat_a_few_words():
    """What is cut in two there is whole in the next passage."""
    pieces = list(cut(" ".join(f"w{n}" for n in range(2000))))
    repeated = [len(set(one.split()) & set(two.split())) for one, two in itertools.pairwise(pieces)]
    assert all(10 <= words <= 40 for words in repeated)


def test_passages_of_a_dense_script_are_shorter():
    """Three bytes a character are about three times the tokens."""
    assert max(map(len, cut("代理计算两秒钟，然后等待三分钟。" * 500))) <= 270  # noqa: RUF001


@pytest.mark.parametrize(
    "text", ["x" * 5_000_000, " \n" * 2_500_000, "a. " * 1_600_000, "\n" * 5_000_000, "代" * 1_500_000]
)
def test_five_megabytes_of_anything_are_cut_in_linear_time(text):
    """Also one word, and nothing but white space."""
    start_s = time.perf_counter()
    sum(1 for _ in cut(text))
    assert time.perf_counter() - start_s < 15


def test_every_sentence_of_a_random_document_is_whole_somewhere():
    """Sentences of up to 15 % of a passage survive the cuts."""
    rng = random.Random(5)
    sentences = [" ".join(f"w{rng.randrange(999)}" for _ in range(rng.randint(3, 18))) + "." for _ in range(500)]
    pieces = list(cut(" ".join(sentences)))
    assert [] == [sentence for sentence in sentences if not any(sentence in piece for piece in pieces)]
