"""Folder: folds a growing conversation now and then, remembers each fold, and finds it again.

Covers the knobs, finding the fold that holds, the summary call as a generator (the caller talks to the model, sync or
async), and recording. Whether it pays is `plan.py`, what it looks like is `shape.py`, without a model `extract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Literal

from agentkv.context.notebook import Fold, Notebook
from agentkv.context.summary.ask import Asking
from agentkv.context.summary.extract import extract
from agentkv.context.summary.plan import Marks, Proposal, plan
from agentkv.context.summary.record import Summary
from agentkv.context.summary.shape import applied
from agentkv.core.message import Message
from agentkv.errors import ConfigError
from agentkv.log import count as count_event
from agentkv.log import failed

Flow = Generator[tuple[Message, ...], str | BaseException, Fold | None]
KEEP_LAST = 6
"""Messages that stay word for word: what an agent is at just now, some three calls with their results."""
MAX_PAYBACK_CALLS = 4.0
"""A tool loop that has come up to the mark makes some more calls; four are a small share of those up to the next fold."""
LOW_SHARE = 0.5
"""A fold goes down to half the mark: the next comes when the other half is full again, not at the next step."""
_SUMMARY_SHARE = 8  # of the mark
_LEAST_SUMMARY, _MOST_SUMMARY = 256, 2_048
_RESERVE_SHARE = 8  # of the window


class Folder:
    """Folds by one set of marks. Holds no conversation: one Folder may serve all sessions, from any thread.

    `soft_tokens`: the mark above which a fold is considered; from 1 on tokens, below 1 a share of `window_tokens`. It
    counts the whole prompt, system messages and tools included. At least `keep_last` messages stay word for word, in
    whole turns (an assistant message and all its results are one), and always the last turn. `summary_tokens` bounds the summary (default: an eighth of
    the mark, 256 to 2,048). `reserve_tokens` is the room to keep for the answer and the next result (default: an
    eighth of the window); a prompt that leaves less is folded whatever it costs. `summary_window_tokens` is the
    summariser's own window, if it is another model. `count` answers a message's tokens. `fallback="extract"` writes the
    summary without a model where the model fails. `redact` runs over each text that goes to the summariser; where it
    changes something, the cached prefix ends.
    """

    def __init__(
        self,
        *,
        notebook: Notebook,
        soft_tokens: float,
        count: Callable[[Message], int],
        window_tokens: int | None = None,
        keep_last: int = KEEP_LAST,
        max_payback_calls: float = MAX_PAYBACK_CALLS,
        low_share: float = LOW_SHARE,
        summary_tokens: int | None = None,
        reserve_tokens: int | None = None,
        summary_window_tokens: int | None = None,
        fallback: Literal["extract"] | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        if fallback not in {None, "extract"}:
            raise ConfigError(f"Folder(fallback={fallback!r}): 'extract' or None is needed")
        self._marks = _marks(
            soft_tokens=soft_tokens,
            window_tokens=window_tokens,
            keep_last=keep_last,
            max_payback_calls=max_payback_calls,
            low_share=low_share,
            summary_tokens=summary_tokens,
            reserve_tokens=reserve_tokens,
        )
        self._notebook = notebook
        self._fallback = fallback
        self._asking = Asking(
            count=count,
            window_tokens=summary_window_tokens or window_tokens,
            summary_tokens=self._marks.summary,
            redact=redact,
        )

    @property
    def soft_tokens(self) -> int:
        """The mark in tokens: prompts up to it are left alone."""
        return self._marks.soft

    def newest(self, digests: Sequence[bytes], start: int = 0) -> Fold | None:
        """The latest recorded fold at one of `digests[start:]`; `digests[i]` is the chain over messages 0 to i.

        O(new) if `start` is how many were looked at before. None: the fold known so far still holds.
        """
        return self._notebook.latest(digests, start)

    def applied(self, fold: Fold | None, messages: Sequence[Message]) -> tuple[Message, ...]:
        """`messages` as the model sees them under `fold` (see `shape.applied`)."""
        return applied(fold, messages)

    def propose(
        self,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        tokens: Sequence[int],
        *,
        tools_tokens: int = 0,
        fold: Fold | None = None,
        breaks_anyway: bool = False,
        fresh_tokens: int = 0,
    ) -> Proposal:
        """Whether to fold now, how far, and why. Pure; records nothing.

        `messages`, `digests` and `tokens` are parallel and unfolded, `fold` is the one that holds. `fresh_tokens` of
        the last messages were never sent, so they must be computed anyway. `breaks_anyway`: the prefix is lost
        already (another model, an expired cache), so a fold costs nothing.
        """
        if not len(messages) == len(digests) == len(tokens):
            raise ConfigError(
                f"propose({len(messages)} messages, {len(digests)} digests, {len(tokens)} tokens): one each is needed"
            )
        return plan(
            self._marks,
            messages,
            digests[-1] if digests else b"",
            tokens,
            tools_tokens=tools_tokens,
            fold=fold,
            summary_tokens=0 if fold is None else self._asking.size(fold.text),
            fresh_tokens=fresh_tokens,
            breaks_anyway=breaks_anyway,
        )

    def flow(self, proposal: Proposal, sent: Sequence[Message], *, record: bool = True) -> Flow:
        """Write the summary that `proposal` asks for. Yields prompts; send in the model's answer or its error.

        `sent` is the last prompt sent: the summary call is that prompt, byte for byte, and one instruction. Where it
        does not fit the summariser's window, or is empty, the folded turns go in chunks. Returns the recorded Fold, or
        None: nothing changed and the next call may try again. With `record=False` the Fold is not recorded yet (a
        summary written while a tool runs): give it to `record` when it takes effect. A BaseException that is no
        Exception passes through.
        """
        if proposal.kind != "fold":
            return None
        known = self._notebook.fold(proposal.digest) if record else None
        if known is not None:
            return known
        written = yield from self._asking.summary(proposal, sent)
        if self._fallback == "extract":
            plain = _extract(proposal)
            written = plain if written is None else written.filled(plain)
        return None if written is None else self._made(proposal, written, record=record)

    def extracted(self, proposal: Proposal, *, record: bool = True) -> Fold | None:
        """`flow` without a model: the extract alone, at once."""
        return self._made(proposal, _extract(proposal), record=record) if proposal.kind == "fold" else None

    def record(self, fold: Fold, digest: bytes) -> Fold:
        """Let `fold` take effect at `digest`, the chain over all messages of the call that uses it first."""
        return self._notebook.put_fold(replace(fold, digest=digest))

    def _made(self, proposal: Proposal, written: Summary, *, record: bool) -> Fold | None:
        text = _previous(proposal).merged(written).bounded(self._marks.summary, self._asking.size).text()
        if not text or self._asking.size(text) >= proposal.replaced_tokens:
            failed("summary_failed", error="the summary is not shorter than what it replaces")
            return None
        made = Fold(digest=proposal.digest, k=proposal.k, text=text, pinned=proposal.pinned)
        count_event("folded")
        return self._notebook.put_fold(made) if record else made


def _previous(proposal: Proposal) -> Summary:
    """The summary so far. One that cannot be read (written by other means) is carried on as facts."""
    if proposal.previous is None:
        return Summary()
    text = proposal.previous.text
    return Summary.parse(text, own=True) or Summary.of({"facts": text.splitlines()})


def _extract(proposal: Proposal) -> Summary:
    found = extract(proposal.folded)
    return found if proposal.request is None else replace(found, goal=extract((proposal.request,)).goal)


def _marks(
    *,
    soft_tokens: float,
    window_tokens: int | None,
    keep_last: int,
    max_payback_calls: float,
    low_share: float,
    summary_tokens: int | None,
    reserve_tokens: int | None,
) -> Marks:
    if not soft_tokens > 0 or (soft_tokens < 1 and window_tokens is None):
        raise ConfigError(
            f"Folder(soft_tokens={soft_tokens}, window_tokens={window_tokens}): tokens from 1 on are needed, or a share of "
            "window_tokens below 1"
        )
    soft = int(soft_tokens) if soft_tokens >= 1 else int(soft_tokens * (window_tokens or 0))
    reserve = reserve_tokens if reserve_tokens is not None else (window_tokens or 0) // _RESERVE_SHARE
    summary = summary_tokens or min(max(soft // _SUMMARY_SHARE, _LEAST_SUMMARY), _MOST_SUMMARY)
    numbers = {"keep_last": keep_last, "max_payback_calls": max_payback_calls, "reserve_tokens": reserve}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not value >= 0]
    if wrong or not 0 < low_share <= 1 or summary < 1 or (window_tokens is not None and window_tokens <= reserve):
        raise ConfigError(
            f"Folder({', '.join(wrong) or f'low_share={low_share}, summary_tokens={summary}, reserve_tokens={reserve}'}): "
            f"numbers >= 0 are needed, low_share in (0, 1], and a reserve smaller than the window ({window_tokens})"
        )
    return Marks(
        soft=soft,
        low=int(soft * low_share),
        window=window_tokens,
        reserve=reserve,
        summary=summary,
        keep_last=keep_last,
        max_payback_calls=max_payback_calls,
    )
