"""Decode: the time between two tokens of several sessions, with and without copies in both directions at full rate.

Windows alternate, so that a slow minute hits both; the ratio of two halves of the quiet ones (A/A) says how much of
a difference noise alone makes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.kv.streams import Direction, Event, Run, Streams
from gpu_sections.model import engine, ids_of, random_llama, text_of
from gpu_sections.scene import GEOMETRIES, MIB, Found, Scene, at_most, finish, middle, rank

_JOB_BLOCKS = 32
_GEOMETRY = GEOMETRIES[2 * MIB]


class Traffic:
    """64 MiB jobs of scattered 2 MiB blocks, two in flight per direction, over streams of their own."""

    def __init__(self, streams: Streams, blocks: int) -> None:
        self._streams = streams
        self._blocks = blocks
        self.bytes = 0
        self.busy_s = 0.0

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Copies run inside of the block."""
        stop = threading.Event()
        moved = [0, 0]

        def flow(number: int, direction: Direction) -> None:
            chance = random.Random(number)  # noqa: S311
            events: list[Event] = []
            size = min(_JOB_BLOCKS, self._blocks // 2)
            half = range(number * size, number * size + size)  # the two directions touch different blocks
            while not stop.is_set():
                slots = chance.sample(half, size)
                events.append(self._streams.copy(direction, [Run(1 + slot, slot, 1) for slot in slots], ()))
                if len(events) > 1:
                    events.pop(0).wait()
                    moved[number] += size * _GEOMETRY.block_bytes
            finish(events)

        threads = [threading.Thread(target=flow, args=pair) for pair in enumerate(("h2d", "d2h"))]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            self.busy_s += time.monotonic() - started
            self.bytes += sum(moved)


class Talk:
    """A session that goes on writing where it stopped; `gaps_s` between its tokens."""

    def __init__(self, kv: Any, number: int, context: int) -> None:
        self._kv = kv
        self._caller = Caller(task=f"talk-{number}")
        self._prompt = text_of(context, seed=number)

    def speak(self, tokens: int) -> list[float]:
        """Times between tokens, the first one excepted."""
        said = text_of(tokens, seed=99)
        request = Request(prompt=self._prompt, caller=self._caller, forced_ids=ids_of(said))
        times = []
        stream = self._kv.submit(request)
        for chunk in stream:
            times += [time.perf_counter()] * len(chunk.token_ids)
        self._prompt += stream.result(300).text + "."
        return [b - a for a, b in itertools.pairwise(times)]


def run(scene: Scene) -> Found:
    """Windows of both kinds."""
    sessions, context, tokens, windows = (2, 64, 16, 2) if scene.small else (4, 2048, 128, 10)
    quiet: list[list[float]] = []
    busy: list[list[float]] = []
    blocks = 8 if scene.small else 128
    model = random_llama(scene.device, small=scene.small)
    tokens_held = sessions * (context + (tokens + 17) * (2 * windows + 2))
    with engine(scene, model, tokens=tokens_held) as kv, scene.memory(_GEOMETRY, blocks) as memory:
        streams = scene.streams()
        streams.bind(memory)
        traffic = Traffic(streams, blocks)
        talks = [Talk(kv, number, context) for number in range(sessions)]

        def window() -> list[float]:
            gaps: list[float] = []
            threads = [threading.Thread(target=lambda talk=talk: gaps.extend(talk.speak(tokens))) for talk in talks]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return gaps

        window()
        for number in scene.repeats(windows):
            for kind in (0, 1) if number % 2 else (1, 0):
                with traffic.flowing() if kind else contextlib.nullcontext():
                    (busy if kind else quiet).append(window())
        streams.close()
    flat_quiet, flat_busy = [gap for one in quiet for gap in one], [gap for one in busy for gap in one]
    ratio = rank(flat_busy, 0.99) / rank(flat_quiet, 0.99)
    halves = [[gap for one in quiet[start::2] for gap in one] for start in (0, 1)]
    figures = {
        "sessions": sessions,
        "context": context,
        "windows": len(quiet),
        "gaps": len(flat_quiet),
        "quiet_p50_ms": round(middle(flat_quiet) * 1e3, 3),
        "quiet_p99_ms": round(rank(flat_quiet, 0.99) * 1e3, 3),
        "busy_p50_ms": round(middle(flat_busy) * 1e3, 3),
        "busy_p99_ms": round(rank(flat_busy, 0.99) * 1e3, 3),
        "p99_ratio": round(ratio, 3),
        "p99_a_over_a": round(rank(halves[0], 0.99) / rank(halves[1], 0.99), 3) if all(halves) else None,
        "traffic_gb_s": round(traffic.bytes / traffic.busy_s / 1e9, 2),
    }
    return Found(figures=figures, lines=[at_most(scene, "p99 between tokens, with copies", round(ratio, 3), 1.10, "x")])
