"""Who hears what became of every move."""

from __future__ import annotations

from collections.abc import Callable

from agentkv import log
from agentkv.core.residency import Receipt

Listener = Callable[[Receipt], None]


class Receipts:
    """Listeners; one that fails is logged and does not keep the others from hearing."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        """Tell this one too."""
        self._listeners.append(listener)

    def tell(self, receipt: Receipt) -> None:
        """Tell all of them, on the thread that carried the move out."""
        for listener in self._listeners:
            try:
                listener(receipt)
            except Exception as error:
                log.failed("receipt_listener_failed", error=repr(error))
