"""The disk tier against a raw O_DIRECT preadv/pwritev loop over the same file, with the same threads and sizes.

8 readers and 4 writers, jobs of 4 MiB of neighbouring blocks as the tiers give them, in random order, out of and into
an arena of their own. Shares are medians over the rounds of a side over the raw loop; a store with its journal is measured.
The cost of checksums is the part of the time that goes away without them. Each figure is the worse of the block sizes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from common import arguments, emit, interleaved, median, say

from agentkv.kv.slab import Slab, SlotImage
from agentkv.units import KIB, MIB

BLOCKS = (192 * KIB, 2 * MIB)
READERS, WRITERS = 8, 4
JOB_BYTES = 4 * MIB
CHANCE = random.Random(1)  # noqa: S311 - content and order, not secrets

Job = list[SlotImage]


class Bench:
    """A full store of `size_bytes` in blocks of `block_bytes`, and the same bytes seen as a plain file."""

    def __init__(self, folder: Path, block_bytes: int, size_bytes: int) -> None:
        count = size_bytes // block_bytes
        self.block_bytes = block_bytes
        self.arena = mmap.mmap(-1, count * block_bytes)
        view = memoryview(self.arena)
        for at in range(0, len(view), MIB):
            part = view[at : at + MIB]
            part[:] = CHANCE.randbytes(len(part))
        capacity = size_bytes + size_bytes // 16 + 64 * MIB
        self.slab = Slab(folder, capacity, block_bytes, store=f"bench-{block_bytes}", segment_bytes=capacity)
        slots = self.slab.reserve(count)
        keys = [CHANCE.randbytes(16) for _ in slots]
        images = [
            SlotImage(slot, key, view[i * block_bytes : (i + 1) * block_bytes])
            for i, (slot, key) in enumerate(zip(slots, keys, strict=True))
        ]
        most = JOB_BYTES // block_bytes
        self.jobs = [images[at : at + most] for at in range(0, len(images), most)]
        self.size_bytes = count * block_bytes
        self.path = self.slab.path / "segment-00000"
        self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        for job in self.jobs:
            self.slab.write(job)

    def rate(self, threads: int, deed: Callable[[Job], None]) -> float:
        """Bytes per second of `deed` over all jobs, by so many threads, in random order."""
        jobs = CHANCE.sample(self.jobs, len(self.jobs))
        lock, failures = threading.Lock(), []

        def work() -> None:
            try:
                while True:
                    with lock:
                        if not jobs:
                            return
                        job = jobs.pop()
                    deed(job)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        started_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return self.size_bytes / (time.perf_counter() - started_s)

    def raw_read(self, job: Job) -> None:
        done = os.preadv(self.fd, [image.view for image in job], job[0].slot * self.block_bytes)
        assert done == len(job) * self.block_bytes

    def raw_write(self, job: Job) -> None:
        done = os.pwritev(self.fd, [image.view for image in job], job[0].slot * self.block_bytes)
        assert done == len(job) * self.block_bytes

    def read(self, job: Job) -> None:
        assert all(self.slab.read(job))

    def read_unverified(self, job: Job) -> None:
        assert all(self.slab.read(job, verify=False))

    def write_unsummed(self) -> float:
        with without_checksums(self.slab):
            return self.rate(WRITERS, self.slab.write)

    def close(self) -> None:
        os.close(self.fd)
        self.slab.close()


@contextmanager
def without_checksums(slab: Slab) -> Iterator[None]:
    """Nothing is hashed meanwhile; what is written so must be rewritten before it is verified."""
    slab._checksums.start = lambda images: lambda: [0] * len(images)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del slab._checksums.start


def measure(folder: Path, block_bytes: int, size_bytes: int, repeats: int) -> dict[str, float]:
    bench = Bench(folder, block_bytes, size_bytes)
    try:
        raw_write = partial(bench.rate, WRITERS, bench.raw_write)
        write = interleaved(
            {
                "raw": raw_write,
                "bare": bench.write_unsummed,
                "slab": partial(bench.rate, WRITERS, bench.slab.write),
                "again": raw_write,
            },
            repeats,
        )
        bench.rate(WRITERS, bench.slab.write)
        raw_read = partial(bench.rate, READERS, bench.raw_read)
        read = interleaved(
            {
                "raw": raw_read,
                "bare": partial(bench.rate, READERS, bench.read_unverified),
                "slab": partial(bench.rate, READERS, bench.read),
                "again": raw_read,
            },
            repeats,
        )
        direct = all(segment.direct_fd is not None for segment in bench.slab._segments)
        fio = fio_read(bench.path, block_bytes)
        return {
            "raw_read_share": share(read, "slab", "raw"),
            "raw_write_share": share(write, "slab", "raw"),
            "checksum_cost": 1 - min(share(read, "slab", "bare"), share(write, "slab", "bare")),
            "read_gb_s": median(read["slab"]) / 1e9,
            "write_gb_s": median(write["slab"]) / 1e9,
            "a_over_a_read": share(read, "raw", "again"),
            "a_over_a_write": share(write, "raw", "again"),
            "o_direct": float(direct),
            "checksum_gb_s_cpu": checksum_rate(bench) / 1e9,
        } | ({"fio_read_share": median(read["slab"]) / fio} if fio else {})
    finally:
        bench.close()


def share(found: dict[str, list[float]], one: str, other: str) -> float:
    """The median over the rounds of one side over another: a disk that slows down slows a round down."""
    return median([a / b for a, b in zip(found[one], found[other], strict=True)])


def checksum_rate(bench: Bench) -> float:
    """Bytes per second of this thread's processor time, memory cold: on a busy machine it is processor time that a
    checksum costs, on a quiet one it hides behind the transfers.
    """
    started_s = time.thread_time()
    for job in bench.jobs:
        for image in job:
            bench.slab._checksums.of(image)
    return bench.size_bytes / (time.thread_time() - started_s)


def fio_read(path: Path, block_bytes: int) -> float | None:
    """Bytes per second of fio's random reads with as many threads; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    size = max(1, JOB_BYTES // block_bytes) * block_bytes
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1", "--thread"]
    command += [f"--bs={size}", f"--numjobs={READERS}", "--ioengine=psync", "--runtime=5", "--time_based"]
    command += ["--group_reporting", "--output-format=json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout)["jobs"][0]["read"]["bw_bytes"])


def main() -> None:
    args: argparse.Namespace = arguments(
        __doc__ or "",
        repeats=(int, 25, "rounds"),
        size_mib=(int, 384, "bytes per pass, MiB"),
        folder=(Path, None, "where to write; a folder for temporary files if none is given"),
    )
    root = Path(tempfile.mkdtemp(prefix="agentkv-bench-", dir=args.folder))
    result: dict[str, float] = {}
    try:
        for block_bytes in BLOCKS:
            say(args, f"blocks of {block_bytes // KIB} KiB ...")
            found = measure(root, block_bytes, args.size_mib * MIB, args.repeats)
            for key, value in found.items():
                result[f"{key}_{block_bytes // KIB}k"] = round(value, 3)
            for key in ("raw_read_share", "raw_write_share", "fio_read_share"):
                if key in found:
                    result[key] = round(min(result.get(key, 9.0), found[key]), 3)
            result["checksum_cost"] = round(max(result.get("checksum_cost", -1.0), found["checksum_cost"]), 3)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    emit(args, {"readers": READERS, "writers": WRITERS, **result})


if __name__ == "__main__":
    main()
