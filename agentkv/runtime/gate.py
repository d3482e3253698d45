"""The gate: what happens to a step that does not fit into its task's budget.

It raises, it is answered with a closing turn, a person is asked, or it waits. Covers model calls, tool calls and rounds
of loops. Does not cover the counting (`budget/account.py`).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypeVar

from agentkv import log
from agentkv.budget.account import CALLS, ROUNDS, TOOLS, Account, Both, Reservation, again
from agentkv.budget.amounts import RETRY
from agentkv.budget.limits import ZERO, Budget
from agentkv.core.host import Host
from agentkv.core.task import Caller
from agentkv.core.usage import Usage
from agentkv.engine.base import Chunk, Generation, Request
from agentkv.engine.stream import Stream
from agentkv.errors import BudgetExceeded, Closed, ConfigError, LedgerError
from agentkv.runtime.blocking import on_thread
from agentkv.runtime.counted import CountedTool

ANSWER_CHARS = 4000
_STOP = (False, "stop", "finish")
_T = TypeVar("_T")

in_loop: ContextVar[tuple[str, BudgetExceeded | None] | None] = ContextVar("agentkv_loop", default=None)
"""The kind of loop whose round runs here, and the refusal of it if it is one too many."""

_let_in: ContextVar[str] = ContextVar("agentkv_let_in", default="")
"""The line of a step that was counted before it is told of, because a coroutine waited for it."""

Decision = Literal["finish", "queue", "again"]


class Gate:
    """Decides by the account's `on_exceeded`. Thread-safe."""

    def __init__(
        self,
        *,
        host: Host,
        account: Callable[[str], Account],
        pool: Callable[[str], Account | None],
        worst_usd: Callable[..., Decimal | None],
    ) -> None:
        self._host = host
        self._account = account
        self._pool = pool
        self._worst_usd = worst_usd
        self.closed = False
        """Set at the end: who waits then is told."""
        self.has_stopped = False
        """Some task is over: nodes look whether it is theirs."""

    def refused(self, account: Account, caller: Caller, refused: BudgetExceeded) -> Decision:
        """What to do now. "again": there is more to spend since a moment ago.

        Raises the refusal, or what the framework stops an agent with. Where a framework runs the agent, a task that
        raised is over: some tool nodes turn what a tool raises into a message, and the agent would go on.
        """
        way = account.budget.on_exceeded
        if way == "interrupt":
            return self._asked(account, caller, refused)
        if way == "raise":
            if self._host.caller() is not None:
                account.stopped = again(refused)
                self.has_stopped = True
            raise self._host.stopping(refused)
        return way

    def _asked(self, account: Account, caller: Caller, refused: BudgetExceeded) -> Decision:
        question = {
            "agentkv": "budget",
            "task": refused.task,
            "node": caller.node,
            "limit": refused.limit,
            "allowed": _plain(refused.allowed),
            "used": _plain(refused.used),
            "asked": _plain(refused.asked),
            "question": f"{refused} Resume with what to add, such as {{'{refused.limit}': 1000}}, or with False to stop.",
        }
        answer = self._host.interrupt(question, refused)
        if any(answer is stop for stop in _STOP[:1]) or answer in _STOP[1:]:
            return "finish"
        if isinstance(answer, Budget):
            account.budget = answer
        elif isinstance(answer, Mapping):
            account.grant(answer)
        elif isinstance(answer, int | float | Decimal) and not isinstance(answer, bool):
            account.grant({refused.limit: answer})
        else:
            raise ConfigError(
                f"resume={answer!r:.100}: what is granted is needed, such as {{'{refused.limit}': 1000}} or a number "
                "of it, or False to stop"
            )
        return "again"

    def node(self, caller: Caller) -> None:
        """A node of `caller` starts now. Raises what its task raised before, if that is over and should raise."""
        account = self._account(caller.task)
        if account.stopped is not None and account.budget.on_exceeded == "raise":
            raise self._host.stopping(again(account.stopped))

    def foreign_call(
        self, caller: Caller, worst: Callable[[int], Usage] = lambda _unnamed: Usage(), *, model: str = "",
        again: bool = False,
    ) -> Reservation | Both:  # fmt: skip
        """A model call that another client makes for `caller` starts now: what it may use at most is set aside.

        `worst` counts it, if that is needed; a call that does not say how much it may write is taken to write as much
        as the longest so far. `again`: the framework repeats one that failed. Release it once the call is recorded.
        Raises BudgetExceeded, or the framework's control flow, if it does not fit.
        """
        account, pool = self._account(caller.task), self._pool(caller.task)
        budgets = [one.budget for one in (account, pool) if one is not None]
        usage, usd = Usage(), ZERO
        if any(budget.tokens is not None or budget.usd is not None for budget in budgets):
            usage = worst(account.longest_output_tokens)
        if any(budget.usd is not None for budget in budgets):
            usd = self._worst_usd(usage, device_s=0.0, foreign=model) or ZERO
            if not usd:
                warn_without_price(model)

        def step() -> Reservation | Both:
            account.attempt(caller.branch, caller.node, caller.attempt)
            held = account.reserve(usage.total_tokens, usd=usd, on_device=False)
            try:
                return held if pool is None else Both(held, pool.reserve(usage.total_tokens, usd=usd, on_device=False))
            except BaseException:
                held.release()
                raise

        if again:
            self._stepped(account, caller, lambda: account.loop(RETRY), ROUNDS + RETRY)
        return self._stepped(account, caller, step, CALLS)

    def repeating(self, caller: Caller, held: Reservation | Both) -> Callable[[bool], None]:
        """What to call before a client sends a call of `caller` again: it counts as a retry, and where the try before
        may have been paid for (True), as much is set aside as for that one. It raises BudgetExceeded if not.
        """
        here = contextvars.copy_context()  # it is called on whatever thread the client has

        def repeated(lost: bool) -> None:
            account = self._account(caller.task)
            try:
                if lost:
                    held.double()
                account.loop(RETRY)
            except BudgetExceeded as refused:
                if account.budget.on_exceeded == "raise":
                    here.run(self.refused, account, caller, refused)
                raise here.run(self._host.stopping, refused) from None

        return repeated

    def tool_call(self, caller: Caller) -> None:
        """A tool call of `caller` starts now. Raises BudgetExceeded or the framework's control flow if it must not."""
        if _was_let_in(TOOLS):
            return
        account = self._account(caller.task)
        try:
            self._stepped(account, caller, self.tool(caller.task).take, TOOLS)
        except BudgetExceeded as refused:
            if account.budget.on_exceeded == "finish":
                account.tool_refused(refused)
            raise

    def round(self, caller: Caller, kind: str, limit: int | None) -> BudgetExceeded | None:
        """A round of a loop of `caller` starts now; the refusal if its model calls are to be closing turns."""
        if _was_let_in(ROUNDS + kind):
            return None
        account = self._account(caller.task)
        try:
            self._stepped(account, caller, lambda: account.loop(kind, limit), ROUNDS + kind)
        except BudgetExceeded as refused:
            if account.budget.on_exceeded in ("finish", "interrupt"):
                return refused
            raise
        return None

    async def tool_call_let_in(self, caller: Caller) -> None:
        """In an event loop, before `tool_call` in the same context: wait for it there, if the task's budget queues."""
        tool = self.tool(caller.task)
        await self._let_in(tool.account, TOOLS, tool.take, tool.give_back)

    def tool(self, task: str) -> CountedTool:
        """How a tool call of the task counts."""
        return CountedTool(account=self._account(task), pool=self._pool(task))

    async def round_let_in(self, caller: Caller, kind: str, limit: int | None) -> None:
        """The same before `round`."""
        account = self._account(caller.task)
        await self._let_in(
            account, ROUNDS + kind, lambda: account.loop(kind, limit), lambda: account.round_given_up(kind)
        )

    async def _let_in(
        self, account: Account, line: str, step: Callable[[], object], undo: Callable[[], object]
    ) -> None:
        if account.budget.on_exceeded != "queue":
            return

        def taken() -> bool:
            step()
            return True

        try:
            step()
        except BudgetExceeded as refused:
            if refused.task != account.task:  # it does not fit into another account
                raise self._host.stopping(refused) from None
            wait = partial(account.wait, taken, timeout_s=account.budget.wait_s, line=line, refused=refused)
            try:
                await on_thread(lambda gone: bool(wait(gone=lambda: gone() or self.closed)), undo)
            except BudgetExceeded as late:
                raise self._host.stopping(late) from None
            self._check_open()
        _let_in.set(line)

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this AgentKV was closed while a step waited for its budget")

    def _stepped(self, account: Account, caller: Caller, step: Callable[[], _T], line: str) -> _T:
        while True:
            try:
                return step()
            except BudgetExceeded as refused:
                pool = self._pool(caller.task)
                who = pool if pool is not None and pool.task == refused.task else account
                decision = self.refused(who, caller, refused)
                if decision == "again":
                    continue
                if decision == "finish":
                    raise
                if _in_event_loop():  # nothing may wait here
                    raise self._host.stopping(refused) from None
                try:
                    waited: _T = who.wait(
                        step, timeout_s=who.budget.wait_s, refused=refused, line=line, gone=lambda: self.closed
                    )
                except BudgetExceeded as other:
                    if other.task != who.task:
                        continue  # meanwhile it is another account that it does not fit into
                    raise self._host.stopping(other) from None
                self._check_open()
                return waited


def waiting(
    account: Account,
    refused: BudgetExceeded,
    step: Callable[[], _T],
    start: Callable[[_T], Stream],
    elsewhere: Callable[[BudgetExceeded], Stream | None],
    *,
    priority: int = 0,
    flow: str = "",
) -> Stream:
    """A stream whose call starts when it is its turn and `step`, its reservation, fits. A thread of its own waits.

    It fails with BudgetExceeded after the budget's `wait_s`. Cancelled while it waits, nothing is reserved or started.
    A refusal by another account than this one is `elsewhere`'s.
    """

    def begun(gone: Callable[[], bool]) -> Stream | None:
        try:
            passed: _T | None = account.wait(
                step, timeout_s=account.budget.wait_s, gone=gone, refused=refused, priority=priority, flow=flow
            )
        except BudgetExceeded as error:
            stream = None if error.task == account.task else elsewhere(error)
            if stream is None:
                raise
            return stream
        return None if passed is None else start(passed)

    return _begun_later(begun)


def _begun_later(begun: Callable[[Callable[[], bool]], Stream | None]) -> Stream:
    """A stream that passes on what the stream of `begun(gone)` brings, on a thread of its own."""
    inner: list[Stream] = []

    def cancel() -> None:
        for stream in inner:
            stream.cancel()

    outer = Stream(on_cancel=cancel)

    def run() -> None:
        try:
            stream = begun(lambda: outer.ended)
            if stream is None:
                return
            inner.append(stream)
            if outer.ended:
                stream.cancel()
            for chunk in stream:
                outer.push(chunk)
            outer.finish(stream.result())
        except BaseException as error:  # it belongs to whoever waits for the answer
            outer.fail(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="agentkv-waits-for-budget", daemon=True).start()
    return outer


def warn_without_price(model: str) -> None:
    """A budget in money and a call whose price nobody knows."""
    log.warn_once(
        "budget_without_price",
        model=model or "unknown",
        advice="a budget in usd cannot hold for it; add its price (prices=...) or limit tokens",
    )


def closing_turn(request: Request, refused: BudgetExceeded, model: str) -> Stream:
    """A turn that ends the agent's loop without a model: what was said last, and why this is all. It costs nothing."""
    log.count("budget_closing_turn")
    said = next(
        (m.content for m in reversed(request.messages or ()) if m.role == "assistant" and m.content.strip()), ""
    )
    text = closing_words(said, refused)
    stream = Stream()
    stream.push(Chunk(text=text))
    stream.finish(
        Generation(
            text=text,
            raw=text,
            token_ids=(),
            finish_reason="stop",
            usage=Usage(),
            session=request.session or "",
            model=model,
            stopped_by="budget",
        )
    )
    return stream


def closing_words(said: str, refused: BudgetExceeded) -> str:
    """What a closing turn says: why this is all, and what was said last."""
    why = (
        f"I stop here: the budget of this task is used up ({refused.limit}: {refused.used:,} of {refused.allowed:,} are "
        "used or reserved)."
    )
    return f"{why} This is as far as I came:\n\n{said.strip()[:ANSWER_CHARS]}" if said.strip() else why


def notice(account: Account, branch: str) -> str:
    """What the model is told once when a limit is nearly used up; "" otherwise."""
    try:
        near = account.nearing(branch)
    except LedgerError as error:
        log.failed("budget_notice_failed", error=str(error))
        return ""
    if near is None:
        return ""
    limit, allowed, used = near
    return (
        f"[budget] {float(used) / float(allowed):.0%} of this task's {limit.replace('_', ' ')} are used "
        f"({_short(used)} of {_short(allowed)}). Come to an end now: start nothing new, and answer with what you have."
    )


def _short(amount: Any) -> str:
    return f"{amount:,.1f}" if isinstance(amount, float) else f"{amount:,}"


def _plain(amount: Any) -> Any:
    return str(amount) if isinstance(amount, Decimal) else amount


def _was_let_in(line: str) -> bool:
    let_in = _let_in.get() == line
    if let_in:
        _let_in.set("")
    return let_in


def _in_event_loop() -> bool:
    import asyncio  # 20 ms that `import agentkv` must not pay

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
