"""Archive: the engine's side of the disk tier: opening it, and a session as plain JSON values for the process that
resumes it tomorrow.

Covers the engine's own memory of a session: transcript, what the model really wrote, branches. Its blocks are `kv/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentkv.core.message import ToolCall
from agentkv.engine.local.chat import Written
from agentkv.engine.local.sessions import Session, Sessions
from agentkv.engine.local.transcript import Transcript
from agentkv.errors import DiskUnavailable
from agentkv.kv.slab import Slab
from agentkv.kv.tiers import Tiers
from agentkv.log import failed, warn_once


def disk_tier(disk: Path | None, disk_memory: int, block_bytes: int, store: str | None) -> tuple[Slab | None, str]:
    """The disk tier and "", or None and why it is off: without it the engine works, only less well."""
    if disk is None:
        return None, "no folder was given"
    try:
        return Slab(disk, disk_memory, block_bytes, store=store), ""
    except DiskUnavailable as error:
        warn_once("disk_tier_off", reason=str(error))
        return None, str(error)


def revive(tiers: Tiers, sessions: Sessions, model: str) -> None:
    """Take over the sessions that an earlier process left on disk, and have those of this one described."""
    for one in tiers.revived:
        session = session_of(one.session, one.task, one.memo)
        if session is None:
            tiers.drop(one.session)
        else:
            sessions.revive(session)

    def describe(key: str) -> dict[str, Any] | None:
        known = sessions.get(key)
        return None if known is None else memo_of(known, model)

    tiers.describe(describe)


def memo_of(session: Session, model: str) -> dict[str, Any]:
    """What `session_of` needs to make the session again."""
    transcript = session.transcript
    return {
        "model": model,
        "text": transcript.text,
        "ids": transcript.ids,
        "borders": transcript.borders,
        "prompt_chars": transcript.prompt_chars,
        "computed_tokens": session.computed_tokens,
        "template_tokens": session.template_tokens,
        "branches": list(session.branches.copy()),
        "raw_by_call": {
            call_id: {
                "raw": written.raw,
                "content": written.content,
                "reasoning": written.reasoning,
                "calls": [[call.id, call.name, call.arguments] for call in written.calls],
            }
            for call_id, written in session.raw_by_call.copy().items()
        },
    }


def session_of(key: str, task: str, memo: Mapping[str, Any]) -> Session | None:
    """The session of a memo; None, and a log line, for one that makes no sense."""
    try:
        transcript = Transcript(
            text=str(memo["text"]),
            ids=[int(id_) for id_ in memo["ids"]],
            borders=[(int(chars), int(tokens)) for chars, tokens in memo["borders"]],
            prompt_chars=int(memo["prompt_chars"]),
        )
        raw_by_call = {
            str(call_id): Written(
                raw=str(one["raw"]),
                content=str(one["content"]),
                reasoning=str(one.get("reasoning", "")),
                calls=tuple(ToolCall(id=id_, name=name, arguments=text) for id_, name, text in one["calls"]),
            )
            for call_id, one in dict(memo["raw_by_call"]).items()
        }
        return Session(
            key=key,
            task=task,
            transcript=transcript,
            branches=dict.fromkeys(map(str, memo["branches"])),
            raw_by_call=raw_by_call,
            computed_tokens=min(int(memo["computed_tokens"]), len(transcript.ids)),
            template_tokens=int(memo["template_tokens"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        failed("session_not_revived", session=key, error=repr(error))
        return None
