"""Budget: what a task may spend. Spent: amounts against it.

Covers the values and what is refused as one. The counting that keeps to them is `account.py`'s, what a call costs is
`prices.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Literal, Self

from agentkv.errors import ConfigError

OnExceeded = Literal["raise", "finish", "interrupt", "queue"]
Money = Decimal | int | str | float
COUNTS = ("tokens", "model_calls", "tool_calls", "retries")
TIMES = ("seconds", "device_seconds")
LIMITS = (*COUNTS, "usd", *TIMES)
_WAYS = ("raise", "finish", "interrupt", "queue")
ZERO = Decimal(0)
EXACT = Context(prec=60)
"""For sums of money: the calling thread's own decimal context may round, or raise where it would."""
_NEARLY = 0.8  # difflib's share; "retry", a loop, is no "retries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a task may spend. None is no limit; 0 is a limit that stops the first step.

    `tokens` counts input and output of every model call, cached or not. `usd` is exact: a Decimal, an integer or a text
    such as "0.25"; a float is taken as it is written (0.1 is one tenth), a text with a currency sign is refused. Calls
    whose price nobody knows do not count against it. `seconds` is wall time since the task began, `device_seconds`
    busy time of our own device, `retries` repeated attempts of nodes and rounds of `kv.budgets.loop("retry")`.

    At the share `soft` of any limit the model is told once to come to an end (None: never). What happens at the limit is
    `on_exceeded`: "raise" BudgetExceeded, "finish" with a closing turn, "interrupt" the graph, or "queue" for at most
    `wait_s` until more is granted. A `shared` budget holds over processes, through the ledger's database.
    """

    tokens: int | None = None
    usd: Money | None = None
    model_calls: int | None = None
    tool_calls: int | None = None
    seconds: float | None = None
    device_seconds: float | None = None
    retries: int | None = None
    soft: float | None = 0.8
    on_exceeded: OnExceeded = "raise"
    wait_s: float = 600.0
    shared: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            _whole(name, getattr(self, name))
        for name in (*TIMES, "wait_s"):
            _real(name, getattr(self, name))
        if self.usd is not None:
            object.__setattr__(self, "usd", money(self.usd))
        if self.soft is not None and not (_is_number(self.soft) and 0 < self.soft <= 1):
            raise ConfigError(f"Budget(soft={self.soft!r}): a share in (0, 1] is needed, or None for no notice")
        if self.on_exceeded not in _WAYS:
            raise ConfigError(f"Budget(on_exceeded={self.on_exceeded!r}): one of {', '.join(_WAYS)} is needed")
        if self.wait_s is None or not isinstance(self.shared, bool):
            raise ConfigError(f"Budget(wait_s={self.wait_s!r}, shared={self.shared!r}): seconds and a bool are needed")

    def limit(self, name: str) -> Any:
        """The limit `name`, None for none; the money is a Decimal."""
        return getattr(self, name)

    def plus(self, amounts: Mapping[str, Any]) -> Self:
        """The budget with so much more of each limit that it has; amounts for others change nothing."""
        more = {
            name: added(amounts[name], self.limit(name))
            for name in LIMITS
            if name in amounts and self.limit(name) is not None
        }
        return replace(self, **more) if more else self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without what is not set; the money as text."""
        body = {name: self.limit(name) for name in LIMITS if self.limit(name) is not None}
        if "usd" in body:
            body["usd"] = str(body["usd"])
        return {
            **body,
            "soft": self.soft,
            "on_exceeded": self.on_exceeded,
            "wait_s": self.wait_s,
            "shared": self.shared,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Amounts against a Budget: spent, or set aside by calls on their way."""

    tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    seconds: float = 0.0
    usd: Decimal = ZERO
    device_seconds: float = 0.0
    retries: int = 0


def added(amount: Any, more: Any) -> Any:
    """Two amounts of one kind together; money exactly."""
    return EXACT.add(amount, more) if isinstance(amount, Decimal) or isinstance(more, Decimal) else amount + more


def without(amount: Any, less: Any) -> Any:
    """An amount less another of its kind; money exactly."""
    return EXACT.subtract(amount, less) if isinstance(amount, Decimal) else amount - less


def checked_budget(budget: Any) -> Budget | None:
    """The budget, or None. Raises ConfigError for anything else."""
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigError(f"budget={budget!r:.100}: a Budget is needed, such as Budget(tokens=5000), or None")
    return budget


def granted(amounts: Mapping[str, Any]) -> dict[str, Any]:
    """Amounts to be added to limits, checked: a number >= 0 under the name of a limit or of a loop.

    Raises ConfigError for anything else, and for a name that is nearly that of a limit.
    """
    checked: dict[str, Any] = {}
    for name, amount in amounts.items():
        if name not in LIMITS and (meant := _nearly(name)):
            raise ConfigError(f"{name}={amount!r}: there is no such limit; is {meant[0]!r} meant?")
        if amount is None:
            continue
        if name == "usd":
            checked[name] = money(amount)
        elif name in TIMES:
            checked[name] = _real(name, amount)
        else:
            checked[name] = _whole(name, amount)
    return checked


def money(amount: Money) -> Decimal:
    """An amount of dollars >= 0, exactly. Raises ConfigError for what is none, with or without a currency's sign."""
    value: Decimal | None = None
    if isinstance(amount, Decimal | int | float | str) and not isinstance(amount, bool):
        try:
            value = Decimal(str(amount))
        except InvalidOperation:
            value = None
    if value is None or not value.is_finite() or value < 0:
        raise ConfigError(
            f"usd={amount!r}: dollars >= 0 without a sign are needed, such as '0.25', or None for no limit"
        )
    return value


def _nearly(name: str) -> list[str]:
    from difflib import get_close_matches  # only a loop's name or a typo needs it

    return get_close_matches(name, LIMITS, 1, _NEARLY)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name}={value!r}: a whole number >= 0 is needed, or None for no limit")
    return value


def _real(name: str, value: Any) -> Any:
    if value is not None and not (_is_number(value) and 0 <= value < float("inf")):
        raise ConfigError(f"{name}={value!r}: a number >= 0 is needed, or None for no limit")
    return value
