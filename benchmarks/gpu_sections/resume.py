"""Resume: time to the first token after a tool call, by where the session's KV was and how long its context is.

kept: on the device. host, disk: loaded on demand. recompute: dropped. prefetched: brought back from host memory before
the call. Each resume adds the same number of new tokens, so the context grows a little from one to the next.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Generation, Request
from agentkv.engine.local.engine import LocalEngine
from gpu_sections.model import engine, ids_of, random_llama, send_down, text_of
from gpu_sections.scene import Found, Line, Scene, at_least, at_most, middle

_NEW_TOKENS = 64
_RECOMPUTES = 2


class Session:
    """One context that goes on and on."""

    def __init__(self, kv: LocalEngine, context: int) -> None:
        self.kv = kv
        self._caller = Caller(task=f"context-{context}")
        self._prompt = text_of(context, seed=context)
        self.key = self.next().session

    def next(self) -> Generation:
        """The next model call."""
        request = Request(prompt=self._prompt, caller=self._caller, forced_ids=ids_of("x"))
        answer = self.kv.submit(request).result(300)
        self._prompt += answer.text + text_of(_NEW_TOKENS, seed=len(self._prompt))
        return answer

    def finish(self) -> None:
        """Give its memory back."""
        self.kv.finish_task(self._caller.task)

    def kept(self) -> Generation:
        """Nothing happened to it."""
        return self.next()

    def host(self) -> Generation:
        """Loaded from host memory, on demand."""
        send_down(self.kv, self.key, Tier.HOST)
        return self._restored()

    def disk(self) -> Generation:
        """Loaded from disk, on demand."""
        send_down(self.kv, self.key, Tier.DISK)
        return self._restored()

    def prefetched(self) -> Generation:
        """Loaded from host memory before it is needed."""
        send_down(self.kv, self.key, Tier.HOST)
        self.kv.apply(Move(session=self.key, action=Action.PREFETCH, to=Tier.DEVICE, reason="benchmark"))
        self.kv.tiers.quiesce(120)
        return self.next()

    def recompute(self) -> Generation:
        """Forgotten."""
        self.kv.tiers.drop(self.key)
        answer = self.next()
        assert answer.usage.cached_tokens == 0, f"{answer.usage.cached_tokens} tokens were still there"
        return answer

    def _restored(self) -> Generation:
        answer = self.next()
        assert answer.restored_blocks > 0, "nothing was restored"
        return answer


def run(scene: Scene) -> Found:
    """Three contexts."""
    contexts, repeats = ((64, 256), 2) if scene.small else ((2048, 8192, 32768), 7)
    figures: dict[str, Any] = {}
    lines: list[Line] = []
    model = random_llama(scene.device, small=scene.small)
    room = max(contexts) + (_NEW_TOKENS + 1) * (4 * repeats + _RECOMPUTES + 8)
    room += room // 8  # what is left of one context must not crowd the next one out
    with (
        tempfile.TemporaryDirectory(dir=scene.scratch) as folder,
        engine(scene, model, tokens=room, disk=Path(folder)) as kv,
    ):
        for context in contexts:
            found, ratio, stall_ms = _measure(scene, kv, context, repeats)
            figures[f"{context}"] = found
            lines.append(at_most(scene, f"prefetched stall p50 at {context}", stall_ms, 5, "ms"))
            if context == max(contexts):
                lines.append(at_least(scene, f"recompute over restore at {context}", ratio, 10, "x"))
    return Found(figures=figures, lines=lines)


def _measure(scene: Scene, kv: LocalEngine, context: int, repeats: int) -> tuple[dict[str, float], float, float]:
    """(figures, recompute over restore from host, stall of a prefetched resume in ms)."""
    one = Session(kv, context)
    ways: dict[str, Callable[[], Generation]] = {
        "kept": one.kept,
        "host": one.host,
        "disk": one.disk,
        "prefetched": one.prefetched,
    }
    answers: dict[str, list[Generation]] = {name: [] for name in (*ways, "recompute")}
    for way in ways.values():
        way()
    for number in scene.repeats(repeats):
        for name in ways if number % 2 else reversed(ways):
            answers[name].append(ways[name]())
        if number < _RECOMPUTES:
            answers["recompute"].append(one.recompute())
    one.finish()
    found: dict[str, float] = {}
    for name, several in answers.items():
        found[f"{name}_ttft_ms"] = round(middle([answer.timing.ttft_s for answer in several]) * 1e3, 2)
    for name in ("host", "disk", "prefetched"):
        found[f"{name}_restore_ms"] = round(middle([a.timing.restore_s for a in answers[name]]) * 1e3, 3)
    found["recompute_ms"] = round(middle([a.timing.recompute_s for a in answers["recompute"]]) * 1e3, 2)
    ratio = found["recompute_ms"] / max(found["host_restore_ms"], 0.001)
    found["recompute_over_host_restore"] = round(ratio, 1)
    return found, round(ratio, 1), found["prefetched_restore_ms"]
