"""Usage and Timing: values that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.usage import Timing, Usage


def _usage(parts, calls):
    cached, written, long, more, said, thought = parts
    return Usage(
        input_tokens=cached + written + long + more,
        cached_tokens=cached,
        cache_write_tokens=written + long,
        cache_write_long_tokens=long,
        output_tokens=said + thought,
        reasoning_tokens=thought,
        calls=calls,
    )


usages = st.builds(_usage, st.tuples(*[st.integers(0, 10**9)] * 6), st.integers(0, 100))


@given(usages, usages)
def test_usage_adds_field_by_field_and_keeps_its_order(a, b):
    """The parts stay parts in every sum."""
    total = a + b
    assert total.total_tokens == a.total_tokens + b.total_tokens
    assert total.cached_tokens + total.uncached_tokens == total.input_tokens
    assert 0 <= total.cached_tokens <= total.input_tokens
    assert total.reasoning_tokens == a.reasoning_tokens + b.reasoning_tokens <= total.output_tokens
    assert total.cache_write_tokens == a.cache_write_tokens + b.cache_write_tokens <= total.uncached_tokens
    assert total.cache_write_long_tokens == a.cache_write_long_tokens + b.cache_write_long_tokens


@pytest.mark.parametrize(
    "values",
    [
        {"input_tokens": 3, "cached_tokens": 4},
        {"output_tokens": -1},
        {"cached_tokens": -1},
        {"calls": -1},
        {"reasoning_tokens": -1},
        {"reasoning_tokens": 2, "output_tokens": 1},
        {"input_tokens": 9, "cache_write_tokens": -1},
        {"input_tokens": 9, "cached_tokens": 5, "cache_write_tokens": 5},
        {"input_tokens": 9, "cache_write_tokens": 5, "cache_write_long_tokens": 6},
        {"input_tokens": 9, "cache_write_long_tokens": -1},
    ],
)
def test_impossible_usage_is_refused(values):
    """More cached than read, more thought than written, or less than nothing, is a bug of whoever counted."""
    with pytest.raises(ValueError):
        Usage(**values)


def test_stall_is_what_the_old_context_cost():
    """Queue, restore and recompute count as stall; prefill of new tokens and decode do not."""
    timing = Timing(queued_s=1.0, restore_s=2.0, recompute_s=4.0, prefill_s=8.0, decode_s=16.0)
    assert timing.stall_s == 7.0
    assert (timing + timing).stall_s == 14.0
