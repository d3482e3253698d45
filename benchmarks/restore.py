"""Restores of 4k tokens while others decode: what each costs the other. Real weights; restores without a model call.

Three sessions decode all the time. Windows alternate between decode alone (twice, as an A/A), decode with four
restores a second, and restores while the engine holds still. Then tool starts while the three decode: how long the
caller is held up, and when the first byte of the write-through moves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from common import arguments, emit, median, quantile, say
from contexts import Context
from workload import engine, loaded, text_of

from agentkv.clock import SystemClock
from agentkv.core.residency import Receipt, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.stream import Stream
from agentkv.hints.forecaster import Forecaster
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.policy import ladder
from agentkv.runtime.planner import Planner

DECODING = 3
PROMPT_TOKENS = 256
ANSWER_TOKENS = 3000
SPARE_TOKENS = 500
"""More than anybody decodes between two looks."""
RESTORED_BLOCKS = 4096 // BLOCK_TOKENS
RESTORES_S = 4
WINDOW_S = 1.0
NEW_BLOCKS = 16


class Decoding:
    """Sessions that decode without end; `steps` has the moment at which each step began."""

    def __init__(self, kv: LocalEngine, tokenizer: object) -> None:
        self._kv = kv
        self._prompts = [text_of(tokenizer, PROMPT_TOKENS, seed=i + 1) for i in range(DECODING)]
        self._forced = tuple(range(1000, 1000 + ANSWER_TOKENS))
        self._gate = threading.Event()
        self._held = threading.Event()
        self._gate.set()
        self.steps: list[float] = []
        forward = kv._runner.forward

        def timed(spans):
            if not self._gate.is_set():
                self._held.set()
                self._gate.wait()
                self._held.clear()
            self.steps.append(time.perf_counter())
            return forward(spans)

        kv._runner.forward = timed  # type: ignore[method-assign]
        self._streams: list[Stream] = []

    def keep_going(self) -> None:
        """Start over where an answer would end within the next windows; returns once all decode."""
        if self._streams and all(len(one.partial) < ANSWER_TOKENS - SPARE_TOKENS for one in self._streams):
            return
        for stream in self._streams:
            stream.cancel()
        self._streams = [
            self._kv.submit(Request(prompt=prompt, caller=Caller(task=f"other-{i}"), forced_ids=self._forced))
            for i, prompt in enumerate(self._prompts)
        ]
        while not all(len(stream.partial) > 4 for stream in self._streams):
            time.sleep(0.01)

    @contextmanager
    def still(self) -> Iterator[None]:
        """The engine's thread waits between two steps."""
        self._gate.clear()
        assert self._held.wait(10)
        time.sleep(0.05)  # the math library's threads stop spinning
        yield
        self._gate.set()

    def rate(self, started: float, ended: float) -> float:
        """Steps per second, from the first step that began in the window to the first that began after it."""
        first = next(i for i, at in enumerate(self.steps) if at >= started)
        while self.steps[-1] < ended:
            assert not all(stream.ended for stream in self._streams), "nobody decodes"
            time.sleep(0.001)
        last = next(i for i, at in enumerate(self.steps) if at >= ended)
        return (last - first) / (self.steps[last] - self.steps[first])

    def stop(self) -> None:
        """End all."""
        for stream in self._streams:
            stream.cancel()


def restores(context: Context, window_s: float) -> list[float]:
    """Four restores a second from host memory, evenly spread; milliseconds of each."""
    times: list[float] = []
    tiers, started = context.tiers, time.perf_counter()
    for i in range(round(window_s * RESTORES_S)):
        time.sleep(max(0.0, started + i / RESTORES_S - time.perf_counter()))
        began = time.perf_counter()
        lease = context.load()
        times.append((time.perf_counter() - began) * 1e3)
        assert lease.from_host == RESTORED_BLOCKS, "not every block came from the host"
        tiers.release(context.session, lease.blocks, used=tiers.streams.record())
        assert tiers.vacate(context.session, Tier.DEVICE) == RESTORED_BLOCKS
    time.sleep(max(0.0, started + window_s - time.perf_counter()))
    return times


def interference(kv: LocalEngine, others: Decoding, rounds: int) -> dict[str, float]:
    """The windows, in an order that turns round after round."""
    context = Context(kv.tiers, "restored", RESTORED_BLOCKS)
    context.fill()
    context.send_down(Tier.HOST)
    rates: dict[str, list[float]] = {"alone": [], "again": [], "restoring": []}
    busy: list[float] = []
    still: list[float] = []

    def window(name: str) -> None:
        others.keep_going()
        started = time.perf_counter()
        if name == "restoring":
            busy.extend(restores(context, WINDOW_S))
        else:
            time.sleep(WINDOW_S)
        rates[name].append(others.rate(started, time.perf_counter()))

    for number in range(-1, rounds):
        names = list(rates)[number % 3 :] + list(rates)[: number % 3]
        for name in names:
            window(name)
        with others.still():
            still.extend(restores(context, WINDOW_S / 2))
        if number < 0:  # warm-up
            for values in (*rates.values(), busy, still):
                values.clear()
    kv.tiers.drop(context.session)
    slowdown = median([1 - with_ / without for with_, without in zip(rates["restoring"], rates["alone"], strict=True)])
    noise = median([1 - a / b for a, b in zip(rates["again"], rates["alone"], strict=True)])
    return {
        "decode_slowdown": round(slowdown, 3),
        "decode_a_over_a": round(noise, 3),
        "decode_tokens_s": round(DECODING * median(rates["alone"]), 1),
        "windows": len(rates["alone"]),
        "restore_slowdown": round(median(busy) / median(still), 2),
        "restore_a_over_a": round(median(still[::2]) / median(still[1::2]), 2),
        "restore_alone_ms": round(median(still), 2),
        "restore_busy_ms": round(median(busy), 2),
        "restore_busy_p90_ms": round(quantile(busy, 0.9), 2),
        "restored_mib": round(RESTORED_BLOCKS * kv.tiers.geometry.block_bytes / (1 << 20), 1),
    }


def dispatch(kv: LocalEngine, others: Decoding, calls: int) -> dict[str, float]:
    """Tool starts of a 4k session with some new blocks: until the caller goes on, and until the first byte moves."""
    receipts: list[Receipt] = []
    arrived = threading.Event()
    forecaster = Forecaster()
    for seconds in (10, 12, 15, 20, 25, 30, 40):
        forecaster.learn("pytest", "pytest -q", seconds)

    def receive(receipt: Receipt) -> None:
        receipts.append(receipt)
        arrived.set()

    planner = Planner(
        engine=kv,
        policy=ladder(keep_s=0.5, drop_tokens=256),
        forecaster=forecaster,
        clock=SystemClock(),
        on_receipt=receive,
    )
    context = Context(kv.tiers, "agent", RESTORED_BLOCKS)
    context.fill()
    kept = RESTORED_BLOCKS - NEW_BLOCKS
    inline_ms, first_ms = [], []
    for number in range(calls + 1):
        others.keep_going()
        arrived.clear()
        forecast = forecaster.forecast("pytest", "pytest -q")
        started, clock_s = time.perf_counter(), time.monotonic()
        planner.tool_started("agent", f"call-{number}", "pytest", "pytest -q", forecast)
        inline_ms.append((time.perf_counter() - started) * 1e3)
        assert arrived.wait(30), "no receipt"
        assert receipts[-1].blocks >= NEW_BLOCKS, "nothing was written"
        first_ms.append((receipts[-1].first_byte_s - clock_s) * 1e3)
        planner.tool_ended("agent", f"call-{number}")
        kv.tiers.hold("agent", "agent", context.keys[:kept], kept * BLOCK_TOKENS)
        fresh = context.make(0, NEW_BLOCKS)
        context.commit(fresh, kept)
        context.end(fresh)
        time.sleep(0.037)  # not in step with the decoding
    planner.close()
    kv.tiers.drop(context.session)
    return {
        "dispatch_p50_ms": round(median(inline_ms[1:]), 3),
        "dispatch_p99_ms": round(quantile(inline_ms[1:], 0.99), 3),
        "first_byte_p50_ms": round(median(first_ms[1:]), 3),
        "first_byte_p99_ms": round(quantile(first_ms[1:], 0.99), 3),
        "dispatch_calls": calls,
    }


def main() -> None:
    args = arguments(__doc__ or "", repeats=(int, 24, "rounds of windows"), calls=(int, 200, "tool starts"))
    model = loaded()
    with engine(model, device_mib=640, host_mib=512) as kv:
        others = Decoding(kv, model.tokenizer)
        say(args, f"{args.repeats} rounds of windows ...")
        result = interference(kv, others, args.repeats)
        say(args, f"{args.calls} tool starts ...")
        result |= dispatch(kv, others, args.calls)
        others.stop()
        result["duplicate_loads"] = kv.tiers.stats()["duplicate_loads"]
    emit(args, {**result, "compute_threads": torch.get_num_threads(), "copy_threads": 2})


if __name__ == "__main__":
    main()
