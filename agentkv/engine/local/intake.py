"""Intake: from a Request to its Sequences, in the caller's thread, before anything is started.

Covers: checks, rendering, session choice, tokens, lengths. A request that cannot be answered is refused here, with an
error that names the field or the numbers.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from agentkv.clock import Clock
from agentkv.core.task import PriorityClass
from agentkv.engine.base import Request, refuse_unless
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.chat import Chat, spec_of
from agentkv.engine.local.choices import Choices
from agentkv.engine.local.drafts import Drafter
from agentkv.engine.local.grammar import Grammar, grammar_of
from agentkv.engine.local.guide import Guides
from agentkv.engine.local.held import HeldGate
from agentkv.engine.local.loader import LoadedModel
from agentkv.engine.local.responses import TemplateGate
from agentkv.engine.local.sampler import Chooser, Guide
from agentkv.engine.local.sequence import Clockwork, Outlives, Sequence, rank_of
from agentkv.engine.local.sessions import Session, Sessions
from agentkv.engine.local.thoughts import ThoughtGate
from agentkv.engine.local.tokeniser import MARK, Tokeniser
from agentkv.engine.local.toolcalls import OPEN, Gate, OpenGate, TagGate
from agentkv.engine.local.transcript import Transcript
from agentkv.engine.request import FEATURES
from agentkv.engine.stream import Stream
from agentkv.errors import PromptTooLong, RequestInvalid
from agentkv.kv.index import BlockKey, root_key

_SYSTEM = ("system", "developer")
_CAN = FEATURES - {"extra_body", "extra_headers"}
"""What the engine can do of `request.FEATURES`: there is no server to tell more than that."""


class Intake:
    """Makes sequences for one engine. Thread-safe."""

    def __init__(
        self,
        loaded: LoadedModel,
        sessions: Sessions,
        *,
        root: BlockKey,
        pool_tokens: int,
        clock: Clock,
        speculate: bool = True,
    ) -> None:
        self._loaded = replace(loaded, model=None)  # it outlives the engine's end, the weights must not
        self._sessions = sessions
        self._root = root
        self._pool_tokens = pool_tokens
        self._clock = clock
        self._tokeniser = Tokeniser(loaded.tokenizer)
        self._guides = Guides(self._tokeniser, vocabulary=loaded.vocabulary, eos_ids=loaded.eos_ids)
        self._speculate = speculate
        self._chat = Chat(loaded.tokenizer, self._tokeniser, loaded.name)
        own = getattr(loaded.tokenizer, "response_template", None)
        self._tags = OPEN in json.dumps(own) if own else self._chat.family is None
        self._arrivals = itertools.count()
        self._counted = _Counted()

    @property
    def tokeniser(self) -> Tokeniser:
        """The model's tokeniser."""
        return self._tokeniser

    def count_tokens(self, request: Request) -> int:
        """Exact input tokens of a request. The same thread's next `sequences` of this very request reuses the work."""
        found = self._prompt(request)
        self._counted.request, self._counted.found, self._counted.base = request, found, found[0].transcript
        return len(found[1].ids)

    def raw(self, token_id: int) -> bytes:
        """A token's own bytes."""
        return self._guides.raw(token_id)

    def sequences(
        self, request: Request, *, on_cancel: Callable[[], None], forget: Callable[[str], None]
    ) -> list[Sequence]:
        """The request, checked and ready to be queued: a sequence for each of its choices, with one stream.

        `forget` is told of sessions that had to make way. Raises RequestInvalid and its kin; then nothing has happened.
        """
        submitted_s = self._clock.now_s()
        refuse_unless(request, _CAN, engine="the embedded engine")
        _check_ids(request, self._loaded.vocabulary)
        session, transcript, known_tokens = self._counted.take(request) or self._prompt(request)
        max_tokens = self._max_tokens(request, len(transcript.ids))
        grammar = grammar_of(request, tags=self._tags) if request.forced_ids is None else None
        if request.logprobs is not None:
            self._guides.raw(0)  # ExtraMissing now rather than in the engine's thread
        parts = [self._parts(request, transcript, grammar, max_tokens, choice) for choice in range(request.n)]
        outlives = self._outlives(request, transcript)
        if not session.template_tokens:
            session.template_tokens = self._template_tokens(request, transcript)
        stream, choices = Stream(on_cancel=on_cancel, settles=True), Choices(request.n)
        stream.spent = choices.spent
        made: list[Sequence] = []
        for choice, (answer, chooser) in enumerate(parts):
            ordinal, forgotten = self._sessions.join(session, request.caller)
            for key in forgotten:
                forget(key)
            made.append(
                Sequence(
                    stream=stream,
                    session=session,
                    transcript=transcript,
                    answer=answer,
                    chooser=chooser,
                    choices=choices,
                    choice=choice,
                    outlives=outlives,
                    drafter=Drafter() if self._speculate and request.forced_ids is None else None,
                    rank=rank_of(request.priority, ordinal, next(self._arrivals)),
                    root=root_key(fingerprint=self._root, salt=request.salt) if request.salt else self._root,
                    ids=list(transcript.ids),
                    known_tokens=known_tokens,
                    tail_tokens=known_tokens,
                    background=request.priority == PriorityClass.BATCH,
                    clock=Clockwork(submitted_s=submitted_s, mark_s=submitted_s),
                )
            )
        return made

    def _parts(
        self, request: Request, transcript: Transcript, grammar: Grammar | None, max_tokens: int, choice: int
    ) -> tuple[Answer, Chooser]:
        """What writes one choice, and what chooses its tokens; seeded choices have seeds of their own."""
        sampling = request.sampling
        answer = Answer(
            self._tokeniser,
            prompt_ids=transcript.ids,
            eos_ids=self._loaded.eos_ids,
            max_tokens=max_tokens,
            stop=sampling.stop,
            forced_ids=request.forced_ids,
            gate=self._gate(request, transcript.text, grammar),
            most_calls=None if request.tool_choice.parallel else 1,
        )
        if choice and sampling.seed is not None:
            sampling = replace(sampling, seed=_seed_of(sampling.seed, choice))
        guide = None if grammar is None else self._guide(request, transcript.text, grammar)
        return answer, Chooser(sampling, logprobs=request.logprobs, guide=guide)

    def _prompt(self, request: Request) -> tuple[Session, Transcript, int]:
        """(session, the prompt's transcript, how many of its ids were computed before)."""
        task = request.caller.task
        if request.messages is not None:
            text = self._chat.render(
                request.messages,
                request.tools,
                lambda id_: self._sessions.raw_of(task, id_),
                go_on=request.continue_final_message,
                variables=self._variables(request),
            )
        else:
            text = (request.prompt or "").replace(MARK, "\ufffd")
        session = self._sessions.choose(request.caller, text, request.session)
        base, computed = session.base(text, self._tokeniser)
        transcript, kept = base.extended(text, self._tokeniser, raw=request.prompt is not None)
        if not transcript.ids:
            raise RequestInvalid("the prompt is empty: there is nothing to continue", param="prompt")
        if self._loaded.unknown and not self._loaded.unknown.isdisjoint(transcript.ids):
            raise RequestInvalid(
                f"the prompt has a token that the tokenizer of {self._loaded.name} knows and the model does not",
                param="prompt" if request.messages is None else "messages",
                code="unknown_token",
            )
        return session, transcript, min(kept, computed)

    def _variables(self, request: Request) -> dict[str, Any]:
        return self._chat.variables(request.reasoning_effort, request.chat_template_kwargs, tools=bool(request.tools))

    def _template_tokens(self, request: Request, transcript: Transcript) -> int:
        """Tokens before the first message that is not the system's."""
        at, found = 0, False
        for message in request.messages or ():
            content = self._tokeniser.guard(message.content)
            place = transcript.text.find(content, at)
            if place < 0 or not content:
                return 0
            at, found = place, True
            if message.role not in _SYSTEM:
                break
            at += len(content)
        count = bisect.bisect_right(transcript.borders, at, key=lambda border: border[0]) if found else 0
        return transcript.borders[count - 1][1] if count else 0

    def _max_tokens(self, request: Request, prompt_tokens: int) -> int:
        """How much may be written; raises PromptTooLong with both numbers."""
        context, pool = self._loaded.context_tokens, self._pool_tokens
        limit = min(context, pool)
        wanted = request.sampling.max_tokens
        if request.forced_ids is not None:
            wanted = min(len(request.forced_ids), wanted or len(request.forced_ids))
        needed = prompt_tokens + (wanted or 1)
        if needed <= limit:
            return wanted or limit - prompt_tokens
        what = f"the prompt has {prompt_tokens} tokens" + (f" and max_tokens is {wanted}" if wanted else "")
        where = f"the model's context of {context}" if context <= pool else f"the device memory's {pool}"
        advice = "" if context <= pool else " (give more device_memory)"
        raise PromptTooLong(
            f"{what}: {needed} tokens do not fit into {where}{advice}",
            needed_tokens=needed,
            limit_tokens=limit,
            param="prompt" if request.messages is None else "messages",
        )

    def _outlives(self, request: Request, transcript: Transcript) -> Outlives | None:
        """What stays of the prompt if its answer has a thought; None for a model that does not think."""
        if not self._chat.thinks or request.messages is None or request.continue_final_message:
            return None
        task = request.caller.task
        chars = self._chat.outlived(
            transcript.text,
            request.messages,
            request.tools,
            lambda id_: self._sessions.raw_of(task, id_),
            variables=self._variables(request),
        )
        if chars is None:
            return None
        count = bisect.bisect_right(transcript.borders, chars, key=lambda border: border[0])
        tokens = transcript.borders[count - 1][1] if count else 0
        spared = self._chat.spared(transcript.text, request.messages[-1])
        return Outlives(tokens=tokens, in_loops=self._chat.loops_think, spared=spared)

    def _guide(self, request: Request, prompt: str, grammar: Grammar) -> Guide:
        begun, marks, messages = self._thought(request, prompt), self._chat.marks, request.messages
        if begun is None or marks is None or messages is None or self._chat.spared(prompt, messages[-1]):
            return self._guides.guide(grammar)
        return self._guides.behind(marks, grammar, begun=begun)

    def _gate(self, request: Request, prompt: str, grammar: Grammar | None) -> Gate:
        if grammar is None:
            return self._behind_thought(self._words(request, prompt), request, prompt)
        words = OpenGate() if grammar.among is None else HeldGate(grammar.tools, among=grammar.among)
        return self._behind_thought(words, request, prompt)

    def _words(self, request: Request, prompt: str) -> Gate:
        """What reads text and calls where the model is free."""
        family, made = self._chat.family, partial(TemplateGate, self._loaded.tokenizer, self._tokeniser)
        if not request.tools or request.tool_choice.mode == "none":
            hidden = request.messages is not None and family is not None and family.always
            return made(prompt="", tools=[], family=family) if hidden else OpenGate()
        tools = [spec_of(tool) for tool in request.tools]
        if getattr(self._loaded.tokenizer, "response_template", None):
            return made(prompt=prompt, tools=tools)
        return TagGate() if family is None else made(prompt="", tools=tools, family=family)

    def _behind_thought(self, words: Gate, request: Request, prompt: str) -> Gate:
        """`words` for what stands behind a thought, if the model may write one."""
        begun, marks = self._thought(request, prompt), self._chat.marks
        if begun is None or marks is None or (isinstance(words, TemplateGate) and words.tells_thoughts):
            return words
        return ThoughtGate(words, marks, begun=begun)

    def _thought(self, request: Request, prompt: str) -> bool | None:
        """True if the prompt ends inside of a thought, False if the model may begin one, None if it cannot."""
        messages, goes_on = request.messages, request.continue_final_message
        if self._chat.marks is None or messages is None:
            return None
        begun = self._chat.begun(prompt, messages[-1], goes_on=goes_on)
        if goes_on and messages[-1].content.strip() and not begun:
            return None  # the answer has begun: it is too late for one
        return begun


class _Counted(threading.local):
    """The prompt that this thread counted last: whoever counts usually submits next."""

    request: Request | None = None
    found: tuple[Session, Transcript, int] | None = None
    base: Transcript | None = None

    def take(self, request: Request) -> tuple[Session, Transcript, int] | None:
        """What was found for `request`, once, and only while its session is as it was."""
        request_then, found, base = self.request, self.found, self.base
        self.request = self.found = self.base = None
        if request_then is not request or found is None or found[0].transcript is not base:
            return None
        session = found[0]
        return None if session.calls or session.dropped else found


def _seed_of(seed: int, choice: int) -> int:
    """A seed of its own for each choice; neighbouring seeds of requests share none."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=7).digest())


def _check_ids(request: Request, vocabulary: int) -> None:
    ids = request.forced_ids
    if ids is not None and not (ids and all(isinstance(id_, int) and 0 <= id_ < vocabulary for id_ in ids)):
        raise RequestInvalid(f"forced_ids must be one or more ids below {vocabulary}", param="forced_ids")
    beyond = [id_ for id_, _ in request.sampling.logit_bias if id_ >= vocabulary]
    if beyond:
        raise RequestInvalid(
            f"logit_bias names token {beyond[0]}, but there are {vocabulary}", param="logit_bias", code="invalid_value"
        )
