"""The benchmark's torture, short; and that it would see a wrong byte."""

from __future__ import annotations

import pytest
from gpu_sections import torture as module
from gpu_sections.torture import torture


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_ever_wrong(scene, seed):
    """Random deeds over three small tiers, with poison; and every kind of trip was made."""
    found = torture(scene, 1500, seed=seed)
    assert 0 == found["mismatches"]
    assert 1500 == found["operations"]
    assert min(found["hits"].values()) > 0
    assert min(found["bytes"][name] for name in ("h2d", "d2h", "read", "write")) > 0
    assert found["poisoned"] > 50


def test_a_block_that_is_not_copied_is_seen(scene, monkeypatch):
    """The control: a stream that now and then forgets the last run of a job."""
    forgotten = []

    class Forgetful(module.Poisoned):
        def copy(self, direction, runs, after):
            if len(forgotten) < 20 and direction == "h2d" and len(runs) > 1:
                forgotten.append(runs[-1])
                runs = runs[:-1]
            return super().copy(direction, runs, after)

    monkeypatch.setattr(module, "Poisoned", Forgetful)
    found = torture(scene, 800, seed=3)
    assert len(forgotten) > 3
    assert found["mismatches"] > 0
