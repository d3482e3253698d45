"""AgentKVTier: vLLM's seam for a tier, used to bring back what waits on another one, when a hint says that it is time.

It stores nothing itself. Covers the door's life, when the engine must take a step, and promotions: for a session that is due
each block is looked up as a request would do, which makes vLLM promote it from the disk tier into CPU memory. Needs another
tier that has the blocks (`AgentKVDisk`, or vLLM's `fs`). What is due is `sessions.py`, who makes room is `order.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentkv import log
from agentkv.errors import ConfigError
from agentkv_vllm.policy import Prefetch, placed
from agentkv_vllm.sessions import MARGIN_S, Due, Key, session_of
from agentkv_vllm.side import shared
from agentkv_vllm.versions import require
from agentkv_vllm.wake import waker

require()

from vllm.v1.kv_offload.base import (  # noqa: E402  only for a version that was read
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

LONGEST_S = 30.0
"""A promotion that has not ended by then is left to itself."""
MOST_LOOKUPS = 1024
"""In one step of the engine: the scheduler waits meanwhile, some microseconds each."""
MOST_PROMOTIONS = 256


@dataclass(slots=True)
class _Promotion:
    """Blocks of one session on their way up; `left` have not arrived."""

    due: Due
    context: Any
    left: list[Key]
    started_s: float
    moved: set[Key] = field(default_factory=set)
    told: bool = False


class AgentKVTier(SecondaryTierManager):
    """`socket`: where hints are taken. `margin_s`: how much earlier than needed blocks are brought back. `wake`: False:
    do not use the engine's queue; it then takes steps while anybody waits.
    """

    _numbers: ClassVar[Any] = itertools.count(1)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        backpressure_detector: Any = None,
        socket: str | None = None,
        margin_s: float = MARGIN_S,
        wake: bool = True,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if isinstance(margin_s, bool) or not isinstance(margin_s, int | float) or not 0 <= margin_s < LONGEST_S:
            raise ConfigError(f"margin_s={margin_s!r}: seconds from 0 to {LONGEST_S:g} are needed")
        self._side = shared()
        self._side.sessions.margin_s = float(margin_s)
        self._side.wake = waker() if wake else None
        if self._side.wake is None and wake:
            log.failed("vllm_engine_not_found", note="it takes steps while anybody waits")
        self._promotions: list[_Promotion] = []
        self._done: list[Any] = []
        self._side.open(Path(socket) if socket else None)

    # -- what requests tell

    def on_new_request(self, req_context: Any) -> Any:
        session = session_of(req_context.kv_transfer_params)
        if session:
            self._side.sessions.begins(session)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        session = session_of(req_context.kv_transfer_params)
        if session:
            self._side.sessions.ends(session)

    def submit_store(self, job_metadata: Any) -> None:
        """Every store comes by here: the blocks' session is noted, nothing is copied."""
        session = session_of(job_metadata.req_context.kv_transfer_params)
        if session and job_metadata.req_context.get_state(Prefetch) is None:
            self._side.sessions.holds(session, placed(job_metadata.keys, job_metadata.req_context))
        self._done.append(JobResult(job_id=job_metadata.job_id, success=True))

    # -- a tier that holds nothing

    def lookup(self, key: Key, req_context: Any) -> Any:  # noqa: ARG002  whatever is asked for
        return LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        self._done.append(JobResult(job_id=job_metadata.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[Any]:
        done, self._done = self._done, []
        return done

    def drain_jobs(self) -> None:
        """Nothing is ever under way."""

    def touch(self, keys: Collection[Key], req_context: Any) -> None:
        """Uses are the order's business."""

    # -- promotions

    def has_pending_work(self) -> bool:
        return bool(self._promotions) or self._side.wants_step()

    def serve_external_requests(self, parent: Any) -> None:
        """Once a step: begin what is due, go on with what is under way. Never raises into the scheduler."""
        self._side.settled()
        for due in self._side.sessions.due():
            if due.keys and len(self._promotions) < MOST_PROMOTIONS:
                self._begin(parent, due)
        room = MOST_LOOKUPS
        for promotion in list(self._promotions):
            room -= self._go_on(parent, promotion, room)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002  what was scheduled does not matter
        """Promotions begun in this step have been handed to their tier just now."""
        for promotion in self._promotions:
            if promotion.moved and not promotion.told:
                promotion.told = True
                self._side.promoted(promotion.due.heard_s, promotion.due.due_s)

    def shutdown(self) -> None:
        self._side.close()

    def _begin(self, parent: Any, due: Due) -> None:
        name = f"agentkv-{next(self._numbers)}"
        context = ReqContext(req_id=name, kv_transfer_params={"agentkv": {"session": due.name}})
        context.set_state(Prefetch())
        try:
            parent.on_new_request(context)
        except Exception as error:
            log.failed("vllm_promotion_failed", error=repr(error))
            return
        self._side.count("under_way")
        self._promotions.append(_Promotion(due, context, list(due.keys), self._side.sessions.clock.now_s()))

    def _go_on(self, parent: Any, promotion: _Promotion, room: int) -> int:
        """Look up what has not arrived, in the order of the prompt; how many lookups that took.

        The first block that is nowhere ends it: what comes behind is of no use without.
        """
        left: list[Key] = []
        asked = 0
        try:
            for number, key in enumerate(promotion.left):
                if asked >= room:
                    left += promotion.left[number:]
                    break
                asked += 1
                result = parent.lookup(key, promotion.context)
                if result is LookupResult.MISS:
                    self._side.count("missing_blocks", len(promotion.left) - number)
                    break
                if result is LookupResult.HIT_PENDING:
                    promotion.moved.add(key)
                if result is not LookupResult.HIT:
                    left.append(key)
        except Exception as error:
            log.failed("vllm_promotion_failed", error=repr(error))
            left = []
        promotion.left = left
        passed_s = self._side.sessions.clock.now_s() - promotion.started_s
        if not left or passed_s > LONGEST_S:
            self._end(parent, promotion, passed_s)
        return asked

    def _end(self, parent: Any, promotion: _Promotion, passed_s: float) -> None:
        self._promotions.remove(promotion)
        self._side.count("under_way", -1)
        self._side.count("promoted_blocks", len(promotion.moved))
        self._side.sessions.loaded(len(promotion.moved), passed_s)
        try:
            parent.on_request_finished(promotion.context)
        except Exception as error:
            log.failed("vllm_promotion_failed", error=repr(error))
