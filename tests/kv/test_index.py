"""Keys of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.kv.index import KEY_BYTES, chain_keys, root_key

ROOT = root_key(fingerprint=b"weights", salt="tenant")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(TOKENS)
def test_every_full_block_has_one_key_and_a_partial_one_none(tokens):
    """floor(n / 16) keys of 16 bytes (K18)."""
    keys = chain_keys(ROOT, tokens)
    assert len(tokens) // 16 == len(keys)
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(keys) == len(set(keys))


@given(TOKENS, TOKENS)
def test_chains_agree_exactly_on_their_common_blocks(a, b):
    """Keys are equal up to the last block in which all tokens so far are equal, and never after."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    ours, theirs = chain_keys(ROOT, a), chain_keys(ROOT, b)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        assert (x == y) == (16 * (i + 1) <= same)


@given(st.lists(st.integers(0, 1000), min_size=32, max_size=100))
def test_a_chain_can_be_continued(tokens):
    """start_key = the key before gives the same keys as hashing all at once."""
    whole = chain_keys(ROOT, tokens)
    assert whole[1:] == chain_keys(ROOT, tokens[16:], start_key=whole[0])


def test_model_and_tenant_are_framed():
    """("ab", "c") and ("a", "bc") share nothing (K5), nor do two tenants or two models."""
    pairs = [(b"ab", "c"), (b"a", "bc"), (b"abc", ""), (b"", "abc"), (b"ab", "d")]
    roots = {root_key(fingerprint=model, salt=salt) for model, salt in pairs}
    assert len(pairs) == len(roots)


def test_a_salt_may_hold_any_text():
    """Half surrogates come from broken clients and must not raise here."""
    assert root_key(fingerprint=b"m", salt="\ud800") != root_key(fingerprint=b"m", salt="")


def test_a_token_id_that_is_no_token_id_is_refused():
    """Negative ids would alias others."""
    with pytest.raises(OverflowError):
        chain_keys(ROOT, [-1] * 16)
