"""Reading traces that are damaged, huge, unsorted or timed by several clocks; and writing our own."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.errors import ConfigError
from agentkv.sim.reader import Stream
from agentkv.sim.synthetic import synthetic
from agentkv.sim.trace import Skips, Trace, Wait, load, write


def record(step, **changes):
    told = {"session": "a", "step": step, "tool": "tool", "start": 10.0 * step, "dur": 4, "prompt_tok": 100}
    return told | {"out_tok": 5, "next_prompt_tok": 110, "reuse_tok": 100, "llm_s": 2.0} | changes


def text(*records):
    return "".join(json.dumps(each) + "\n" for each in records)


GOOD = text(*(record(step) for step in range(3)))


def counted(trace):
    assert trace.skipped.records == trace.skipped.used + trace.skipped.skipped
    return trace


def read(tmp_path, data, **options):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return counted(load(path, **options))


# -- damaged files


@pytest.mark.parametrize(
    ("data", "waits", "reasons"),
    [
        (b"", 0, {}),
        (b"\n\n  \n", 0, {}),
        (GOOD.encode() + b'{"session":"a","st', 3, {"cut last line": 1}),
        (GOOD.encode() + json.dumps(record(3)).encode(), 4, {}),
        (GOOD.replace("\n", "\n\n").encode(), 3, {}),
        (GOOD.replace("\n", "\r\n").encode(), 3, {}),
        (b"\xef\xbb\xbf" + GOOD.encode(), 3, {}),
        (GOOD.encode("utf-16"), 3, {}),
        (GOOD.replace('"a"', '"a\u2028b"').encode("utf-16"), 3, {}),
        (GOOD.encode("utf-16")[:-7], 2, {"cut last line": 1}),
        (gzip.compress(GOOD.encode("utf-16")), 3, {}),
        (b"\xff\xfe\x00\x00" + GOOD.encode("utf-32-le"), 3, {}),
        (gzip.compress(GOOD.encode()), 3, {}),
        (GOOD.encode() + b'{"session":"\xff\xfe"}\n', 3, {"not UTF-8": 1}),
        (GOOD.encode() + b"[1, 2]\n17\nnull\n", 3, {"not a JSON object": 3}),
        (b"nonsense\n" + GOOD.encode(), 3, {"not JSON": 1}),
        (GOOD.encode() + b"[" * 100_000 + b"\n", 3, {"nested too deeply": 1}),
        (GOOD.encode() + b'{"session":"a","step":' + b"9" * 5000 + b"}\n", 3, {"not JSON": 1}),
        (b"\x00\x01\x02\xff", 0, {"not UTF-8": 1}),
    ],
)
def test_damaged_lines_are_counted_and_the_rest_is_used(tmp_path, data, waits, reasons):
    """Cut, blank, binary, other encodings, other types: never a crash, never a silent loss."""
    trace = read(tmp_path, data)
    assert (waits, reasons) == (len(trace), trace.skipped.reasons)


def test_a_cut_compressed_file_gives_what_was_readable(tmp_path):
    """A download that stopped half-way."""
    whole = gzip.compress(text(*(record(step, session=f"s{step % 999}") for step in range(5000))).encode())
    trace = read(tmp_path, whole[: len(whole) // 2])
    assert 100 < len(trace) < 5000
    assert 1 == trace.skipped.reasons["cut or damaged compression"]


def test_strict_names_the_line_of_the_first_bad_record(tmp_path):
    """`strict` is for those who would rather have nothing than less."""
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 4: not JSON"):
        read(tmp_path, GOOD + "oops\n" + GOOD, strict=True)


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path):
    """So is a folder."""
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read"):
        load(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_a_pipe_is_read_like_a_file(tmp_path):
    """It has no length and no position; progress stays at nothing."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = text(*(record(step, session=f"s{step}") for step in range(12_000)))
    writer = threading.Thread(target=path.write_text, args=(data,))
    writer.start()
    told = []
    trace = counted(load(path, progress=lambda done, size: told.append((done, size))))
    writer.join()
    assert (12_000, {(0, 0)}) == (len(trace), set(told))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    """Of a line above the limit only the limit is ever held, and what follows it is read."""
    monkeypatch.setattr("agentkv.sim.lines.LONGEST_LINE_BYTES", 1 << 16)
    trace = read(tmp_path, b"x" * (1 << 20) + b"\n" + GOOD.encode())
    assert (3, 1) == (len(trace), trace.skipped.skipped)
    assert {f"longer than {(1 << 16) >> 20} MiB": 1} == trace.skipped.reasons


def test_a_file_that_is_still_being_written_is_read_to_where_it_is(tmp_path):
    """And once more when it has grown."""
    path = tmp_path / "live.jsonl"
    path.write_text(GOOD + '{"session": "a", "step": 3')
    assert 3 == len(counted(load(path)))
    path.write_text(GOOD + text(record(3)))
    assert 4 == len(counted(load(path)))


# -- damaged values


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dur": -1}, "dur is negative"),
        ({"dur": None}, "dur is missing"),
        ({"dur": math.nan}, "dur is not finite"),
        ({"dur": math.inf}, "dur is not finite"),
        ({"dur": "12"}, "dur is not a number"),
        ({"dur": True}, "dur is not a number"),
        ({"dur": 1e18}, "dur is above 30 days"),
        ({"dur": 10**400}, "dur is not finite"),
        ({"start": -3.0}, "start is negative"),
        ({"prompt_tok": -1}, "prompt_tok is out of range"),
        ({"prompt_tok": 10**12}, "prompt_tok is out of range"),
        ({"prompt_tok": None}, "prompt_tok is missing"),
        ({"session": None}, "session is missing"),
        ({"session": ""}, "session is missing"),
        ({"session": [1]}, "session is not a text"),
        ({"tool": "coffee"}, "unknown kind of wait"),
        ({"step": -1}, "step is out of range"),
        ({"start": 1.78e9}, "start by another clock than the session's first"),
        ({"step": 0}, "second record of a step"),
    ],
)
def test_a_record_that_cannot_be_true_is_left_out_with_its_reason(tmp_path, changes, reason):
    """Records in = used + skipped, the reason has its first line number, strict names it."""
    data = GOOD + text(record(3) | changes)
    trace = read(tmp_path, data)
    assert (3, {reason: 1}, {reason: 4}) == (len(trace), trace.skipped.reasons, trace.skipped.first_lines)
    assert f"1 x {reason} (first in line 4)" in trace.skipped.summary()
    with pytest.raises(ConfigError, match="line 4"):
        read(tmp_path, data, strict=True)


def test_a_reason_has_the_first_of_its_lines(tmp_path):
    """However many there are."""
    trace = read(tmp_path, GOOD + text(*(record(step, dur=-1) for step in (3, 4, 5))))
    assert ({"dur is negative": 3}, {"dur is negative": 4}) == (trace.skipped.reasons, trace.skipped.first_lines)


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")])
def test_times_since_1970_become_relative_whatever_their_unit(tmp_path, factor, unit):
    """Stated, not silent: the unit is told from the size, and the count is in the summary."""
    base = 1_780_000_000
    trace = read(tmp_path, text(*(record(step, start=(base + 10 * step) * factor) for step in range(3))))
    assert [2.0, 12.0, 22.0] == [pytest.approx(wait.start_s, abs=1e-3) for wait in trace.sessions[0]]
    assert {f"start taken as {unit} since 1970": 3} == trace.skipped.notes
    assert (0.0,) == trace.arrivals_s


def test_units_mixed_within_a_session_meet_on_one_clock(tmp_path):
    """Seconds and milliseconds since 1970 side by side."""
    base = 1_780_000_000
    trace = read(tmp_path, text(record(0, start=base), record(1, start=(base + 10) * 1000)))
    assert [2.0, 12.0] == [wait.start_s for wait in trace.sessions[0]]


def test_unsorted_records_are_put_in_order_and_noted(tmp_path):
    """By their steps."""
    trace = read(tmp_path, text(*(record(step) for step in (2, 0, 1))))
    assert [0, 1, 2] == [wait.step for wait in trace.sessions[0]]
    assert 1 == trace.skipped.notes["session out of order, sorted"]


def test_a_clock_that_stepped_back_does_not_make_time_negative(tmp_path):
    """The start is reckoned from the wait before; durations are what was recorded."""
    trace = read(tmp_path, text(record(0, start=5000.0), record(1, start=1400.0), record(2, start=1410.0)))
    starts = [wait.start_s for wait in trace.sessions[0]]
    assert [5000.0, 5006.0, 5012.0] == starts
    assert 2 == trace.skipped.notes["start went back, reckoned from the wait before"]


def test_missing_starts_are_reckoned_from_what_came_before(tmp_path):
    """Wait and model call laid end to end."""
    trace = read(tmp_path, text(*(record(step, start=None) for step in range(3))))
    assert [2.0, 8.0, 14.0] == [wait.start_s for wait in trace.sessions[0]]


def test_reuse_never_exceeds_the_prompt(tmp_path):
    """A claim that more was reused than there was is cut."""
    assert 100 == read(tmp_path, text(record(0, reuse_tok=5000))).sessions[0][0].reuse_tokens


def test_names_that_cannot_be_printed_can_be_printed(tmp_path):
    """A lone surrogate is valid JSON and no valid text."""
    trace = read(tmp_path, text(record(0)).replace('"a"', '"\\ud800x"'))
    assert b"?x" == trace.sessions[0][0].session.encode()


# -- large files


def test_a_streamed_file_holds_only_open_sessions(tmp_path):
    """A tenth of the memory of all at once, and the same waits."""
    path = tmp_path / "t.jsonl"
    path.write_text(text(*(record(step, session=f"s{number}") for number in range(500) for step in range(10))))
    tracemalloc.start()
    whole = load(path)
    held_bytes = tracemalloc.get_traced_memory()[1]
    sessions = whole.sessions
    tracemalloc.reset_peak()
    before_bytes = tracemalloc.get_traced_memory()[0]
    stream = Stream(path, open_sessions=4)
    assert all(session.waits == expected for session, expected in zip(stream, sessions, strict=True))
    stream_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    tracemalloc.stop()
    assert stream_bytes < held_bytes / 10
    assert whole.skipped == stream.skipped


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_records_take_no_more_memory_than_a_thousand(tmp_path):
    """230 MB of them, in a process of its own (Linux tells its peak); the totals are right and progress was told."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(1_000_000):
            file.write(text(record(number % 50, session=f"s{number // 50}", dur=number % 7)))
    code = f"""
import re
from agentkv.sim.reader import Stream
told = []
stream = Stream({str(path)!r}, progress=lambda done, size: told.append(done))
total = sum(wait.duration_s for session in stream for wait in session.waits)
print(int(total), stream.skipped.used, len(told), int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, used, told, peak_mib = (int(word) for word in done.stdout.split())
    assert (sum(number % 7 for number in range(1_000_000)), 1_000_000, 101) == (total, used, told)
    assert peak_mib < 60


def test_a_session_that_comes_back_after_it_was_given_is_counted(tmp_path):
    """The price of a bound; `load` has none and loses nothing."""
    path = tmp_path / "t.jsonl"
    path.write_text(text(record(0), record(0, session="b"), record(0, session="c"), record(1)))
    stream = Stream(path, open_sessions=2)
    assert [1, 1, 1] == [len(session.waits) for session in stream]
    assert {"session was closed before": 1} == stream.skipped.reasons
    assert 4 == len(load(path))


def test_a_split_run_has_the_same_totals(tmp_path):
    """The sum over parts is the whole."""
    rows = [record(step, session=f"s{number}") for number in range(30) for step in range(7)]
    whole = read(tmp_path, text(*rows))
    parts = [read(tmp_path, text(*rows[at : at + 70])) for at in range(0, 210, 70)]
    assert len(whole) == sum(len(part) for part in parts)
    assert sum(w.duration_s for w in whole.waits()) == sum(w.duration_s for part in parts for w in part.waits())


def test_progress_is_told_and_ends_at_the_whole(tmp_path):
    """(bytes read, bytes in all), never more than all."""
    told = []
    data = text(*(record(step, session=f"s{step}") for step in range(25_000)))
    read(tmp_path, data, progress=lambda done, size: told.append((done, size)))
    assert 3 == len(told)
    assert (len(data), len(data)) == told[-1]
    assert all(done <= size for done, size in told)


# -- our own format


def test_what_is_written_is_read_back(tmp_path):
    """`load` gives the waits that `write` was given, with parallel calls and arrivals."""
    trace = synthetic(seed=3, sessions=20, arrivals_per_s=0.5)
    assert any(wait.calls for session in trace.sessions for wait in session)
    write(tmp_path / "t.jsonl", trace.sessions, source="mine", arrivals_s=trace.arrivals_s)
    again = counted(load(tmp_path / "t.jsonl", strict=True))
    assert trace.sessions == again.sessions
    assert trace.arrivals_s == again.arrivals_s
    assert "mine" == again.source
    assert [tmp_path / "t.jsonl"] == list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """Nothing half-written takes a trace's place."""
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD)

    def broken():
        yield ()
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write(path, broken())
    assert GOOD == path.read_text()
    assert [path] == list(tmp_path.iterdir())


def test_arrivals_must_match_the_sessions():
    """One for each session or none."""
    with pytest.raises(ConfigError, match="2 arrivals for 0 sessions"):
        Trace(sessions=(), arrivals_s=(0.0, 1.0))


# -- anything at all


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_crash_the_reader(tmp_path_factory, data):
    """Whatever a file holds: a trace and counts that add up, or one of our errors about its version."""
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    path.write_bytes(data)
    counted(load(path))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)
FIELDS = dict.fromkeys(
    [
        "session",
        "step",
        "tool",
        "start",
        "dur",
        "prompt_tok",
        "out_tok",
        "next_prompt_tok",
        "reuse_tok",
        "llm_s",
        "arg",
        "n_par",
        "timeout_s",
        "censored",
        "kind",
        "duration_s",
        "start_s",
        "parallel",
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "session_id",
        "input_tokens_total",
        "round_index",
        "tools",
        "timing_events",
        "prefix_tokens",
        "delay",
        "arrival_s",
    ],
    VALUES,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=8),
    st.sampled_from(["auto", "agentkv", "weka", "local_tools", "tracelab", "mooncake"]),
)
def test_no_values_crash_a_parser_and_every_record_is_accounted_for(tmp_path_factory, rows, format_name):
    """Records in = used + skipped in every format; what comes out is finite, ordered and not negative."""
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    path.write_text(text(*rows))
    trace = counted(load(path, format=format_name))
    assert len(rows) == trace.skipped.records
    for session in trace.sessions:
        assert all(0 <= wait.duration_s < math.inf and 0 <= wait.start_s < math.inf for wait in session)
        assert sorted(wait.start_s for wait in session) == [wait.start_s for wait in session]
        assert all(wait.reuse_tokens <= wait.prompt_tokens for wait in session)


def test_a_summary_reads_as_a_sentence():
    """What `--trace` prints."""
    skips = Skips(records=5, used=3, reasons={"dur is negative": 2}, first_lines={"dur is negative": 4}, notes={"n": 1})
    assert "5 records, 3 used, 2 skipped: 2 x dur is negative (first in line 4); 1 x n" == skips.summary()


def test_a_last_call_is_an_end_and_no_wait():
    """Mooncake's last request of a session: its tokens count, nobody waits."""
    end = Wait(session="s", step=0, kind="human", start_s=0, duration_s=0, prompt_tokens=9, output_tokens=1,
               next_prompt_tokens=0, reuse_tokens=0)  # fmt: skip
    assert (0, []) == (len(Trace(sessions=((end,),))), list(Trace(sessions=((end,),)).waits()))
