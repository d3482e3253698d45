"""Replaying a record: constants fitted to its calls, its workload simulated, both sides held against each other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from agentkv.errors import ConfigError
from agentkv.sim import record as records
from agentkv.sim import replay, steptimes
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call
from agentkv.sim.embedded import Embedded
from agentkv.sim.record import Record, Recorded, Sizes
from agentkv.sim.stepwise import Stepwise

BASE_S, PER_TOKEN_S, LINEAR_S, QUADRATIC_S = 0.05, 1e-5, 0.002, 1e-6
CONSTANTS = (BASE_S, PER_TOKEN_S, LINEAR_S, QUADRATIC_S)


def sizes(device_blocks: int = 1000) -> Sizes:
    return Sizes(
        block_tokens=16,
        block_bytes=16_000,
        device_blocks=device_blocks,
        host_blocks=1000,
        disk_blocks=0,
        shared_tokens=0,
        rates_bytes_s={"h2d": 1e9, "d2h": 1e9},
    )


def alone(
    session: str, at_s: float, *, prompt: int, cached: int, output: int = 33, wait_s: float | None = 2.0
) -> Recorded:
    """A call that had the engine to itself, with times that follow from CONSTANTS."""
    prefill_s = chunked_s(cached, prompt)
    decode_s = sum(BASE_S + PER_TOKEN_S * (prompt + step + 1) for step in range(output - 1))
    return Recorded(
        session=session,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        reuse_tokens=0 if wait_s is None else prompt,
        submitted_s=at_s,
        queued_s=0.0,
        restore_s=0.0,
        recompute_s=0.0,
        prefill_s=prefill_s,
        decode_s=decode_s,
        ttft_s=prefill_s,
        total_s=prefill_s + decode_s,
        wait_s=wait_s,
        tool="" if wait_s is None else "pytest",
    )


def chunked_s(start: int, end: int) -> float:
    steps = math.ceil((end - start) / steptimes.CHUNK_TOKENS)
    return steps * BASE_S + LINEAR_S * (end - start) + QUADRATIC_S * (end * end - start * start)


def lone_session() -> Record:
    """One session of three calls: nobody to wait for."""
    calls: list[Recorded] = []
    at_s, cached = 0.0, 0
    for prompt in (600, 1400, 1500):
        calls.append(alone("a", at_s, prompt=prompt, cached=cached, wait_s=None if prompt == 1500 else 2.0))
        at_s, cached = calls[-1].ended_s + 2.0, prompt + 32
    return Record(sessions=(tuple(calls),), sizes=sizes(), model="m", policy={"name": "keep"})


def test_what_a_step_costs_is_found_in_the_calls_of_a_run() -> None:
    """Four constants come back from calls that took what they say."""
    assert steptimes.step_times(lone_session()) == pytest.approx(CONSTANTS, rel=0.02)


def test_two_calls_that_decode_together_pay_for_each_others_contexts() -> None:
    """A step is shared: its base once, both contexts; the fit finds the same constants again."""
    lone = lone_session()
    one = alone("b", 100.0, prompt=800, cached=0, wait_s=None)
    both_s = sum(BASE_S + PER_TOKEN_S * 2 * (800 + step + 1) for step in range(32))
    pair = [replace(one, session=name, decode_s=both_s, total_s=one.prefill_s + both_s) for name in ("b", "c")]
    pair = [replace(each, prefill_s=0.0, ttft_s=0.0, total_s=both_s, cached_tokens=800) for each in pair]
    record = replace(lone, sessions=(*lone.sessions, (pair[0],), (pair[1],)))
    assert steptimes.step_times(record)[1] == pytest.approx(PER_TOKEN_S, rel=0.1)


def test_too_few_calls_are_refused_instead_of_fitted() -> None:
    """One call cannot tell four constants."""
    one = replace(alone("a", 0.0, prompt=100, cached=0, wait_s=None), output_tokens=1)
    with pytest.raises(ConfigError, match="too few to fit"):
        steptimes.step_times(replace(lone_session(), sessions=((one,),)))


def test_a_session_alone_is_predicted_without_stalls_and_to_the_second() -> None:
    """With its own constants the replay of a lone session is the session."""
    told = replay.compare(lone_session())
    assert (0.0, 0.0) == told.predicted.stalls_s
    assert 0.0 == told.stall_error
    assert told.predicted.tasks_s == pytest.approx(told.measured.tasks_s, rel=0.02)


def test_a_task_whose_history_was_folded_is_one_row_of_calls_again() -> None:
    """It goes on in a session of its own, which reuses nothing at the seam; sessions side by side stay apart."""
    first = alone("t#1", 0.0, prompt=600, cached=0)
    second = alone("t#2", 50.0, prompt=200, cached=0, wait_s=None)
    beside = alone("u#1", 0.0, prompt=600, cached=0)
    early = alone("u#2", 0.1, prompt=200, cached=0, wait_s=None)
    joined = records._joined({"t#2": [second], "u#1": [beside], "t#1": [first], "u#2": [early]})
    assert {"t#1": [replace(first, reuse_tokens=0), second], "u#1": [beside], "u#2": [early]} == joined


def two_sessions(device_blocks: int) -> Record:
    """Two like sessions that begin together and come back together, with contexts of 100 blocks each."""
    sessions = []
    for name, shift_s in (("a", 0.0), ("b", 0.001)):
        first = alone(name, shift_s, prompt=1300, cached=0)
        second = alone(name, first.ended_s + 2.0, prompt=1600, cached=1332, wait_s=None)
        sessions.append((first, second))
    return Record(sessions=tuple(sessions), sizes=sizes(device_blocks), model="m", policy={"name": "keep"})


def test_a_call_waits_until_the_device_has_room_for_its_whole_prompt() -> None:
    """With room for both there is hardly a stall; with room for one the second waits for the first one's end."""
    costs = steptimes.calibrated(lone_session())
    wide = replay.replay(two_sessions(400), replace(costs, device_bytes=400 * 16_000))
    narrow = replay.replay(two_sessions(120), replace(costs, device_bytes=120 * 16_000))
    whole_call_s = alone("a", 0.0, prompt=1600, cached=1332).total_s
    assert max(wide.stalls_s) < 0.4 * whole_call_s  # a chunk of the other prompt goes first
    assert max(narrow.stalls_s) > 0.8 * whole_call_s
    assert max(narrow.tasks_s) > max(wide.tasks_s)


def test_a_slow_machine_is_seen_where_it_was_slow() -> None:
    """Calls of the first window as fitted, those of the second twice as slow."""
    record = lone_session()
    (calls,) = record.sessions
    slow = replace(calls[2], submitted_s=100.0, decode_s=2 * calls[2].decode_s, prefill_s=2 * calls[2].prefill_s)
    slow = replace(slow, ttft_s=slow.prefill_s, total_s=slow.prefill_s + slow.decode_s)
    costs = steptimes.calibrated(record)
    pace = steptimes.machine_pace(replace(record, sessions=((*calls[:2], slow),)), costs, window_s=50.0)
    assert [1.0, 1.0, 2.0] == [pytest.approx(pace(time_s), rel=0.03) for time_s in (0.0, 60.0, 101.0)]


def test_both_sides_count_the_same_stalls() -> None:
    """A call before which no tool ran is no resume, in the record and in its replay."""
    (calls,) = lone_session().sessions
    quiet = replace(lone_session(), sessions=((calls[0], replace(calls[1], tool=""), calls[2]),))
    told = replay.compare(quiet, steptimes.calibrated(lone_session()))
    assert [1, 1] == [len(told.measured.stalls_s), len(told.predicted.stalls_s)]


@pytest.mark.parametrize(
    ("predicted", "measured", "error"), [(1.0, 1.0, 0.0), (1.5, 1.0, 0.5), (0.0, 0.0, 0.0), (0.1, 0.0, math.inf)]
)
def test_an_error_is_relative_to_what_was_measured(predicted: float, measured: float, error: float) -> None:
    """Nothing predicted where nothing was measured is no error; something is an infinite one."""
    assert error == replay.relative_error(predicted, measured)


def test_a_record_of_an_unknown_policy_is_refused() -> None:
    """A replay under another policy would prove nothing."""
    with pytest.raises(ConfigError, match="unknown"):
        replay.replay(replace(lone_session(), policy={"name": "magic"}), steptimes.calibrated(lone_session()))


def test_a_call_that_cannot_grow_sends_the_youngest_back() -> None:
    """Two contexts that fit as prompts but not with their answers: one preemption, and the youngest waits for it."""
    told = []
    for name in ("a", "b"):
        first = alone(name, 0.0, prompt=1300, cached=0)
        told.append((first, alone(name, first.ended_s + 2.0, prompt=1600, cached=1332, output=129, wait_s=None)))
    record = Record(sessions=tuple(told), sizes=sizes(), model="m", policy={"name": "keep"})
    costs = steptimes.calibrated(lone_session())
    load = replay.workload_of(record)
    ended: dict[int, Embedded] = {}
    for blocks in (204, 240):
        tight = replace(costs, device_bytes=blocks * 16_000)
        ended[blocks] = Embedded(load, tight, replay.rules_of(record), shared_tokens=0)
        ended[blocks].run()
        ended[blocks].memory.check()
    assert [1, 0] == [ended[blocks].preemptions for blocks in (204, 240)]
    assert ended[204].stalls_s["b"][1] > ended[240].stalls_s["b"][1] + 1
    assert ended[204].stalls_s["a"] == pytest.approx(ended[240].stalls_s["a"])


# -- steps


def stepped(*calls: Call) -> list[tuple[str, float]]:
    """(owner, end) of each call on a device whose step costs 1 s + 0.01 s for each prompt token."""
    costs = replace(steptimes.calibrated(lone_session()), decode_base_s=1.0, decode_per_token_s=0.0, token_budget=100)
    costs = replace(costs, prefill=replace(costs.prefill, linear_s=0.01, quadratic_s=0.0))
    events: list[tuple[float, int, object]] = []
    now = [0.0]
    ended: list[tuple[str, float]] = []
    device = Stepwise(
        costs,
        at=lambda at_s, call: events.append((at_s, len(events), call)),
        now_s=lambda: now[0],
        ended=lambda call: ended.append((str(call.owner), now[0])),
    )
    device._stepping = True  # all join before the first step
    for call in calls:
        device.add(call)
    device._step()
    while events:
        events.sort()
        now[0], _, do = events.pop(0)
        do()
    return ended


def call(owner: str, *, at: int = 0, prompt: int, output: int) -> Call:
    return Call(owner, key=(float(ord(owner)),), at=at, prompt=prompt, output=output)


def test_a_chunk_is_shared_by_prompts_in_order() -> None:
    """Two prompts of 60 in chunks of 100: the second one's last 20 tokens come in the second step."""
    assert [("a", 2.0), ("b", 3.2)] == stepped(call("a", prompt=60, output=1), call("b", prompt=60, output=1))


def test_a_decoder_waits_for_the_chunk_in_its_step() -> None:
    """One token beside a prompt of 100 tokens takes as long as the prompt."""
    assert [("a", 2.0), ("b", 2.0)] == stepped(call("a", at=50, prompt=50, output=1), call("b", prompt=100, output=1))


def test_the_first_token_comes_with_the_last_chunk() -> None:
    """An answer of three tokens after a prompt of one chunk takes three steps in all."""
    assert [("a", 4.0)] == stepped(call("a", prompt=100, output=3))


# -- reading


def lines() -> list[str]:
    """A record as `agentkv demo --record` writes it."""
    head = {
        "v": "agentkv.trace/1",
        "recorded": {"model": "m", "policy": {"name": "keep"}, "preemptions": 0}
        | {name: getattr(sizes(), name) for name in Sizes.__slots__},
    }
    told = [head]
    (calls,) = lone_session().sessions
    for before, after in [*pairwise(calls), (calls[-1], None)]:
        parts = ("queued_s", "restore_s", "recompute_s", "prefill_s", "decode_s", "ttft_s", "total_s", "submitted_s")
        told.append(
            {
                "session": before.session,
                "prompt_tokens": before.prompt_tokens,
                "output_tokens": before.output_tokens,
                "next_prompt_tokens": 0 if after is None else after.prompt_tokens,
                "reuse_tokens": before.reuse_tokens,
                "duration_s": before.wait_s or 0.0,
                "tool": before.tool,
                "call": {"cached_tokens": before.cached_tokens} | {name: getattr(before, name) for name in parts},
            }
        )
    return [json.dumps(line) for line in told]


def written(tmp_path, text: list[str]):
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(text) + "\n")
    return path


def test_a_record_is_read_as_it_was_written(tmp_path) -> None:
    """Calls, sizes and policy come back."""
    assert lone_session() == records.read(written(tmp_path, lines()))


def test_a_records_stalls_are_those_of_calls_after_a_tool() -> None:
    """The first call of a session resumes nothing, and neither does one that nothing ran before."""
    (calls,) = lone_session().sessions
    told = tuple(replace(one, queued_s=float(i), tool="pytest" if i == 0 else "") for i, one in enumerate(calls))
    assert (1.0,) == replace(lone_session(), sessions=(told,)).stalls_s


def change(number: int, **fields: object) -> list[str]:
    text = lines()
    text[number] = json.dumps(json.loads(text[number]) | fields)
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ([], "line 1"),
        (['{"v": "agentkv.trace/1", "source": "a trace without a record"}'], "no record of a run"),
        (lines()[:1], "without a call"),
        ([*lines()[:2], "{"], "line 3"),
        (lines()[:-1], "does not end with its last call"),
        (change(1, prompt_tokens=-1), "line 2"),
        (change(2, duration_s=float("nan")), "line 3"),
        (change(0, recorded={"model": "m"}), "line 1"),
    ],
)
def test_what_is_no_whole_record_is_refused_with_its_line(tmp_path, text: list[str], words: str) -> None:
    """Half a record proves nothing, so nothing is skipped."""
    with pytest.raises(ConfigError, match=words):
        records.read(written(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    """The message has the path."""
    with pytest.raises(ConfigError, match="no/such/file"):
        records.read("no/such/file")


def test_costs_of_a_record_have_its_sizes_and_lanes() -> None:
    """Bytes of each tier, rates of each lane; no disk, no disk rates."""
    costs: Costs = steptimes.calibrated(lone_session())
    assert (16_000_000, 16_000_000, 0) == (costs.device_bytes, costs.host_bytes, costs.disk_bytes)
    assert (1e9, 1e9, None) == (costs.h2d_bytes_s, costs.d2h_bytes_s, costs.read_bytes_s)
    assert 1000 == costs.token_bytes
