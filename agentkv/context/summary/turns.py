"""Turns: what may not be parted. An assistant message and all results of its calls are one group."""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.core.message import Message

SUMMARY_MARK = "[Summary of earlier turns]\n"
"""How a summary begins, in a message of its own or behind the first request."""


def is_summary(message: Message) -> bool:
    """True for a message that is, or ends in, a summary of ours."""
    if message.role not in {"user", "assistant"}:
        return False
    return message.content.startswith(SUMMARY_MARK) or f"\n\n{SUMMARY_MARK}" in message.content


def groups(messages: Sequence[Message]) -> list[list[Message]]:
    """`messages` cut wherever no tool call is open: each assistant turn with all its results is one group.

    Calls that are never answered do not keep a group open.
    """
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    result: list[list[Message]] = []
    waiting: set[str] = set()
    for message in messages:
        if result and (waiting or message.role == "tool"):
            result[-1].append(message)
        else:
            result.append([message])
        if message.role == "tool" and message.tool_call_id is not None:
            waiting.discard(message.tool_call_id)
        waiting |= {call.id for call in message.tool_calls} & answered
    return result
