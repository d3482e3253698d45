"""Facts as log lines: one structlog line at level info for each, under a name that does not change.

Off unless asked for; warnings about what went wrong are written in any case (docs/observability.md lists both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from typing import Any

from agentkv import log
from agentkv.budget.facts import Fact
from agentkv.core.usage import Timing, Usage
from agentkv.telemetry.names import EVENTS
from agentkv.telemetry.source import Source


def log_facts(source: Source) -> Callable[[], None]:
    """Write a line for every fact from now on; returns the way to stop."""
    logger = log.get_logger()
    return source.on_fact(lambda fact: logger.info(EVENTS[fact.kind], **line(fact)))


def line(fact: Fact) -> dict[str, Any]:
    """The fields of a fact that say something: parts are put side by side, empty ones left out, money is text."""
    told: dict[str, Any] = {}
    for f in fields(fact):
        value = getattr(fact, f.name)
        parts = value if isinstance(value, Usage | Timing) else None
        if parts is not None:
            told |= {part.name: number for part in fields(parts) if (number := getattr(parts, part.name))}
        elif isinstance(value, Decimal):
            told[f.name] = f"{value:f}"
        elif value not in ("", None, {}):
            told["what" if f.name == "event" else f.name] = value  # `event` is the name of the line itself
    return told
