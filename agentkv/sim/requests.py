"""Mooncake's request traces: arrivals in milliseconds, lengths in tokens, and one id for each block of the prompt.

Rows without a `session_id` are joined into sessions by their block ids: a request whose blocks begin with all full
blocks of an earlier one continues that one (the first that does; a later one begins a session of its own). A wait is
from one arrival to the next, so the model's own time, which the format does not tell, is inside.
"""

from __future__ import annotations

from typing import Any

from agentkv.sim import fields
from agentkv.sim.fields import Unusable
from agentkv.sim.grouping import Call

_BLOCK_TOKENS = (512, 16, 32, 64, 128, 256, 1024, 2048, 4096)
"""Mooncake's own size first, then those that other producers of the format use."""

_FEWEST_BLOCKS = 2
"""An earlier request shorter than this is a shared beginning (a system prompt), not a session to continue."""


class Requests:
    """Remembers the end of each session that could still go on: one block id, and so as much memory as there are sessions."""

    def __init__(self) -> None:
        self._ends: dict[int | str, str] = {}
        self._sessions = 0

    def parse(self, record: dict[str, Any], line: int) -> Call:
        """One request. Raises Unusable."""
        prompt = int(fields.required(fields.tokens(record, "input_length", "input_tokens"), "input_length"))
        output = fields.tokens(record, "output_length", "output_tokens") or 0
        at_s = fields.start(record, "timestamp", "created_time")
        delay_s = fields.seconds(record, "delay", "delay_ms", unit_s=1e-3)
        if at_s is None and delay_s is None:
            raise Unusable("timestamp is missing")
        ids = _ids(record.get("hash_ids"))
        named = record.get("session_id") is not None
        session, prefix = (fields.session_name(record, "session_id"), None) if named else self._continued(ids, prompt)
        start_s = None if at_s is None else at_s / 1000
        return Call(
            line=line,
            session=session,
            kind="human",
            start=start_s,
            begin=start_s,
            absolute=True,
            delay_s=delay_s,
            duration_s=None,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_tokens=prefix,
        )

    def _continued(self, ids: list[int | str], prompt: int) -> tuple[str, int | None]:
        """The session that a request belongs to, and how many tokens of it were there before (None: it is new)."""
        block_tokens = _block_tokens(prompt, len(ids))
        session, prefix = "", None
        for index in range(len(ids) - 1, -1, -1):
            if ids[index] in self._ends:
                session = self._ends.pop(ids[index])
                prefix = min(prompt, (index + 1) * block_tokens)
                break
        if not session:
            session = f"r{self._sessions:06d}"
            self._sessions += 1
        full = min(len(ids), prompt // block_tokens)
        if full >= _FEWEST_BLOCKS:
            self._ends[ids[full - 1]] = session
        return session, prefix


def _ids(told: object) -> list[int | str]:
    if told is None:
        return []
    if not isinstance(told, list) or not all(isinstance(each, int | str) for each in told):
        raise Unusable("hash_ids is not a list of ids")
    return told


def _block_tokens(prompt: int, blocks: int) -> int:
    for size in _BLOCK_TOKENS:
        if blocks and -(-prompt // size) == blocks:
            return size
    return _BLOCK_TOKENS[0]
