"""Sizes and durations in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.clock import ManualClock
from agentkv.errors import ConfigError
from agentkv.units import GIB, KIB, MIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 * MIB), ("1.5 GiB", 3 * GIB // 2), ("4g", 4 * GIB), ("10 kB", 10_000), ("7", 7), (12, 12), (0, 0)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    """Binary and decimal units, with and without a space."""
    assert size == parse_bytes(text)


@pytest.mark.parametrize("bad", ["", "many", "12 parsecs", "-1MiB", -1, 1.5, None, True])
def test_what_is_no_size_is_refused_with_the_options_name(bad):
    """The error says which option was wrong."""
    with pytest.raises(ConfigError, match="host_memory"):
        parse_bytes(bad, option="host_memory")


@given(st.integers(min_value=0, max_value=1 << 50))
def test_every_size_prints(size):
    """Printed sizes are within the printed precision."""
    text, unit = format_bytes(size).split()
    factor = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}[unit]
    assert abs(float(text) * factor - size) <= 0.06 * factor


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0024, "2.4 ms"),
        (0.018, "18 ms"),
        (3.44, "3.4 s"),
        (125, "2 min 5 s"),
        (7199, "119 min 59 s"),
        (7200, "2 h 0 min"),
        (12_000, "3 h 20 min"),
        (172_799, "2 d 0 h"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_print_for_people(seconds, text):
    """Milliseconds, seconds, minutes."""
    assert text == format_seconds(seconds)


def test_a_manual_clock_moves_only_forward_while_wall_time_may_jump():
    """Durations come from the monotonic clock, whatever the wall clock does."""
    clock = ManualClock(5.0, wall_ms=1000)
    clock.advance(2)
    clock.step_wall(-3_600_000)
    assert (7.0, 3000 - 3_600_000) == (clock.now_s(), clock.wall_ms())
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
