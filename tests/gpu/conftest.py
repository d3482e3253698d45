"""The device under test. Nothing here needs a package beyond torch's: `bare.ini` runs this folder without installation.

What does not depend on CUDA's semantics runs on the CPU as well, so that it does not rot where there is no GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    """ "cpu" or "cuda"."""
    return request.param


@pytest.fixture
def scene(device, tmp_path):
    """The benchmark's surroundings, small."""
    from gpu_sections.scene import Scene

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Scene(device=device, small=True, scratch=tmp_path, deadline_s=time.monotonic() + 100)
    torch.set_num_threads(threads)
