"""Facts: what happened in a task, one frozen value per event.

They hold names, counts and times: no prompt text and no tool arguments. Every field has a default, so that what an
older program wrote still reads. A default is never changed: `codec.py` leaves it out of what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import ClassVar

from agentkv.core.usage import Timing, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, however it ended: "ok", "aborted" (cancelled) or "failed". Each attempt is its own fact.

    `estimated`: the engine gave no usage and we counted. `visible`: its output went to the user; None = not told.
    `purpose`: "answer", or "summary" for a call that was made to keep the context short. `cost_usd`: None where no
    price is known; `price` says which row of which table it came from, or "self-hosted". `device_s`: busy device
    seconds of this call. `served_locally`: a response cache answered, so it cost nothing. `loop`: whose cap it counted
    against (retry, reflection, correction ...). `cached_by`: cached tokens by "device", "host", "disk" or "provider",
    as far as that is known. `worker`: which of a router's workers answered, and `expected_hit_rate` the share of the prompt
    that the router believed it to hold; "" and None where nobody told. `error` names the error's class, `outcome_type` what
    kind of task the call was made for.
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
    worker: str = ""
    expected_hit_rate: float | None = None
    error: str = ""
    outcome_type: str = ""
    drafted_tokens: int = 0
    """Output tokens that the embedded engine guessed ahead, and how many of them were right (`accepted_tokens`)."""
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFact:
    """One tool call that ended, with the wait that was predicted when it began. `at_ms` is its end.

    `attempt`: how often this call (by its id) has run, as after a resume.
    """

    kind: ClassVar[str] = "tool_call"
    task: str
    session: str = ""
    node: str = ""
    branch: str = ""
    attempt: int = 1
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
    """A task "started", "finished", or was "typed" while it ran; `final`: it was destroyed and will not go on.

    `task_type`: what kind of work it is, as far as it was told by then.
    """

    kind: ClassVar[str] = "task"
    task: str
    at_ms: int = 0
    event: str = "started"
    final: bool = False
    task_type: str = ""


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
