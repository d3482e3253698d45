"""Ledger: the append-only facts of every task, from which bills are made.

Covers the facts and keeping them in memory; a store (`store.py`) may save them as well. Does not cover arithmetic on
them (`bill.py`). Facts hold names, counts and times: no prompt text and no tool arguments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Protocol, get_args

from agentkv.core.usage import Timing, Usage
from agentkv.log import count, failed

MAX_TASKS = 4096
"""Tasks kept in memory; beyond them the finished one that was silent longest is forgotten (a store still has it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, however it ended: "ok", "aborted" (cancelled) or "failed". Each attempt is its own fact.

    `estimated`: the engine gave no usage and we counted. `visible`: its output went to the user; None = not told.
    `purpose`: "answer", or "summary" for a call that was made to keep the context short. `cost_usd`: None where no
    price is known; `price` says which row of which table it came from, or "self-hosted". `device_s`: busy device
    seconds of this call. `served_locally`: a response cache answered, so it cost nothing. `loop`: whose cap it counted
    against (retry, reflection, correction ...). `cached_by`: cached tokens by "device", "host", "disk" or "provider",
    as far as that is known. `error` names the error's class, `outcome_type` what kind of task the call was made for.
    """

    kind: ClassVar[str] = "model_call"
    task: str
    session: str = ""
    node: str = ""
    branch: str = ""
    attempt: int = 1
    at_ms: int = 0
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    status: str = "ok"
    priority: int = 1
    estimated: bool = False
    visible: bool | None = None
    purpose: str = "answer"
    cost_usd: Decimal | None = None
    price: str = ""
    service_tier: str = ""
    device_s: float = 0.0
    served_locally: bool = False
    loop: str = ""
    cached_by: dict[str, int] = field(default_factory=dict)
    error: str = ""
    outcome_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFact:
    """One tool call that ended, with the wait that was predicted when it began. `at_ms` is its end."""

    kind: ClassVar[str] = "tool_call"
    task: str
    session: str = ""
    node: str = ""
    tool: str = ""
    command: str = ""
    at_ms: int = 0
    predicted_p10_s: float | None = None
    predicted_p50_s: float | None = None
    predicted_p90_s: float | None = None
    actual_s: float = 0.0
    status: str = "succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFact:
    """One move and what became of it, in the words of `core.residency` (action, tier in lower case, outcome)."""

    kind: ClassVar[str] = "move"
    task: str
    session: str = ""
    at_ms: int = 0
    action: str = ""
    to: str = ""
    blocks: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    outcome: str = "done"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFact:
    """Something that was done to a prompt, or that happened to it.

    event "slim": a tool output (of the tool `name`) went from `before_tokens` to `after_tokens` under the rule `cause`.
    "fold": the prompt did; `cause` says why then. "fold_failed": the history stayed. "recall": of `before_tokens`
    memories found (a count), `after_tokens` tokens were told. "break": a prompt did not extend the one before; `cause`
    names why, `before_tokens` had to be computed again.
    """

    kind: ClassVar[str] = "context"
    task: str
    session: str = ""
    at_ms: int = 0
    event: str = ""
    name: str = ""
    cause: str = ""
    before_tokens: int = 0
    after_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFact:
    """A task "started" or "finished"; `final`: it was destroyed and will not go on."""

    kind: ClassVar[str] = "task"
    task: str
    at_ms: int = 0
    event: str = "started"
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMessageFact:
    """One agent said something to another; `tokens` of it."""

    kind: ClassVar[str] = "agent_message"
    task: str
    session: str = ""
    at_ms: int = 0
    sender: str = ""
    receiver: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFact:
    """`tokens` reached the user, as marked by `kv.deliver`."""

    kind: ClassVar[str] = "delivery"
    task: str
    session: str = ""
    at_ms: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFact:
    """What became of a task of type `task_type`: the failed ones are charged to the completed ones of their type."""

    kind: ClassVar[str] = "outcome"
    task: str
    at_ms: int = 0
    task_type: str = ""
    completed: bool = False


Fact = ModelCall | ToolCallFact | MoveFact | ContextFact | TaskFact | AgentMessageFact | DeliveryFact | OutcomeFact
_KINDS: dict[str, type[Fact]] = {cls.kind: cls for cls in get_args(Fact)}
_PARTS: dict[str, type[Usage | Timing]] = {"usage": Usage, "timing": Timing}


def fact_to_json(fact: Fact) -> dict[str, Any]:
    """A fact as plain JSON, its money as text; its kind is kept beside it."""
    body = asdict(fact)
    if isinstance(fact, ModelCall) and fact.cost_usd is not None:
        body["cost_usd"] = str(fact.cost_usd)
    return body


def is_known(kind: str) -> bool:
    """False for a kind of fact that only a newer program knows."""
    return kind in _KINDS


def fact_from_json(kind: str, body: dict[str, Any]) -> Fact:
    """The fact that `fact_to_json` described; fields that this program does not know are left out.

    Raises KeyError, TypeError or ValueError for what is no fact.
    """
    cls = _KINDS[kind]
    values = _known_fields(cls, body)
    if cls is ModelCall:
        for name, part in _PARTS.items():
            if name in values:
                values[name] = part(**_known_fields(part, values[name]))
        if values.get("cost_usd") is not None:
            values["cost_usd"] = _money(values["cost_usd"])
    return cls(**values)


def _known_fields(cls: type[Fact | Usage | Timing], body: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    return {name: value for name, value in body.items() if name in known}


def _money(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is no amount of money") from None
    if not amount.is_finite():
        raise ValueError(f"{text!r} is no amount of money")
    return amount


class FactStore(Protocol):
    """Where facts are saved. `put` neither blocks nor raises."""

    def put(self, fact: Fact) -> None: ...
    def close(self) -> None: ...


class Ledger:
    """Facts per task, in the order in which they were appended. Thread-safe."""

    def __init__(self, store: FactStore | None = None) -> None:
        self.store = store
        self._rows: OrderedDict[str, list[Fact]] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def append(self, fact: Fact) -> None:
        """Record a fact. Never waits for a disk and never raises: a failure is a log line and a counter."""
        try:
            with self._lock:
                self._rows.setdefault(fact.task, []).append(fact)
                self._age(fact)
            if self.store is not None:
                self.store.put(fact)
        except Exception as error:
            failed("ledger_append_failed", error=repr(error))

    def _age(self, fact: Fact) -> None:
        if isinstance(fact, TaskFact) and fact.event == "finished":
            self._finished[fact.task] = None
            self._finished.move_to_end(fact.task)
        elif isinstance(fact, TaskFact):
            self._finished.pop(fact.task, None)
        while len(self._rows) > MAX_TASKS and self._finished:
            oldest, _ = self._finished.popitem(last=False)
            self._rows.pop(oldest, None)
            count("ledger_task_forgotten")

    def rows(self, task: str) -> list[Fact]:
        """The task's facts so far in this process; [] for an unknown task."""
        with self._lock:
            return list(self._rows.get(task, ()))

    def tasks(self) -> list[str]:
        """Tasks with facts, in the order of their first."""
        with self._lock:
            return list(self._rows)

    def close(self) -> None:
        """Save what is not saved yet. Idempotent; facts appended later are kept in memory only."""
        if self.store is not None:
            self.store.close()
