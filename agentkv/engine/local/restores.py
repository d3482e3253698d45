"""Restores: did bringing a context back save what it should have saved?

Covers the check by effect: tokens that a session had computed before, against those that its call computed again. A
restore that moved blocks and did not help is counted, named and warned about once. The copies are `kv/`.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from agentkv.core.residency import Action, Outcome, Receipt, Tier
from agentkv.engine.local.sequence import Sequence
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.log import warn_once


class Restores:
    """Counts over one engine's life. Receipts come from any thread, calls from the engine's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ahead: dict[str, int] = {}
        self._last_short: dict[str, Any] | None = None

    def moved(self, receipt: Receipt) -> None:
        """A move of the planner has ended: blocks that were prefetched are a restore as well."""
        move = receipt.move
        if move.action != Action.PREFETCH or move.to == Tier.HOST or not receipt.blocks:
            return
        if receipt.outcome in {Outcome.DONE, Outcome.PARTIAL}:
            with self._lock:
                self._ahead[move.session] = self._ahead.get(move.session, 0) + receipt.blocks

    def forget(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._ahead.pop(session, None)

    def verify(self, sequence: Sequence) -> None:
        """The call has its first token: what it computed again is known."""
        with self._lock:
            blocks = sequence.restored_blocks + self._ahead.pop(sequence.session.key, 0)
            if not blocks:
                return
            expected = min(sequence.known_tokens, sequence.prompt_tokens - 1)
            again = sequence.again_tokens
            self._counts.update(verified=1, restored_tokens=blocks * BLOCK_TOKENS, recomputed_tokens=again)
            if again < BLOCK_TOKENS:
                return
            reason = (
                "a block could not be loaded" if sequence.trusted_blocks is not None else "blocks had been given up"
            )
            self._counts["short"] += 1
            self._last_short = {
                "session": sequence.session.key,
                "expected_tokens": expected,
                "recomputed_tokens": again,
                "reason": reason,
            }
            if again < expected:
                return
            self._counts["useless"] += 1
        warn_once("restore_did_not_help", **self._last_short)

    def stats(self) -> dict[str, Any]:
        """Counts as plain JSON values; `last_short` names the last restore that computed a block or more again."""
        with self._lock:
            names = ("verified", "short", "useless", "restored_tokens", "recomputed_tokens")
            return {**{name: self._counts[name] for name in names}, "last_short": self._last_short}
