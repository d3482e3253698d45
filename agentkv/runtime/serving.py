"""An AgentKV behind the app: what the server needs of it, and what each API key may spend.

Composition only; `agentkv serve` and its tests use it. The in-process clients are `doors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from agentkv.errors import ExtraMissing
from agentkv.log import warn_once
from agentkv.runtime.keybudgets import KeyBudgets, type_of

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from agentkv.runtime.agentkv import AgentKV
    from agentkv.server.admission import Life
    from agentkv.server.keys import Key, Keys


class Served:
    """`app` over `kv`, until `close()` (which leaves `kv` open). Each key's budget is that of all its tasks together."""

    def __init__(
        self,
        kv: AgentKV,
        *,
        name: str | None = None,
        keys: Keys | None = None,
        life: Life | None = None,
        **options: Any,
    ) -> None:
        """`name`: what callers call the model, if not by the engine's own name."""
        from agentkv.server.app import create_app
        from agentkv.server.stalls import Stalls

        self._kv = kv
        self._stack = ExitStack()
        self._budgets = KeyBudgets(
            keys, budgets=kv.budgets, account=kv._books.lasting_account, wall_ms=kv._clock.wall_ms
        )
        stalls = Stalls(ToolsOf(kv, enter_type=self._budgets.enter_type))
        self._stack.callback(stalls.close)
        self.app: Starlette = create_app(
            kv.submit,
            model=name or kv.engine.model,
            count_tokens=kv.engine.count_tokens,
            keys=keys,
            enter=self._enter,
            life=life,
            stalls=stalls,
            metrics=self._metrics(),
            sampled=kv._sampled,
            **options,
        )

    def _enter(self, key: Key, task: str) -> None:
        """The task is one of this key's: what it spends counts against the key's budget."""
        self._budgets.enter(key)
        self._kv.enter_task(task, budget=None, priority=None, task_type=type_of(key))
        self._kv.leave_task(task, final=False)

    def _metrics(self) -> Callable[[], str] | None:
        from agentkv.telemetry.prometheus import Prometheus

        try:
            counted = self._stack.enter_context(Prometheus(self._kv, stats=self._kv.stats))
        except ExtraMissing as missing:
            warn_once("serve_without_metrics", advice=str(missing))
            return None
        return counted.text

    def close(self) -> None:
        """Let go of `kv`. Idempotent."""
        self._stack.close()


class ToolsOf:
    """An AgentKV as `server.stalls.Tools`. `enter_type`: told a task's type before a tool of it begins."""

    def __init__(self, kv: AgentKV, *, enter_type: Callable[[str], None] | None = None) -> None:
        self._kv = kv
        self._enter_type = enter_type

    def tool(self, name: str, *, expect_s: float | None, call_id: str, session: str | None) -> Any:
        return self._kv.tool(name, expect_s=expect_s, call_id=call_id, session=session)

    def task(self, key: str, *, final: bool, type: str) -> AbstractContextManager[object]:  # noqa: A002
        if self._enter_type is not None:
            self._enter_type(type)
        return self._kv.task(key, final=final, type=type)

    def finish(self, task: str) -> None:
        self._kv.finish(task)

    def finish_sessions(self, sessions: Iterable[str]) -> None:
        finish_sessions = getattr(self._kv.engine, "finish_sessions", None)
        if finish_sessions is not None:
            finish_sessions(sessions)
