"""The context benchmark in small: a figure is worth what its meter is worth."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import agentkv

SUBJECTS = ("ash", "birch", "cedar", "elm", "fir", "gorse", "holly", "iris", "jute", "kelp") * 2
FOLDER = Path(agentkv.__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("context_brain", "context_loops", "context_ours", "context_rivals")
    return SimpleNamespace(**{name.removeprefix("context_"): importlib.import_module(name) for name in names})


@pytest.fixture
def loop(bench):
    """Thirty steps of different words, a fact in the first turn, and a need for the line of each output."""
    steps, before = [], None
    for number in range(30):
        command = f"cat part-{number}.txt"
        words = [SUBJECTS[number * line * 7 % 20] + SUBJECTS[(number + line * 3) % 20] for line in range(60)]
        output = f"of part {number} says " + " ".join(words)
        needs = () if before is None else (bench.loops.Need(key=f"of part {number - 1} says", command="x", output="y"),)
        text = bench.loops.FIRST_TURN if before is None else f"Part {number} is next, as {before} said."
        steps.append(bench.loops.Step(text=text, command=command, output=output, needs=needs))
        before = command
    return bench.loops.Loop(name="small", steps=tuple(steps), facts=bench.loops.EARLY_FACTS)


def test_the_meter_counts_what_is_behind_the_longest_known_prefix_in_whole_blocks(bench, loop):
    """A second request that extends the first costs its own tokens and what is left of the last whole block."""
    meter = bench.brain.Meter(loop)
    first = bench.brain.Sent(role="system", content="one two three " * 51)
    more = bench.brain.Sent(role="user", content="four five six " * 30)
    meter.see([first], "", summary=False)
    once = bench.brain.tokens(first.text)
    assert once == meter.uncached_tokens
    assert once % 16 != 0
    meter.see([first, more], "", summary=False)
    assert once + bench.brain.tokens(more.text) + once % 16 == meter.uncached_tokens
    assert once + bench.brain.tokens(more.text) == meter.peak_tokens
    assert meter.breaks == 0
    meter.see([more, first], "", summary=False)
    assert meter.breaks == 1


def test_the_checker_names_what_a_strict_server_refuses(bench):
    """Orphan results, unanswered calls, ids used twice, late system messages, and no user at all."""
    sent = bench.brain.Sent
    user, call = sent(role="user", content="hi"), sent(role="assistant", content="", calls=(("a", "t", "{}"),))
    answer = sent(role="tool", content="1", call_id="a")
    assert bench.brain.problems([user, call, answer]) == []
    assert bench.brain.problems([user, answer]) == ["a tool result without its call"]
    assert bench.brain.problems([user, call, user]) == ["a call without its result"]
    assert bench.brain.problems([user, call, answer, call, answer]) == ["an id that is empty or used twice"]
    assert bench.brain.problems([user, sent(role="system", content="s")]) == ["a system message behind others"]
    assert bench.brain.problems([call, answer]) == ["no user message"]


def test_doing_nothing_computes_each_token_once(bench, loop):
    """The baseline's uncached tokens are its largest request and what the block rounding costs."""
    (nothing,) = bench.rivals.runs(loop, "doing nothing")
    assert nothing.breaks == 0
    assert nothing.looked_up == 0
    assert nothing.facts == 1.0
    assert 0 <= nothing.uncached_tokens - nothing.peak_tokens <= 16 * nothing.requests


def test_a_loop_that_is_folded_stays_valid_and_remembers(bench, loop, monkeypatch):
    """Through the public way: folds happen, the largest request is bounded, the facts of the first turn are there."""
    from agentkv.context.options import Context

    monkeypatch.setitem(bench.ours.SETTINGS, "small", Context(soft_mark=2500, keep_last=2))
    (nothing,) = bench.rivals.runs(loop, "doing nothing")
    run = bench.ours.ours(loop, "small")
    assert run.summaries >= 1
    assert run.problems == ()
    assert run.request_kept
    assert run.facts == 1.0
    assert run.peak_tokens < 0.7 * nothing.peak_tokens


def test_a_rival_that_is_not_installed_is_skipped_by_name(bench, loop, monkeypatch):
    """The benchmark runs without the others and says whom it left out."""

    def absent():
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    monkeypatch.setitem(bench.rivals._RIVALS, "absent", absent)
    (run,) = bench.rivals.runs(loop, "absent")
    assert run.skipped == "absent is not installed"
