"""Every error that agentkv raises, and nothing else.

    AgentKVError
    |- ConfigError (ValueError)         an option that cannot work: unknown policy, tier of size 0, typo
    |  `- DiskUnavailable               a folder that cannot hold the disk tier: not writable, full
    |- ExtraMissing (ImportError)       a part needs a package that is not installed
    |- ModelError
    |  |- ModelNotFound                 no such folder, file or package; says where we looked
    |  `- UnsupportedModel              an architecture whose KV we cannot page
    |- RequestInvalid (ValueError)      a request that no engine can answer
    |  |- TemplateRejected              the model's chat template refused the messages
    |  `- PromptTooLong                 prompt and output do not fit; carries both numbers
    |- GenerationCancelled (RuntimeError)
    |- BudgetExceeded (RuntimeError)    RuntimeError: LangGraph's default retry leaves it alone
    |- QueueFull (RuntimeError)         no place for a task, and none to wait in; carries length and expected wait
    |- LedgerError                      a ledger that cannot be read or is newer than this program
    |- RemoteError                      a remote endpoint answered with an error
    `- Closed (RuntimeError)            used after close()

Only budgets and misuse raise. Hints, moves and reports fail into a log line and a counter.
"""

from __future__ import annotations


class AgentKVError(Exception):
    """Root of the tree: catch this to catch all of ours."""


class ConfigError(AgentKVError, ValueError):
    """An option that cannot work; the message names the option, its value and what is allowed."""


class DiskUnavailable(ConfigError):
    """A folder that cannot hold the disk tier. The engine goes on without it and warns once."""


class ExtraMissing(AgentKVError, ImportError):
    """A part needs a package that is not installed; the message holds the pip command."""


class ModelError(AgentKVError):
    """A model that cannot be loaded."""


class ModelNotFound(ModelError):
    """No such folder, file or package."""


class UnsupportedModel(ModelError):
    """An architecture whose KV cache we cannot page (MLA, hybrid, linear attention, ...)."""


class RequestInvalid(AgentKVError, ValueError):
    """A request that no engine can answer; `param` names the field at fault where one is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TemplateRejected(RequestInvalid):
    """The model's chat template refused the messages; carries the template's own words."""


class PromptTooLong(RequestInvalid):
    """Prompt plus output exceed the context or the whole pool; nothing was started."""

    def __init__(self, message: str, *, needed_tokens: int, limit_tokens: int, param: str = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.needed_tokens = needed_tokens
        self.limit_tokens = limit_tokens


class GenerationCancelled(AgentKVError, RuntimeError):
    """The call was cancelled before it ended."""


class BudgetExceeded(AgentKVError, RuntimeError):
    """A task's budget does not allow the next step; raised before anything is spent."""

    def __init__(self, message: str, *, task: str, limit: str, allowed: float, used: float, asked: float) -> None:
        super().__init__(message)
        self.task = task
        self.limit = limit
        self.allowed = allowed
        self.used = used
        self.asked = asked


class QueueFull(AgentKVError, RuntimeError):
    """Too many tasks of this type run, and too many wait; or this one has waited for as long as it may.

    `waiting` tasks are in the queue, which holds `limit` (None: any number); a place is to be expected in
    `expected_wait_s` seconds (None: no task of the type has ended yet).
    """

    def __init__(
        self, message: str, *, task_type: str, waiting: int, limit: int | None, expected_wait_s: float | None
    ) -> None:
        super().__init__(message)
        self.task_type = task_type
        self.waiting = waiting
        self.limit = limit
        self.expected_wait_s = expected_wait_s


class LedgerError(AgentKVError):
    """A ledger that cannot be opened or read."""


class RemoteError(AgentKVError):
    """A remote endpoint answered with an error; `status` is its HTTP status where there was one."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Closed(AgentKVError, RuntimeError):
    """The object was closed before this call."""
