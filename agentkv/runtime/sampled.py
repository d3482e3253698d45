"""How a call's tokens are chosen, beside what the model's makers suggest, for whoever reads an answer.

A suggestion (generation_config.json) is never applied: it is told, so that nobody wonders.
"""

from __future__ import annotations

import threading
from typing import Any

from agentkv.engine.base import Engine, Sampling


class Sampled:
    """`sampled(sampling)` in JSON values; "suggested" where the makers of the engine's model say something. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._suggested: dict[str, Any] | None = None

    def __call__(self, sampling: Sampling) -> dict[str, Any]:
        with self._lock:
            if self._suggested is None:
                model = self._engine.stats().get("model")
                told = model.get("suggested_sampling") if isinstance(model, dict) else None
                self._suggested = dict(told or {})
        return sampling.told() | ({"suggested": self._suggested} if self._suggested else {})
