"""Rates: what one context costs on a measured machine, and what is not a measurement."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.rates import OVERLAP, Prefill, Rates
from agentkv.errors import ConfigError

MACHINE = {"memcpy_bytes_s": 10e9, "h2d_bytes_s": 8e9, "d2h_bytes_s": 8e9, "prefill": Prefill(linear_s=1e-3)}


def test_recompute_is_the_quadratic():
    """quadratic_s C^2 + linear_s C + constant_s, and nothing for nothing."""
    rates = Rates(**MACHINE | {"prefill": Prefill(quadratic_s=1e-6, linear_s=1e-3, constant_s=0.5)})
    assert pytest.approx(1 + 1 + 0.5) == rates.recompute_s(1000)
    assert 0.0 == rates.recompute_s(0)


@given(st.lists(st.integers(0, 10_000), min_size=3, max_size=3))
def test_pieces_of_a_prefill_add_up_to_the_whole(tokens):
    """However a context is cut, its pieces cost what it costs; only the first one pays the constant."""
    first, second, third = sorted(tokens)
    prefill = Prefill(quadratic_s=1e-7, linear_s=1e-3, constant_s=0.1)
    pieces = prefill.extend_s(0, first) + prefill.extend_s(first, second) + prefill.extend_s(second, third)
    assert pytest.approx(prefill.recompute_s(third)) == pieces


def test_a_restore_from_disk_hides_most_of_the_copy_to_the_device():
    """Reading plus the last part of the copy; None where no disk was measured."""
    rates = Rates(**MACHINE, read_bytes_s=1e9, write_bytes_s=1e9)
    assert pytest.approx(8.0 + OVERLAP * 1.0) == rates.restore_disk_s(8e9)
    assert pytest.approx(1.0) == rates.restore_host_s(8e9)
    assert Rates(**MACHINE).restore_disk_s(8e9) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"memcpy_bytes_s": 0.0},
        {"h2d_bytes_s": -1.0},
        {"d2h_bytes_s": math.nan},
        {"h2d_bytes_s": None},
        {"read_bytes_s": math.inf, "write_bytes_s": 1.0},
        {"read_bytes_s": 1.0},
        {"samples": 0},
        {"measured_at": math.nan},
    ],
)
def test_rates_that_no_measurement_gives_are_refused(wrong):
    """Zero, negative, infinite, half a disk."""
    with pytest.raises(ConfigError):
        Rates(**MACHINE | wrong)
