"""Sequence: one call from its arrival to its answer, with the blocks it has and the time it took.

Covers the state and its arithmetic. Who runs when is `batch.py`, what is written is `answer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from agentkv.core.message import ToolCall
from agentkv.core.reported import Reported
from agentkv.core.task import PriorityClass
from agentkv.core.usage import Timing, Usage
from agentkv.engine.base import Chunk, Generation
from agentkv.engine.local.answer import Answer
from agentkv.engine.local.choices import Choices
from agentkv.engine.local.drafts import Drafter
from agentkv.engine.local.sampler import Chooser
from agentkv.engine.local.sessions import Session, Told
from agentkv.engine.local.transcript import Transcript
from agentkv.engine.stream import Stream
from agentkv.kv.geometry import BLOCK_TOKENS
from agentkv.kv.index import BlockKey, chain_keys, tail_key
from agentkv.kv.ticket import Ticket


@dataclass(slots=True, kw_only=True)
class Clockwork:
    """Where a call's time goes, seconds; the parts never overlap."""

    submitted_s: float
    mark_s: float
    """Everything before this moment is accounted for."""
    queued_s: float = 0.0
    restore_s: float = 0.0
    recompute_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    device_s: float = 0.0
    """This call's share of the steps that it took part in; the other parts are wall time."""
    first_s: float | None = None
    last_s: float = 0.0

    def spend(self, part: str, now_s: float, *, share: float = 1.0) -> None:
        """Book the time since the mark; with `share` < 1 the rest was recompute."""
        passed_s = max(0.0, now_s - self.mark_s)
        self.mark_s = now_s
        setattr(self, part, getattr(self, part) + share * passed_s)
        self.recompute_s += (1 - share) * passed_s

    def timing(self) -> Timing:
        """The account as a value."""
        return Timing(
            queued_s=self.queued_s,
            restore_s=self.restore_s,
            recompute_s=self.recompute_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            ttft_s=0.0 if self.first_s is None else self.first_s - self.submitted_s,
            total_s=self.last_s - self.submitted_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlives:
    """How much of a prompt stays when its answer is sent back without its thought and somebody says more: `tokens`.
    `in_loops`: all of it, thoughts too, when what follows is a tool's result. `spared`: it ends with an empty thought, which
    goes the same way.
    """

    tokens: int
    in_loops: bool
    spared: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One call. `ids` is the prompt and what was generated; `computed` of them have their KV in `blocks`.

    The first `committed` blocks are immutable and known by `keys`. `limit_tokens` is the most that prompt and answer
    may have. `known_tokens`: so many of the first ids this session had computed before.
    """

    stream: Stream
    session: Session
    transcript: Transcript
    answer: Answer
    chooser: Chooser
    rank: tuple[int, int, int]
    """(-priority, task's ordinal, arrival): the smaller goes first."""
    root: BlockKey
    ids: list[int]
    known_tokens: int
    clock: Clockwork
    choices: Choices
    choice: int = 0
    """Which of the request's answers this is."""
    drafter: Drafter | None = None
    outlives: Outlives | None = None
    """What of the prompt its next one has again, where the model thinks."""
    certain: bool = False
    """The last guesses were no guesses: a grammar left no choice."""
    background: bool = False
    model: str = ""
    computed: int = 0
    reached_tokens: int = 0
    """The most that `computed` ever was after a step of this call."""
    committed: int = 0
    passed: int = 0
    """So many first blocks no layer's window shows any more: their places in `blocks` are empty."""
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    ticket: Ticket | None = None
    trusted_blocks: int | None = None
    """After a failed load: take no more blocks than this from the tiers."""
    cached_tokens: int | None = None
    """Reused tokens at the first start; None before."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Blocks that had to be loaded at the first start, by the tier that they came from."""
    restored_blocks: int = 0
    """Blocks that had to be loaded."""
    again_tokens: int = 0
    """Prompt tokens computed though this session had computed them before."""
    tail_tokens: int = 0
    """So many first tokens the session's KV ended with: the last, partial block may still be there."""
    tail: BlockKey | None = None
    """The key of the partial block, once it is kept."""
    spare: int | None = None
    """A private block for a copy of the leased partial one."""

    @property
    def holder(self) -> str:
        """The name under which its blocks are held: the session's own, and one of its own for each further choice."""
        return f"{self.session.key}\x1f{self.rank[2]}" if self.choice else self.session.key

    def told(self) -> Told:
        """The prompt and what was written."""
        answer = self.answer
        return Told(
            prompt=self.transcript,
            written=answer.written,
            token_ids=answer.token_ids,
            computed_tokens=self.computed,
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.transcript.ids)

    @property
    def lasting_tokens(self) -> int | None:
        """So many of the first tokens the next prompt of this session will have again, because the template drops what
        was thought; None: all of them, as far as is known.
        """
        answer = self.answer
        outlives = self.outlives
        if outlives is None or answer.reason is None or not (answer.aside.thought or outlives.spared):
            return None
        return None if answer.reason == "tool_calls" and outlives.in_loops else outlives.tokens

    @property
    def decoding(self) -> bool:
        """True when only the last token's KV is missing and that token was generated."""
        return self.computed == len(self.ids) - 1 and len(self.ids) > self.prompt_tokens

    def reusable_keys(self) -> list[BlockKey]:
        """Keys of the blocks that may come from the tiers: full ones, and never the last token, which is computed."""
        self.extend_keys()
        count = (len(self.ids) - 1) // BLOCK_TOKENS
        return self.keys[: count if self.trusted_blocks is None else min(count, self.trusted_blocks)]

    def partial_key(self, tokens: int) -> BlockKey | None:
        """Key of the partial block in which the first `tokens` tokens end; None if they fill their last block."""
        full, rest = divmod(tokens, BLOCK_TOKENS)
        if rest == 0:
            return None
        self.extend_keys()
        return tail_key(self.keys[full - 1] if full else self.root, self.ids[tokens - rest : tokens])

    def extend_keys(self) -> None:
        """Keys for all full blocks of `ids`."""
        done = len(self.keys)
        if (done + 1) * BLOCK_TOKENS <= len(self.ids):
            tail = self.ids[done * BLOCK_TOKENS :]
            self.keys += chain_keys(self.root, tail, self.keys[-1] if self.keys else None)

    def push(self, text: str, token_ids: tuple[int, ...] = ()) -> None:
        """Hand a piece of this answer to the reader."""
        logprobs = self.answer.take_logprobs()
        reasoning, calls = self.answer.aside.take()
        chunk = Chunk(
            text=text, token_ids=token_ids, choice=self.choice, logprobs=logprobs, calls=calls, reasoning=reasoning
        )
        self.stream.push(chunk)

    def guesses(self, most: int) -> Seq[int]:
        """At most `most` tokens that may follow: those that a grammar leaves no choice about, or a draft."""
        if self.answer.next_forced is not None:
            return ()
        ahead = self.chooser.ahead(most)
        self.certain = bool(ahead)
        return ahead or (self.drafter.draft(self.ids, most) if self.drafter else ())

    def generation(self, calls: tuple[ToolCall, ...], model: str, block_bytes: int) -> Generation:
        """The whole answer; it has ended."""
        answer = self.answer
        assert answer.reason is not None
        return Generation(
            text=answer.text,
            raw=answer.raw,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.reason,
            usage=self.usage(),
            timing=self.clock.timing(),
            tool_calls=calls,
            session=self.session.key,
            model=model,
            restored_blocks=self.restored_blocks,
            restored_bytes=self.restored_blocks * block_bytes,
            cached_by=self._by_tier(self.usage().cached_tokens),
            logprobs=tuple(answer.logprobs),
            unfinished=answer.unfinished,
            reasoning=answer.aside.thought,
            drafted_tokens=self.drafter.drafted if self.drafter else 0,
            accepted_tokens=self.drafter.accepted if self.drafter else 0,
        )

    def spent(self) -> Reported:
        """What the call used so far: its prompt as far as that was computed, and all that was written."""
        reached = min(self.reached_tokens, self.prompt_tokens)
        cached = min(self.cached_tokens or 0, reached)
        usage = replace(self.usage(), input_tokens=reached, cached_tokens=cached)
        return Reported(usage=usage, cached_by=self._by_tier(cached))

    def counted(self) -> dict[str, int]:
        """What was written, and how much of it was guessed ahead."""
        guessed = self.drafter
        return {
            "output_tokens": len(self.answer.token_ids),
            "drafted_tokens": guessed.drafted if guessed else 0,
            "accepted_tokens": guessed.accepted if guessed else 0,
        }

    def _by_tier(self, left: int) -> dict[str, int]:
        """So many reused tokens by the tier in which they were when the call came."""
        told: dict[str, int] = {}
        for tier in ("disk", "host"):
            tokens = min(left, self.loaded.get(tier, 0) * BLOCK_TOKENS)
            left -= tokens
            told |= {tier: tokens} if tokens else {}
        return told | ({"device": left} if left else {})

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            input_tokens=self.prompt_tokens,
            cached_tokens=min(self.cached_tokens or 0, self.prompt_tokens),
            output_tokens=len(self.answer.token_ids),
            reasoning_tokens=self.answer.reasoning_tokens,
            calls=1,
        )


def rank_of(priority: PriorityClass, task_ordinal: int, arrival: int) -> tuple[int, int, int]:
    """Higher classes first; inside one, the earliest task, then the earliest call."""
    return (-int(priority), task_ordinal, arrival)


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def in_order(sequences: Seq[Sequence]) -> list[Sequence]:
    """Who goes first."""
    return sorted(sequences, key=lambda one: one.rank)
