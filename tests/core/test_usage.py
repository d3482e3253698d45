"""Usage and Timing: values that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.usage import Timing, Usage

usages = st.builds(
    lambda cached, more, output, calls: Usage(
        input_tokens=cached + more, cached_tokens=cached, output_tokens=output, calls=calls
    ),
    st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 100),
)  # fmt: skip


@given(usages, usages)
def test_usage_adds_field_by_field_and_keeps_its_order(a, b):
    """Cached tokens stay a part of the input in every sum."""
    total = a + b
    assert total.total_tokens == a.total_tokens + b.total_tokens
    assert total.cached_tokens + total.uncached_tokens == total.input_tokens
    assert 0 <= total.cached_tokens <= total.input_tokens


@pytest.mark.parametrize(
    "values", [{"input_tokens": 3, "cached_tokens": 4}, {"output_tokens": -1}, {"cached_tokens": -1}, {"calls": -1}]
)
def test_impossible_usage_is_refused(values):
    """More cached than read, or less than nothing, is a bug of whoever counted."""
    with pytest.raises(ValueError):
        Usage(**values)


def test_stall_is_what_the_old_context_cost():
    """Queue, restore and recompute count as stall; prefill of new tokens and decode do not."""
    timing = Timing(queued_s=1.0, restore_s=2.0, recompute_s=4.0, prefill_s=8.0, decode_s=16.0)
    assert timing.stall_s == 7.0
    assert (timing + timing).stall_s == 14.0
