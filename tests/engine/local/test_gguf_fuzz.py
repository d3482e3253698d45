"""A GGUF whose header has other bytes: the weights that were written, or a refusal; never others, never a traceback (M5).

Covers unpacking by the hundred. What each refusal says: `test_gguf_damage.py`.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from agentkv.errors import AgentKVError


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


draft = _module("gguf_draft")
maker = draft.maker
folder, whole, made, weights = draft.folder, draft.whole, draft.made, draft.weights


def _changed(rng, raw, header_bytes):
    """A few bytes of the header that are others."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(4, header_bytes)
        out[at] = rng.choice((0, 1, 255, rng.randrange(256), out[at] ^ 1 << rng.randrange(8)))
    return bytes(out)


def _fields(made):
    """Each number of the header in turn, changed in each of some ways; it is set back afterwards."""
    ways = (lambda n: 0, lambda n: n + 1, lambda n: n - 1, lambda n: 2 * n, lambda n: n ^ 32, lambda n: 2**32 - 1)
    for info in made.infos:
        before = (list(info.dims), info.kind, info.offset)
        for way in ways:
            for place in range(len(info.dims)):
                info.dims[place] = way(info.dims[place]) % 2**64
                yield f"{info.name} dims[{place}]"
                info.dims = list(before[0])
            info.kind = way(info.kind) % 2**32
            yield f"{info.name} kind"
            info.kind = before[1]
            info.offset = way(info.offset) % 2**64
            yield f"{info.name} offset"
            info.offset = before[2]
        info.dims.reverse()
        yield f"{info.name} dims reversed"
        info.dims = list(before[0])


def test_every_field_of_every_tensor_matters(whole, made, weights):
    """Changed in any way it gives the same weights (it was not changed) or a refusal; silently others, never."""
    wanted, seen = weights(whole), {"same": 0, "refused": 0}
    for what in _fields(made):
        raw = made.bytes()
        try:
            found = weights(raw)
        except AgentKVError:
            seen["refused"] += 1
            continue
        seen["same"] += 1
        assert wanted.keys() == found.keys(), what
        assert all(torch.equal(wanted[name], found[name]) for name in wanted), what
    assert seen["refused"] > 300, seen


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_give_the_same_weights_or_a_refusal(whole, weights, seed):
    """Wherever in the header they are; never another exception, never silently other weights."""
    rng, wanted = random.Random(seed), weights(whole)
    header_bytes = whole.index(b"output_norm.weight") + 60
    seen = {"same": 0, "refused": 0}
    for number in range(250):
        raw = _changed(rng, whole, header_bytes)
        try:
            found = weights(raw)
        except AgentKVError:
            seen["refused"] += 1
            continue
        seen["same"] += 1
        assert wanted.keys() == found.keys(), (seed, number)
        assert all(torch.equal(wanted[name], found[name]) for name in wanted), (seed, number)
    assert min(seen.values()) > 10, seen
