"""Costs: KV sizes, restore and recompute, and where they cross."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.policy.cost import (
    Link,
    break_even_tokens,
    crossover,
    disk_link,
    host_link,
    in_words,
    kv_bytes_per_token,
    table_lengths,
)

GB = 1e9
GIB = 2**30


def test_a_70b_gqa_model_at_128k_holds_well_over_16_gb():
    """80 layers, 8 KV heads of 128 in fp16: 320 KiB a token."""
    token = kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, dtype_bytes=2)
    assert token == 327_680
    assert token * 131_072 > 40 * GB


def test_a_7b_mha_model_at_32k_holds_16_gib():
    """32 layers, hidden 4096, so 32 heads of 128."""
    token = kv_bytes_per_token(layers=32, kv_heads=32, head_dim=128, dtype_bytes=2)
    assert token * 32_768 == 16 * GIB


def test_the_demo_model_holds_23040_bytes_a_token():
    """SmolLM2-135M: 30 layers of 3 KV heads of 64 in bf16."""
    assert kv_bytes_per_token(layers=30, kv_heads=3, head_dim=64, dtype_bytes=2) == 23_040


def test_multi_query_attention_has_one_kv_head():
    """MQA is the same formula."""
    assert kv_bytes_per_token(layers=1, kv_heads=1, head_dim=64, dtype_bytes=2) == 256


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "dtype_bytes"])
def test_a_model_without_a_dimension_is_refused(name):
    """The message names the number at fault."""
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype_bytes": 1} | {name: 0}
    with pytest.raises(ConfigError, match=name):
        kv_bytes_per_token(**shape)


@pytest.mark.parametrize(("rate", "seconds"), [(50 * GB, 0.32), (7 * GB, 2.29)])
def test_16_gb_take_a_third_of_a_second_over_pcie5_and_two_from_nvme(rate, seconds):
    """The anchors of requirement A2."""
    assert Link(bytes_s=rate).restore_s(16 * GB) == pytest.approx(seconds, abs=0.01)


def test_nothing_to_restore_and_nothing_to_compute_cost_nothing():
    """Set-up times are paid for work only."""
    assert Link(bytes_s=1.0, setup_s=5.0).restore_s(0) == 0.0
    assert Prefill(linear_s=1.0, constant_s=5.0).recompute_s(0) == 0.0


@pytest.mark.parametrize("make", [lambda: Link(bytes_s=0.0), lambda: Link(bytes_s=math.nan),
                                  lambda: Link(bytes_s=1.0, setup_s=-1.0), lambda: Prefill(linear_s=-1.0),
                                  lambda: Prefill(linear_s=math.nan)])  # fmt: skip
def test_rates_that_cannot_be_are_refused(make):
    """Zero or negative rates never come from a measurement."""
    with pytest.raises(ConfigError):
        make()


positive = st.floats(1e-9, 1e-2)


prefills = st.builds(
    Prefill, linear_s=positive, quadratic_s=st.just(0.0) | st.floats(1e-12, 1e-6), constant_s=st.floats(0, 1)
)
links = st.builds(Link, bytes_s=st.floats(1e6, 1e11), setup_s=st.floats(0, 1))


@given(prefills, links, st.integers(1, 10**6))
def test_beyond_the_crossover_restoring_is_never_slower(prefill, link, token_bytes):
    """The computed break-even splits the lengths: beyond it the link wins, just below it recompute does."""
    crossing = break_even_tokens(prefill, link, token_bytes)
    if not crossing < 1e8:
        return
    longer = math.ceil(crossing * 1.01) + 1
    assert link.restore_s(longer * token_bytes) <= prefill.recompute_s(longer) * (1 + 1e-6)
    shorter = math.floor(crossing * 0.99)
    if shorter >= 1 and prefill.quadratic_s == 0:  # a parabola may cross twice
        assert link.restore_s(shorter * token_bytes) >= prefill.recompute_s(shorter) * (1 - 1e-6)


def test_a_link_slower_than_recompute_never_pays():
    """Linear prefill that beats the disk's rate per token: no crossover."""
    assert break_even_tokens(Prefill(linear_s=1e-5), Link(bytes_s=1e6, setup_s=0.1), 1000) == math.inf


fast = st.floats(1e6, 1e12)
rates = st.builds(
    lambda disk, **given: Rates(read_bytes_s=disk, write_bytes_s=disk, **given),
    disk=st.none() | fast,
    memcpy_bytes_s=fast,
    h2d_bytes_s=fast,
    d2h_bytes_s=fast,
    prefill=prefills,
)


@given(rates, st.integers(1, 10**6), st.integers(1, 200_000))
def test_the_table_agrees_with_the_break_even_lengths(rates, token_bytes, limit):
    """Beyond a break-even length the restore is the faster one in every row; without a disk there is no column."""
    found = crossover(rates, token_bytes, table_lengths(limit))
    assert found.host_tokens == break_even_tokens(rates.prefill, host_link(rates), token_bytes)
    assert (found.disk_tokens is None) == (rates.read_bytes_s is None) == (disk_link(rates) is None)
    for row in found.rows:
        assert (row.disk_s is None) == (rates.read_bytes_s is None)
        fastest = min(value for value in (row.recompute_s, row.host_s, row.disk_s) if value is not None)
        assert fastest == {"recompute": row.recompute_s, "host": row.host_s, "disk": row.disk_s}[row.winner]
        if row.tokens > found.host_tokens * 1.001:
            assert row.host_s <= row.recompute_s * (1 + 1e-6)
        if found.disk_tokens is not None and row.tokens > found.disk_tokens * 1.001:
            assert row.disk_s <= row.recompute_s * (1 + 1e-6)


def test_break_even_lengths_have_words():
    """Always, never, or from a whole number of tokens on."""
    assert ["at every length", "from 812 tokens on", "at no length"] == [in_words(n) for n in (0.0, 811.2, math.inf)]


def test_the_lengths_double_from_512_to_the_limit():
    """The model's limit is the last row, whatever it is; a short model has one row."""
    assert (512, 1024, 2048, 4096, 8192) == table_lengths(8192)
    assert (512, 1000) == table_lengths(1000)
    assert (100,) == table_lengths(100)
    with pytest.raises(ConfigError, match="limit_tokens=0"):
        table_lengths(0)


def test_a_fast_host_a_slow_disk_and_a_fast_gpu_in_one_table():
    """A long context comes from the host; a disk slower than recompute never pays, and the row says who wins."""
    gpu = Rates(
        memcpy_bytes_s=10 * GB,
        h2d_bytes_s=50 * GB,
        d2h_bytes_s=50 * GB,
        read_bytes_s=0.1 * GB,
        write_bytes_s=0.1 * GB,
        prefill=Prefill(linear_s=1e-4, constant_s=0.02),
    )
    found = crossover(gpu, 131_072, (100, 8192))
    assert ["host", "host"] == [row.winner for row in found.rows]
    assert (0.0, math.inf) == (found.host_tokens, found.disk_tokens)
    assert found.rows[1].disk_s > found.rows[1].recompute_s
