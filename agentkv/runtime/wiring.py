"""How the parts of one AgentKV are joined. Composition only: what each part does is in its own module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentkv.clock import Clock
from agentkv.core.host import Host
from agentkv.core.residency import Policy
from agentkv.core.task import Caller
from agentkv.engine.base import Engine, Request
from agentkv.engine.stream import Stream
from agentkv.policy.rules import Rules
from agentkv.runtime import identity
from agentkv.runtime.books import Books
from agentkv.runtime.budgets import Budgets
from agentkv.runtime.build import last_session_of, planner_for, rules_of
from agentkv.runtime.calls import ModelCalls
from agentkv.runtime.contexts import Contexts
from agentkv.runtime.deliveries import Deliveries
from agentkv.runtime.desk import ToolDesk
from agentkv.runtime.doors import Doors
from agentkv.runtime.emit import Emitter
from agentkv.runtime.endings import Endings
from agentkv.runtime.learned import Learned
from agentkv.runtime.planner import Planner
from agentkv.runtime.prefixes import Prefixes
from agentkv.runtime.receipts import Receipts

if TYPE_CHECKING:
    from agentkv.context.options import Context
    from agentkv.context.view import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an AgentKV is made of, besides its engine, its host and its books."""

    emitter: Emitter
    receipts: Receipts
    planner: Planner | None
    context: Contexts
    budgets: Budgets
    desk: ToolDesk
    model_calls: ModelCalls
    endings: Endings
    told: Deliveries
    doors: Doors


def wired(
    owner: Any,
    *,
    caller: Callable[[], Caller],
    submit: Callable[[Request], Stream],
    engine: Engine,
    policy: str | Policy | Rules,
    books: Books,
    learned: Learned,
    host: Host,
    clock: Clock,
    context: Context | None,
    stages: Stages | None,
) -> Parts:
    """The parts, each knowing those that it needs. `owner` is whom scopes belong to."""
    emitter, receipts = Emitter(clock=clock), Receipts(books.move)
    planner = planner_for(engine, rules_of(policy), learned.forecaster, clock, receipts.tell)
    prefixes = Prefixes(count=None if stages is None else stages.counter.text, tell=books.prefix_broken)
    last_session = partial(last_session_of, engine)
    budgets = Budgets(books=books, host=host, caller=caller, clock=clock)
    contexts = Contexts(
        options=context,
        stages=stages,
        books=books,
        clock=clock,
        prefixes=prefixes,
        caller=caller,
        ask=lambda request, timeout_s: model_calls.ask(request, timeout_s),  # noqa: PLW0108  made below
    )
    desk = ToolDesk(
        planner=planner,
        gate=budgets.gate,
        forecaster=learned.forecaster,
        books=books,
        emitter=emitter,
        clock=clock,
        caller=caller,
        last_session=last_session,
        host=host,
        waits=contexts.tool_waits,
        slim=contexts.slim,
    )
    model_calls = ModelCalls(
        engine=engine,
        gate=budgets.gate,
        planner=planner,
        books=books,
        emitter=emitter,
        prefixes=prefixes,
        shaper=contexts.shaper,
        caller=caller,
        last_session=last_session,
        as_is=lambda: identity.wants_as_is(owner),
        now_s=clock.now_s,
    )
    endings = Endings(
        engine=engine, planner=planner, books=books, prefixes=prefixes, contexts=contexts, emitter=emitter
    )
    doors = Doors(submit=submit, engine=engine, caller=caller, emitter=emitter, clock=clock, books=books)
    if hasattr(engine, "endpoint"):
        doors.ways().own(engine)
    return Parts(
        emitter=emitter,
        receipts=receipts,
        planner=planner,
        context=contexts,
        budgets=budgets,
        desk=desk,
        model_calls=model_calls,
        endings=endings,
        told=Deliveries(append=books.append, clock=clock, caller=caller, engine=engine),
        doors=doors,
    )
