"""A shared tally as text in the database: its sums, its limits with grants, and what one step set aside."""

from __future__ import annotations

import json
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from agentkv.budget.limits import Budget, Spent, granted
from agentkv.budget.tally import Sums, Tally
from agentkv.errors import ConfigError, LedgerError


def _plain(value: object) -> str:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no amount")


_encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


def sums_text(tally: Tally) -> str:
    """What is used and set aside, and the rounds of loops."""
    return _encode([_row(tally.used), _row(tally.held), tally.loops])


def _row(sums: Sums) -> list[Any]:
    return [sums.tokens, str(sums.usd), sums.model_calls, sums.tool_calls, sums.device_seconds]


def sums_of(text: str) -> tuple[Sums, Sums, dict[str, int]]:
    """The same, read again."""
    used, held, loops = json.loads(text)
    return _sums(used), _sums(held), loops


def _sums(row: list[Any]) -> Sums:
    tokens, usd, calls, tools, device_s = row
    return Sums(tokens=tokens, usd=Decimal(usd), model_calls=calls, tool_calls=tools, device_seconds=device_s)


def limits_text(tally: Tally) -> str:
    """The limits and what was granted on top."""
    return _encode([tally.limits.to_json(), tally.grants])


def limits_of(text: str) -> tuple[Budget, dict[str, Any]]:
    """The same, read again. Raises LedgerError for limits that only a newer program knows."""
    limits, grants = json.loads(text)
    try:
        return Budget(**limits), granted(grants)
    except (TypeError, ConfigError) as error:
        raise LedgerError(f"a shared budget has limits that this program does not know: {error}") from error


def spent_text(amount: Spent) -> str:
    """What one step set aside."""
    return _encode({name: value for name, value in asdict(amount).items() if value})


def spent_of(text: str) -> Spent:
    """The same, read again."""
    body = json.loads(text)
    if "usd" in body:
        body["usd"] = Decimal(body["usd"])
    return Spent(**body)
