"""The batched copy without streams: addresses, the call's answers, and whether this machine has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agentkv.kv.streams import Run
from agentkv.kv.streams.batch import BatchCopy, BatchRefused, Copies, Layout, available, batch_copy, copies_of, why_not
from agentkv.kv.streams.cuda import CudaStreams
from agentkv.kv.streams.pretend import PretendBinding, PretendDriver


def test_a_run_is_one_copy_and_none_spans_two_registrations():
    """Slots without padding, four to a piece."""
    layout = Layout(pool_address=10_000, arena_address=50_000, block_bytes=100, slot_bytes=100, piece_slots=4)
    copies = copies_of(layout, "d2h", [Run(1, 2, 3), Run(7, 8, 4)])
    assert Copies(to=[50_200, 50_400, 50_800], source=[10_100, 10_300, 10_700], sizes=[200, 100, 400]) == copies
    up = copies_of(layout, "h2d", [Run(1, 2, 3), Run(7, 8, 4)])
    assert (copies.source, copies.to, copies.sizes) == up


def test_padded_slots_are_copied_block_by_block():
    """The padding is not part of the block."""
    layout = Layout(pool_address=0, arena_address=1000, block_bytes=60, slot_bytes=100, piece_slots=4)
    assert ([120, 180], [1300, 1400], [60, 60]) == copies_of(layout, "h2d", [Run(2, 3, 2)])


@pytest.mark.parametrize(("failed_at", "where"), [(None, "1"), (2**64 - 1, "1"), (1, "1 at copy 1")])
def test_cuda_12_may_say_which_copy_it_was(failed_at, where):
    """It answers None, the largest number or an index."""
    binding = PretendBinding(PretendDriver(), major=12)
    binding.failed_at = failed_at
    with pytest.raises(BatchRefused, match=rf"answered {where}$"):
        BatchCopy(binding).submit(Copies([1, 2], [3, 4], [5, 5]), stream=1000, any_order=False)


def test_the_legacy_default_stream_is_not_even_tried():
    """The driver takes no batches on it."""
    binding = PretendBinding(PretendDriver())
    with pytest.raises(BatchRefused, match="legacy"):
        BatchCopy(binding).submit(Copies([1], [2], [3]), stream=0, any_order=False)
    assert [] == binding.calls


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"major": 12}, ""),
        ({"major": 12, "version": 12080}, ""),
        ({"version": 0}, "there is no CUDA driver"),
        ({"major": 12, "version": 12040}, "the CUDA driver is of version 12.4, 12.8 is needed"),
        (
            {"major": 13, "version": 12090},
            'cuda-bindings is for CUDA 13.0, the driver for 12.9 (pip install "cuda-bindings<13")',
        ),
    ],
)
def test_why_copies_cannot_be_batched_is_said_in_words(options, reason):
    """With the versions and what to do."""
    assert reason == why_not(PretendBinding(PretendDriver(), **options))


def test_a_binding_without_the_call_is_too_old():
    """Before 12.8 there was none."""
    assert "older than CUDA 12.8" in why_not(SimpleNamespace())


def test_a_driver_that_cannot_be_opened_is_no_driver():
    """CUDA 12's binding raises where 13's answers 0."""

    def missing():
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    binding = PretendBinding(PretendDriver())
    binding.cudaDriverGetVersion = missing
    assert "there is no CUDA driver" == why_not(binding)


def test_this_machine_answers():
    """With a reason, or with a batched copy that the real binding accepts."""
    found = batch_copy()
    assert available() == (found if isinstance(found, str) else "")
    streams = CudaStreams(torch.device("cpu"), native=PretendDriver())
    assert streams.copy_path == ("cudaMemcpyBatchAsync" if available() == "" else f"copy_ per run: {available()}")


def test_the_real_binding_takes_our_arguments():
    """Where it is installed: without a driver it refuses, but in the driver's words and not in its own."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if available() == "":
        pytest.skip("there is a driver: tests/gpu copies for real")
    batch = BatchCopy(runtime)
    with pytest.raises((BatchRefused, RuntimeError), match=r"InsufficientDriver|NoDevice|libcuda|cuInit"):
        batch.submit(Copies([4096, 8192], [12288, 16384], [10, 20]), stream=4711, any_order=True)
