"""Shaping: what a model call sends, made of what the caller gave. Read `turn` and `Turn.ready` first.

Covers which view, notes, folds now, later or during a tool's wait, and what the bill hears of it. Does not cover the
stages (`context/`) nor the call itself (`calls.py`). Nothing here fails a call: a stage that breaks is logged, and
the messages go as they are.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from agentkv import log
from agentkv.clock import Clock
from agentkv.context.options import Context
from agentkv.context.summary import Fold, Proposal
from agentkv.context.view import Stages
from agentkv.context.volatile import steady
from agentkv.core.forecast import Forecast
from agentkv.core.message import Message
from agentkv.core.task import UNATTRIBUTED, Caller, PriorityClass
from agentkv.engine.base import Generation, Request, Sampling, changed
from agentkv.runtime.blocking import on_event_loop, within
from agentkv.runtime.books import Books
from agentkv.runtime.carry import Carry, conclusion
from agentkv.runtime.gate import notice
from agentkv.runtime.identity import segment_of
from agentkv.runtime.lines import Line, Lines

FOLD_BRANCH = "~fold"
"""What a summary call's branch ends in: it must not become the session that a tool waits for."""
FIRST_FOLD_S = 10.0
"""How long a fold is taken to last until one has been made."""
MAX_CALLS_TO_RETRY = 31
"""A summariser that keeps failing is asked again after 0, 1, 3, 7, ... calls, as its failures cost as much as answers."""
MAX_LOOP_CHARS = 8_000
"""More new text than this is not taken in on the thread of an event loop: slimming 100 kB takes a tenth of a second."""
RECALLED = 8
MAX_ANSWERS = 1024
GOAL_CHARS = 600
ANSWER_CHARS = 1200

Ask = Callable[[Request, float], Generation]
"""Makes a model call that nobody sees, and waits for its answer, at most so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call before it is sent: `request` if it can go at once, else `ready()` makes it (and may block)."""

    request: Request | None
    ready: Callable[[], Request]


class Shaper:
    """Turns requests into what is sent. Thread-safe, never raises."""

    def __init__(self, *, stages: Stages, context: Context, books: Books, clock: Clock, ask: Ask) -> None:
        self._stages = stages
        self._context = context
        self._books = books
        self._clock = clock
        self._ask = ask
        self._lines = Lines(stages)
        self._numbers = itertools.count(1)
        self._carry = Carry()
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._fold_s = FIRST_FOLD_S
        self._counted = False
        """The counter has counted: the first time it reads its vocabulary, which takes half a second."""

    # -- a model call

    def turn(self, request: Request) -> Turn:
        """What `request` becomes. Quick: whatever may take time is left to `ready`."""
        try:
            return self._turn(request)
        except Exception as error:
            log.failed("context_failed", stage="view", error=repr(error))
            return Turn(request=request, ready=lambda: request)

    def _turn(self, request: Request) -> Turn:
        messages, tail = request.messages or (), ""
        if self._context.volatile:
            messages, tail = steady(messages, self._context.volatile)
        if on_event_loop() and (not self._counted or self._is_much(request, messages)):
            return Turn(request=None, ready=lambda: self._here(request))
        with self._open(request, messages) as line:
            self._counted = True
            proposal = self._due(line)
            if proposal is None and not self._asks_memory(line, messages):
                shown = self._shown(line, request, tail)
                return Turn(request=shown, ready=lambda: shown)
            failed = None if proposal is None else line.failed_folds
        return Turn(request=None, ready=lambda: self._ready(request, messages, tail, failed))

    def _is_much(self, request: Request, messages: tuple[Message, ...]) -> bool:
        """True if taking in what is new would hold up an event loop."""
        known = len(self._lines.of((request.caller.task, request.caller.branch), messages).view.raw)
        return sum(len(message.content) for message in messages[known:]) > MAX_LOOP_CHARS

    def _here(self, request: Request) -> Request:
        """What `request` becomes, made on this thread."""
        turn = self.turn(request)
        return turn.request or turn.ready()

    @contextmanager
    def _open(self, request: Request, messages: tuple[Message, ...]) -> Iterator[Line]:
        """The line of these messages, locked, with all of them in its view and no others."""
        task = request.caller.task
        while True:
            line = self._lines.of((task, request.caller.branch), messages)
            with line.lock:
                if not line.view.continues(messages):
                    continue  # another call has taken it further in between
                line.view.tools(request.tools)
                for slim in line.view.extend(messages):
                    self._books.context_event(
                        task, "slim", before=slim.raw_tokens, after=slim.kept_tokens, cause=slim.rule, name=slim.tool
                    )
                yield line
                return

    def _shown(self, line: Line, request: Request, tail: str, recalled: str = "") -> Request:
        """The request as it is sent; the line is locked."""
        view = line.view
        carried = "" if line.begun else self._carry.text(request.caller)
        if carried and view.says(carried):  # in another life of this conversation
            carried = ""
        line.begun = line.begun or not carried or view.takes_note
        nearly = notice(self._books.account(request.caller.task), request.caller.branch) if view.takes_note else ""
        lasting = "\n\n".join(text for text in (carried, recalled, nearly) if text) or view.noted
        fresh = tail if tail != view.values_before else ""
        view.note("\n\n".join(text for text in (lasting, fresh) if text))
        before = line.sent_fold
        line.prompt, line.rendering = view.prompt(), request.rendering
        line.sent_fold = view.fold
        folded = line.sent_fold is not before
        session = request.session or (line.session if folded else "") or None  # an engine would take it for another one
        return changed(request, messages=line.prompt, tools=view.tools_now, fold=folded, session=session)

    def _ready(self, request: Request, messages: tuple[Message, ...], tail: str, failed: int | None) -> Request:
        """`failed`: a fold is due, and so many have failed before; None: none is due."""
        try:
            if failed is not None:
                self._fold_first(request, messages, failed)
            with self._open(request, messages) as line:
                line.view.refold()
                asks = self._asks_memory(line, messages)
                shown = line.view.prompt_now() if asks else ()
            recalled = self._recalled(request, messages[-1].content, shown) if asks else ""
            with self._open(request, messages) as line:
                return self._shown(line, request, tail, recalled)
        except Exception as error:
            log.failed("context_failed", stage="ready", error=repr(error))
            return request

    # -- memories

    def _asks_memory(self, line: Line, messages: tuple[Message, ...]) -> bool:
        """Once for each message of a user: what was told behind it stays."""
        return self._context.memory is not None and messages[-1].role == "user" and not line.view.noted

    def _recalled(self, request: Request, query: str, shown: tuple[Message, ...]) -> str:
        """What is worth telling of what is remembered about `query`, and new in the prompt `shown`."""
        memory = self._context.memory
        if memory is None:
            return ""
        try:
            from agentkv.context.memory import decide

            found = memory.recall(query, k=RECALLED, namespace=self._namespace(request.caller.task))
            prompt = "\n".join(message.content for message in shown)
            injection = decide(found, prompt=prompt, max_tokens=self._context.memory_tokens)
        except Exception as error:
            log.failed("memory_failed", error=repr(error))
            return ""
        told = injection.text()
        tokens = self._stages.counter.text(told)
        self._books.context_event(request.caller.task, "recall", before=len(found), after=tokens)
        return told

    # -- folds

    def _due(self, line: Line) -> Proposal | None:
        """The fold to be made before this call; the line is locked."""
        if line.folding is not None and not line.folding.is_alive():
            line.folding = None
        proposal = self._proposal(line)
        if proposal is None or proposal.kind != "fold":
            return None
        if proposal.forced:
            return proposal
        if line.folding is not None:
            return None  # it is being made; this call goes as it is
        if line.calls_to_retry:
            line.calls_to_retry -= 1
            return None
        if line.waits_seen and not line.postponed:
            line.postponed = True
            return None
        return proposal

    def _proposal(self, line: Line) -> Proposal | None:
        """What could be folded now that a fold made during a wait holds; the line is locked."""
        if line.made is not None:
            line.view.adopt(line.made)
            line.made = None
        return line.view.propose()

    def _fold_first(self, request: Request, messages: tuple[Message, ...], failed: int) -> None:
        """Make the fold that is due, unless another call of the same conversation did so, or failed, in between."""
        with self._open(request, messages) as line:
            pass
        with line.making:
            with self._open(request, messages) as line:
                line.view.refold()
                proposal, sent = self._proposal(line), line.view.prompt_now()
            if proposal is not None and proposal.kind == "fold" and line.failed_folds == failed:
                self._fold(line, request, proposal, sent, background=False)

    def tool_waits(self, caller: Caller, forecast: Forecast | None) -> None:
        """A tool of this branch runs now: time for a fold that was put off, if the forecast leaves enough of it."""
        try:
            line = self._lines.last((caller.task, caller.branch))
            if line is None:
                return
            line.waits_seen = True
            if not line.postponed or forecast is None or forecast.quantile_s(0.5) < self._fold_s:
                return
            self._fold_in_background(line, caller)
        except Exception as error:
            log.failed("context_failed", stage="wait", error=repr(error))

    def _fold_in_background(self, line: Line, caller: Caller) -> None:
        with line.lock:
            proposal = line.view.propose() if line.folding is None else None
            if proposal is None or proposal.kind != "fold" or line.view.sent is None:
                return
            sent = line.view.sent
            request = Request(messages=sent, tools=line.view.tools_now, caller=caller, **line.rendering)

            def run() -> None:
                with line.making:
                    self._fold(line, request, proposal, sent, background=True)

            line.folding = threading.Thread(target=run, name="agentkv-fold", daemon=True)
            line.folding.start()

    def _fold(
        self, line: Line, request: Request, proposal: Proposal, sent: tuple[Message, ...], *, background: bool
    ) -> None:
        """Make the fold; afterwards the notebook has it, or the history stays. Blocks; never raises."""
        folder = self._stages.folder
        if folder is None:
            return
        started_s = self._clock.now_s()
        before = line.view.shown_tokens
        try:
            if self._context.summarise == "extract":
                fold = folder.extracted(proposal, record=not background)
            else:
                flow = folder.flow(proposal, sent, record=not background)
                fold = self._driven(flow, request, background=background)
        except Exception as error:
            log.failed("summary_failed", error=repr(error))
            fold = None
        line.postponed = False
        if fold is None:
            line.calls_to_retry = min(MAX_CALLS_TO_RETRY, 2**line.failed_folds - 1)
            line.failed_folds += 1
            self._books.context_event(request.caller.task, "fold_failed", cause=proposal.reason)
            return
        line.failed_folds = 0
        if background:
            line.made = fold
        took_s = self._clock.now_s() - started_s
        self._fold_s += 0.5 * (took_s - self._fold_s)
        self._books.context_event(
            request.caller.task,
            "fold",
            before=before,
            after=max(0, before - proposal.saved_tokens),
            cause=proposal.reason,
            seconds=took_s,
        )

    def _driven(
        self,
        flow: Generator[tuple[Message, ...], str | BaseException, Fold | None],
        request: Request,
        *,
        background: bool,
    ) -> Fold | None:
        """Run the flow with the summariser of the options."""
        try:
            prompt = next(flow)
            while True:
                prompt = flow.send(self._summary(prompt, request, background=background))
        except StopIteration as ended:
            fold: Fold | None = ended.value
            return fold

    def _summary(self, prompt: tuple[Message, ...], request: Request, *, background: bool) -> str | BaseException:
        summarise = self._context.summarise
        try:
            if callable(summarise):
                return within(self._context.summary_timeout_s, summarise, prompt)
            caller = replace(request.caller, node="summary", branch=request.caller.branch + FOLD_BRANCH)
            tokens = sum(map(self._stages.counter.message, request.messages or ()))
            kept = self._books.account(caller.task).reserve(tokens + (request.sampling.max_tokens or 1))
            try:  # a summary must not spend what the call itself needs
                answer = self._ask(
                    Request(
                        messages=prompt,
                        tools=request.tools,
                        sampling=Sampling(max_tokens=self._context.summary_tokens),
                        caller=caller,
                        # while a tool runs the conversation's own session must stay free for the call behind it
                        session=f"{caller.task}~{next(self._numbers)}" if background else None,
                        priority=PriorityClass.BATCH if background else request.priority,
                        purpose="summary",
                        **request.rendering,
                    ),
                    self._context.summary_timeout_s,
                )
            finally:
                kept.release()
        except Exception as error:
            return error
        return answer.text

    # -- the end

    def answered(self, request: Request, generation: Generation) -> None:
        """The model answered: the last answer of a task is what it came to."""
        self._lines.answered((request.caller.task, request.caller.branch), request.messages or (), generation.session)
        if self._context.memory is not None and self._context.remember_tasks and generation.text.strip():
            self._answers[request.caller.task] = generation.text
            self._answers.move_to_end(request.caller.task)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def _remember(self, task: str) -> None:
        """What a finished task was for and what it came to, as an episodic memory."""
        answer, memory = self._answers.pop(task, None), self._context.memory
        if answer is None or memory is None or task == UNATTRIBUTED:
            return
        goals = [
            message.content
            for key, line in self._lines.all_of(task)
            if segment_of(key[1]) is None
            for message in line.view.raw[:8]
            if message.role == "user"
        ]
        goal = f"Asked: {goals[0][:GOAL_CHARS]}\n" if goals else ""
        text = f"{goal}Concluded: {answer[:ANSWER_CHARS]}"
        memory.remember(text, kind="episodic", task=task, source=task, namespace=self._namespace(task))

    def _namespace(self, task: str) -> str | None:
        """Whose memories the task's are; None for the memory's own."""
        name = self._context.memory_namespace
        return None if name is None else name(task)

    def close_segment(self, task: str, name: str, *, carry: bool) -> str:
        """What is left of a segment, in words; with `carry` later segments begin with it."""
        try:
            views = []
            for (_, branch), line in self._lines.all_of(task):
                if segment_of(branch) == name:
                    with line.lock:
                        views.append((line.view.said(), line.view.fold))
            text = conclusion(views, max_tokens=self._context.summary_tokens, count=self._stages.counter.text)
        except Exception as error:
            log.failed("context_failed", stage="segment", error=repr(error))
            return ""
        self._lines.forget_segment(task, name)
        if carry and text:
            self._carry.add(task, name, text)
        return text

    def forget(self, task: str) -> None:
        """The task is over."""
        try:
            self._remember(task)
        except Exception as error:
            log.failed("memory_failed", error=repr(error))
        for _, line in self._lines.all_of(task):
            with line.lock:
                line.view.forget_notes()
        self._lines.forget(task)
        self._carry.forget(task)
