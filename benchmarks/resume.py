"""Resuming a context after a tool: kept on the device, from host, from disk, and by recompute, on real weights.

For each context length a session is prefilled once; then each round resumes it four ways with the same 64 new tokens,
loaded on demand. Times are the engine's own account: the restore part (waiting for blocks, or computing them again)
and the whole time to the first token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import a_over_a, arguments, emit, interleaved, median, say
from workload import engine, loaded, send_down, text_of

from agentkv.core.residency import Tier
from agentkv.core.task import Caller
from agentkv.core.usage import Timing
from agentkv.engine.base import Request
from agentkv.engine.local.engine import LocalEngine

CONTEXTS = (1024, 4096, 7000)
NEW_TOKENS = 64
CHECKED_STEPS = 32


class Resumed:
    """One session that is put back to the same context before each resume."""

    def __init__(self, kv: LocalEngine, tokenizer: object, context: int) -> None:
        self.kv = kv
        self.key = f"bench-{context}#1"
        caller = Caller(task=f"bench-{context}")
        prompt = text_of(tokenizer, context)
        first = kv.submit(Request(prompt=prompt, caller=caller, session=self.key, forced_ids=(198,))).result(300)
        self.caller = caller
        self.prompt = prompt + first.text + text_of(tokenizer, NEW_TOKENS, seed=7)
        self.forced = tuple(tokenizer.encode(text_of(tokenizer, CHECKED_STEPS, seed=9)))[:CHECKED_STEPS]  # type: ignore[attr-defined]
        session = kv._sessions._by_key[self.key]
        self._state = (session.transcript, session.computed_tokens)
        holding = kv.tiers._book.holdings[self.key]
        self._keys, self._tokens = [block.key for block in holding.chain], holding.tokens
        self.logits: list[torch.Tensor] = []

    def resume(self, steps: int = 1) -> Timing:
        """The next model call of the session, for so many tokens."""
        self.logits = []
        forward = self.kv._runner.forward

        def recording(spans):
            logits = forward(spans)
            self.logits.append(logits.clone())
            return logits

        self.kv._runner.forward = recording  # type: ignore[method-assign]
        try:
            request = Request(prompt=self.prompt, caller=self.caller, session=self.key, forced_ids=self.forced[:steps])
            timing = self.kv.submit(request).result(300).timing
        finally:
            self.kv._runner.forward = forward  # type: ignore[method-assign]
        session = self.kv._sessions._by_key[self.key]
        session.transcript, session.computed_tokens = self._state
        self.kv.tiers.hold(self.key, self.caller.task, self._keys, self._tokens)
        return timing

    def same_logits(self, others: list[torch.Tensor]) -> bool:
        """Bitwise, over the last prompt position and the steps after it (prefill chunks give no row)."""
        mine, theirs = ([one for one in side if one.numel()] for side in (self.logits, others))
        return len(mine) == len(theirs) >= CHECKED_STEPS and all(map(torch.equal, mine, theirs))


def measure(kv: LocalEngine, tokenizer: object, context: int, repeats: int) -> dict[str, object]:
    """All four ways, interleaved."""
    one = Resumed(kv, tokenizer, context)
    timings: dict[str, list[Timing]] = {"kept": [], "host": [], "disk": [], "recompute": []}

    def kept(steps: int = 1) -> float:
        timings["kept"].append(one.resume(steps))
        return timings["kept"][-1].ttft_s

    def restored(name: str, tier: Tier, steps: int = 1) -> float:
        send_down(kv, one.key, tier)
        loaded = kv.tiers.stats()["hits"][name]
        timings[name].append(one.resume(steps))
        assert kv.tiers.stats()["hits"][name] - loaded >= context // 16, "not every block came from there"
        return timings[name][-1].ttft_s

    def recompute() -> float:
        kv.tiers.drop(one.key)
        timings["recompute"].append(one.resume())
        return timings["recompute"][-1].ttft_s

    # The exactness check warms up scratch buffers, page tables and measured rates as well.
    kept(CHECKED_STEPS)
    kept_logits = one.logits
    identical = []
    for name, tier in (("host", Tier.HOST), ("disk", Tier.DISK)):
        restored(name, tier, CHECKED_STEPS)
        identical.append(one.same_logits(kept_logits))
    recompute()
    for series in timings.values():
        series.clear()
    sides = {
        "kept": kept,
        "host": lambda: restored("host", Tier.HOST),
        "disk": lambda: restored("disk", Tier.DISK),
        "recompute": recompute,
    }
    ttft = interleaved(sides, repeats)
    kv.finish_task(one.caller.task)
    return {
        **{f"ttft_{name}_ms": round(median(values) * 1e3, 1) for name, values in ttft.items()},
        "restore_host_ms": round(median([t.restore_s for t in timings["host"]]) * 1e3, 2),
        "restore_disk_ms": round(median([t.restore_s for t in timings["disk"]]) * 1e3, 2),
        "recompute_ms": round(median([t.recompute_s for t in timings["recompute"]]) * 1e3, 1),
        "host_over_kept": round(median([h / k for h, k in zip(ttft["host"], ttft["kept"], strict=True)]), 3),
        "a_over_a": round(a_over_a(ttft["kept"]), 3),
        "bit_identical": all(identical),
    }


def main() -> None:
    args = arguments(
        __doc__ or "", repeats=(int, 7, "rounds"), disk=(Path, Path(tempfile.gettempdir()), "folder for the disk tier")
    )
    model = loaded()
    result: dict[str, object] = {}
    with (
        tempfile.TemporaryDirectory(dir=args.disk) as disk,
        engine(model, device_mib=512, host_mib=512, disk=Path(disk)) as kv,
    ):
        for context in CONTEXTS:
            say(args, f"context {context} ...")
            one = measure(kv, model.tokenizer, context, args.repeats)
            result |= {f"{name}_{context // 1000}k": value for name, value in one.items()}
    for name in ("host", "disk"):
        speedup = result["recompute_ms_4k"] / result[f"restore_{name}_ms_4k"]  # type: ignore[operator]
        result[f"restore_speedup_{name}_4k"] = round(speedup, 1)
    result["ttft_host_over_kept_4k"] = result["host_over_kept_4k"]
    result["bit_identical"] = all(value for key, value in result.items() if key.startswith("bit_identical"))
    result["dtype"] = model.geometry.dtype
    emit(args, result)


if __name__ == "__main__":
    main()
