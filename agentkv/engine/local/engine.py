"""LocalEngine: the embedded engine. One thread computes steps; callers submit from any thread.

Covers: the step, delivery, ends of calls, lifetime. Does not cover: reading a request (`intake.py`), who computes when
(`batch.py`), where blocks are (`kv/tiers.py`). Read `_step` first: it is the architecture.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from agentkv.clock import Clock, SystemClock
from agentkv.core.forecast import Forecast
from agentkv.core.rates import Rates
from agentkv.core.residency import Move, Receipt, Residency
from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.engine.local.archive import disk_tier, revive
from agentkv.engine.local.batch import Batch, Turn
from agentkv.engine.local.chat import Written
from agentkv.engine.local.gauge import PrefillMeter
from agentkv.engine.local.intake import Intake
from agentkv.engine.local.loader import LoadedModel
from agentkv.engine.local.restores import Restores
from agentkv.engine.local.runner import Runner
from agentkv.engine.local.sequence import Sequence
from agentkv.engine.local.sessions import Sessions
from agentkv.engine.local.timing import book_step
from agentkv.engine.local.writing import Fresh, write
from agentkv.engine.stream import Stream
from agentkv.errors import Closed, ConfigError, ModelError
from agentkv.kv.family import Family
from agentkv.kv.index import root_key
from agentkv.kv.streams import Event, Streams
from agentkv.kv.tiers import Tiers
from agentkv.log import failed

_RETRY_S = 0.02  # longest sleep while somebody waits; `on_room` usually wakes us earlier
_SAVE_S = 60.0  # the longest that `close` writes what is to be kept


class LocalEngine(AbstractContextManager["LocalEngine"]):
    """A Hugging Face model over tiered KV blocks; see engine/base.py for the protocol.

    `device_memory`, `host_memory` (0: no such tier) and `disk_memory` are bytes; with a `family` host and disk are shared
    with engines on other devices. `salt` separates tenants; with `persist` sessions are on disk when it closes, for
    the next engine with this model, salt and disk. `speculate`: tokens are guessed from the context and checked several
    in a step, which changes no answer (`drafts.py`). A context manager; `close()` is idempotent and ends every call with
    Closed. Raises ConfigError on sizes that cannot work.
    """

    sends_own_text = True  # of earlier turns

    def __init__(
        self,
        model: LoadedModel,
        *,
        device_memory: int,
        host_memory: int = 0,
        disk: Path | None = None,
        disk_memory: int = 0,
        family: Family | None = None,
        disk_off: str = "",
        salt: str = "",
        persist: bool = False,
        rates: Rates | None = None,
        at_close: Callable[[Mapping[str, Any]], None] | None = None,
        chunk_tokens: int = 512,
        max_batch: int = 16,
        speculate: bool = True,
        clock: Clock | None = None,
        streams: Streams | None = None,
    ) -> None:
        if chunk_tokens < 1 or max_batch < 1:
            raise ConfigError(f"chunk_tokens={chunk_tokens} and max_batch={max_batch} must be 1 or more")
        self.model = model.name
        self._pid = os.getpid()
        self._clock: Clock = clock or SystemClock()
        if persist and disk is None and family is None:
            raise ConfigError("persist=True needs a disk: a folder in which sessions are kept")
        root = root_key(fingerprint=model.fingerprint, salt=salt)
        slab, self._disk_off = None, disk_off
        if family is None:
            store = root.hex() if persist else None
            slab, self._disk_off = disk_tier(disk, disk_memory, model.geometry.block_bytes, store)
        try:
            self.tiers = Tiers(
                geometry=model.geometry,
                device=str(model.device),
                device_bytes=device_memory,
                window_tokens=model.window_tokens,
                host_bytes=host_memory,
                slab=slab,
                family=family,
                rates=rates,
                streams=streams,
                clock=self._clock,
            )
        except BaseException:
            if slab is not None:
                slab.close()
            raise
        self._sessions = Sessions()
        self._restores = Restores()
        self._persist = persist
        revive(self.tiers, self._sessions, self.model)
        pool_tokens = self.tiers.window.longest(self.tiers.num_blocks)
        self.context_tokens = min(model.context_tokens, pool_tokens)
        """The most that a prompt and its answer may have together, by the model and by the device memory."""
        self._intake = Intake(
            model, self._sessions, root=root, pool_tokens=pool_tokens, clock=self._clock, speculate=speculate
        )
        self.count_text = self._intake.tokeniser.count
        self.text_ids = self._intake.tokeniser.text_ids
        self._batch = Batch(self.tiers, clock=self._clock, chunk_tokens=chunk_tokens, max_batch=max_batch)
        self._runner = Runner(model.model, self.tiers.pool, vocabulary=model.vocabulary)
        self._about = model.about()
        self._arrived: deque[Sequence] = deque()
        self._counts: Counter[str] = Counter()
        self._meter = PrefillMeter(None if rates is None else rates.prefill)
        self._at_close = at_close
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._turns: list[Turn] = []
        self._step_began_s = 0.0
        self.tiers.on_room(self._wake.set)
        atexit.register(self.close)  # a script that forgets to close ends all the same
        self._thread = threading.Thread(target=self._run, name="agentkv-engine", daemon=True)
        self._thread.start()

    # -- for callers, any thread

    def submit(self, request: Request) -> Stream:
        self._refuse_in_a_child()
        if self._closing:
            raise Closed("this engine is closed")
        sequences = self._intake.sequences(request, on_cancel=self._wake.set, forget=self._forget)
        with self._lock:
            if self._closing:
                raise Closed("this engine is closed")
            self._arrived.extend(sequences)
        self._wake.set()
        return sequences[0].stream

    def count_tokens(self, request: Request) -> int:
        self._refuse_in_a_child()
        return self._intake.count_tokens(request)

    def stats(self) -> Mapping[str, Any]:
        self._refuse_in_a_child()
        batch = self._batch
        return {
            "running": len(batch.running),
            "loading": len(batch.loading),
            "waiting": len(batch.waiting) + len(self._arrived),
            "sessions": self._sessions.count(),
            "preemptions": batch.preemptions,
            **{name: self._counts[name] for name in _COUNTED},
            "prefill_tokens_s": self._meter.tokens_s,
            "prefill": self._meter.stats(),
            "disk_off": self._disk_off,
            "model": self._about,
            "restored": self._restores.stats(),
            "kv": self.tiers.stats(),
        }

    def last_session(self, caller: Caller) -> str | None:
        self._refuse_in_a_child()
        return self._sessions.last_session(caller)

    def residency(self, session: str) -> Residency | None:
        return self.tiers.residency(session)

    def apply(self, move: Move, on_receipt: Callable[[Receipt], None] | None = None) -> bool:
        def deliver(receipt: Receipt) -> None:
            self._restores.moved(receipt)
            if on_receipt is not None:
                on_receipt(receipt)

        taken = self.tiers.apply(move, deliver)
        for name in self._sessions.beside(move.session):  # choices share most blocks; the next turn picks any of them
            self.tiers.apply(replace(move, session=name), lambda told: self._restores.moved(replace(told, move=move)))
        return taken

    def expect(
        self, session: str, at_s: float | None, forecast: Forecast | None = None, started_s: float | None = None
    ) -> None:
        for name in (session, *self._sessions.beside(session)):
            self.tiers.expect(name, at_s, forecast, started_s)
        self._batch.admission.expect(session, forecast, started_s)

    def rank_by(self, rank: Callable[[Any, float], tuple[float, ...]]) -> None:
        self.tiers.rank_by(rank)

    def finish_task(self, task: str) -> None:
        self._refuse_in_a_child()
        for session in self._sessions.finish(task):
            self._restores.forget(session)
            self._batch.admission.forget(session)
        self.tiers.drop_task(task)

    def finish_sessions(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._forget(*self._sessions.drop(session))

    def _forget(self, *names: str) -> None:
        for name in names:
            self._restores.forget(name)
            self._batch.admission.forget(name)
            self.tiers.drop(name)

    def close(self) -> None:
        if os.getpid() != self._pid:  # the parent's to close: threads, files and pinned memory are its own
            return
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        at_close, self._at_close = self._at_close, None
        if at_close is not None:
            at_close(self.stats())
        if self._persist:
            self._forget(*self._sessions.others())
            self.tiers.save(_SAVE_S)
        self.tiers.close()
        self._runner.close()
        atexit.unregister(self.close)

    def _refuse_in_a_child(self) -> None:
        if os.getpid() != self._pid:
            raise Closed(f"this engine belongs to process {self._pid}; a forked child must make its own")

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the engine's thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                computed = self._step()
            except Exception as error:
                self._step_failed(error)
                continue
            if not computed:
                if self._batch.loading:
                    self.tiers.tick()
                self._wake.wait(_RETRY_S if self._batch.everyone() else None)
        self._take_in()
        for sequence in self._batch.everyone():
            self._abandon(sequence, Closed("the engine was closed during the call"))

    def _step(self) -> bool:
        """One step of the engine; False if there was nothing to compute."""
        self._turns = []
        self._take_in()
        self._batch.admit()
        self._turns = self._batch.plan()
        if not self._turns:
            return False
        logits, written = self._forward(self._turns)
        planned, self._turns = self._turns, self._batch.confirm(self._turns)
        fresh = write(planned, self._turns, logits, self._intake.raw)
        self._batch.commit(self._turns, written)
        self._deliver(fresh)
        return True

    def _take_in(self) -> None:
        """New calls in, cancelled ones out."""
        while self._arrived:
            self._batch.waiting.append(self._arrived.popleft())
        for sequence in self._batch.everyone():
            cancelled, error = sequence.stream.ended, sequence.choices.error
            self._counts["cancelled"] += cancelled
            if cancelled or error is not None:
                self._abandon(sequence, error)

    def _forward(self, turns: list[Turn]) -> tuple[Tensor, Event]:
        """Compute the step: logits [rows, vocabulary] of the turns that sample, and when the pool was written."""
        self._step_began_s = self._clock.now_s()
        zeroed = self._batch.take_fresh()
        results: list[Tensor | Exception] = []

        def compute() -> None:
            try:
                self._runner.zero(zeroed)
                results.append(self._runner.forward([turn.span for turn in turns]))
            except Exception as error:
                results.append(error)

        self.tiers.streams.launch(compute)
        written = self.tiers.streams.record()
        written.wait()
        if isinstance(results[0], Exception):
            raise results[0]
        self._counts["steps"] += 1
        return results[0], written

    def _deliver(self, written: list[Fresh]) -> None:
        """Book the step's time, hand out its tokens, end what has ended."""
        now_s = self._clock.now_s()
        self._account(self._turns, now_s)
        for one in written:
            if one.error is not None:
                self._abandon(one.sequence, one.error)
            else:
                self._tell(one, now_s)

    def _account(self, turns: list[Turn], now_s: float) -> None:
        prefill = book_step(turns, self._batch.running, began_s=self._step_began_s, now_s=now_s)
        self._counts["prefill_tokens"] += prefill
        self._meter.step([turn.span for turn in turns], prefill, now_s - self._step_began_s)
        self.tiers.prefill_tokens_s = self._meter.tokens_s or self.tiers.prefill_tokens_s

    def _tell(self, fresh: Fresh, now_s: float) -> None:
        sequence, clock = fresh.sequence, fresh.sequence.clock
        if clock.first_s is None:
            clock.first_s = now_s
            self._batch.hold(sequence)
            self._restores.verify(sequence)
        clock.last_s = now_s
        sequence.push(fresh.text, fresh.token_ids)
        if sequence.answer.reason is not None:
            self._complete(sequence)

    def _complete(self, sequence: Sequence) -> None:
        answer, session = sequence.answer, sequence.session
        rest, calls = answer.finish()
        if rest or answer.aside.waits:
            sequence.push(rest)
        told = Written(raw=answer.raw, content=answer.text, calls=calls, reasoning=answer.aside.thought)
        session.raw_by_call.update((call.id, told) for call in calls)
        self._counts["completed"] += 1
        self._settle(sequence)
        sequence.choices.told(sequence.choice, sequence.generation(calls, self.model, self.tiers.geometry.block_bytes))
        self._sign_off(sequence)

    def _abandon(self, sequence: Sequence, error: Exception | None) -> None:
        """End a call that has no answer; everything it held is free afterwards. Its other choices follow."""
        try:
            self._settle(sequence)
        except Exception as second:
            failed("engine_call_not_settled", error=repr(second))
            self._batch.strike(sequence)  # a call that cannot be settled must not fail every step from now on
        sequence.choices.error = error
        self._sign_off(sequence)

    def _sign_off(self, sequence: Sequence) -> None:
        """With the last of its choices the call ends: then is known what it used."""
        choices, stream = sequence.choices, sequence.stream
        if not choices.left(sequence.choice, sequence.spent()):
            return
        if (whole := choices.whole()) is not None:
            stream.finish(whole)
        elif choices.error is not None:
            stream.fail(choices.error)
        stream.settle()

    def _settle(self, sequence: Sequence) -> None:
        """What the call computed belongs to its session now; its blocks are unpinned."""
        session = sequence.session
        sequence.stream.device_s += sequence.clock.device_s
        if sequence.computed:
            sequence.answer.flush()
            self._batch.keep_tail(sequence)
            self._batch.hold(sequence)
            self._forget(*session.take(sequence.told(), sequence.holder, sequence.choices, self._intake.tokeniser))
        elif sequence.choice:  # it was sent back to the queue: nobody goes on with what is held under its name
            self._forget(sequence.holder)
        self._counts.update(sequence.counted())
        self._batch.leave(sequence)
        self._sessions.leave(session)
        if session.dropped:  # its task was finished meanwhile
            self._forget(*session.names)

    def _step_failed(self, error: Exception) -> None:
        """A step that raised ends the calls that took part in it; if it had no plan yet, all of them."""
        alive = self._batch.everyone()
        sequences = [turn.sequence for turn in self._turns if turn.sequence in alive] if self._turns else alive
        failed("engine_step_failed", error=repr(error), calls=len(sequences))
        for sequence in sequences:
            self._abandon(sequence, ModelError(f"the model failed while computing: {error!r}"))


_COUNTED = (
    "steps", "completed", "cancelled", "prefill_tokens", "output_tokens", "drafted_tokens", "accepted_tokens",
)  # fmt: skip
