"""Tries of a model call that a client repeats in silence: each on the bill of its run, and none that its budget refuses.

The clients that tell of them are made in `attempts.py`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

from langgraph.errors import GraphBubbleUp

from agentkv import log
from agentkv.core.usage import Usage
from agentkv.engine.attempts import FailedTry
from agentkv.errors import BudgetExceeded
from agentkv_langgraph.spent import ModelRun, causes

running: ContextVar[ModelRun | None] = ContextVar("agentkv_model_run", default=None)
"""The model run that is under way here, as far as LangChain carries contexts."""
_MAX_NOTED = 256


class Tries:
    """The failed tries of one AgentKV's calls. Thread-safe; nothing is raised."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv
        self._lock = threading.Lock()
        self._noted: OrderedDict[int, Any] = OrderedDict()  # requests whose failure is on the books

    def failed(self, failed: FailedTry) -> None:
        """A try of the run that is under way here failed: refused for nothing, or lost after it was sent."""
        try:
            run = running.get()
            caller = self._kv.caller() if run is None else run.caller
            usage = Usage()
            if run is not None:
                run.lost = not failed.refused
            if not failed.refused:
                usage = Usage(input_tokens=0 if run is None else run.input_tokens(), calls=1)
            self._kv.record_call(
                caller=caller,
                model=(run.asked if run is not None else "") or "unknown",
                usage=usage,
                total_s=failed.seconds,
                status="failed",
                error=failed.error,
                estimated=not failed.refused,
            )
            with self._lock:
                self._noted[id(failed.request)] = failed.request
                while len(self._noted) > _MAX_NOTED:
                    self._noted.popitem(last=False)
        except Exception as error:
            log.failed("callback_failed", where="http", error=repr(error))

    def refuses(self) -> str:
        """Why the call that is under way here must not be sent again; "" if it may."""
        run = running.get()
        if run is None or run.held is None:
            return ""
        try:
            self._kv.budgets.gate.repeating(run.caller, run.held)(run.lost)
        except (BudgetExceeded, GraphBubbleUp) as refused:
            run.refused = refused
            return str(refused)
        except Exception as error:
            log.failed("callback_failed", where="http_again", error=repr(error))
        return ""

    def knows(self, error: BaseException) -> bool:
        """Whether this error's last try is on the books already. Asked once: it is forgotten then."""
        requests = {id(_request_of(one)) for one in causes(error)}
        with self._lock:
            return any(self._noted.pop(one, None) is not None for one in requests)


def _request_of(error: BaseException | None) -> Any:
    try:
        return getattr(error, "request", None)
    except RuntimeError:  # httpx's errors raise where no request is set
        return None
