"""Tool events as NVIDIA Dynamo's request trace takes them: three ZMQ frames, the last a msgpack map.

Covers making a record of a hint, its bytes, and sending it to the frontend's PULL socket. Does not cover when
(`dynamo.py`). Checked with Dynamo 1.6.1: the first frame must be its topic, unknown fields are ignored, nothing answers.
Dynamo only records tool events; no part of it acts on them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from agentkv.adapters.base import Unreachable
from agentkv.core.hint import Hint, HintKind, ToolStatus
from agentkv.hints.wire import safe

SCHEMA = "dynamo.request.trace.v1"
TOPIC = "agent-tool-events"
"""What a frontend listens to unless its DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_TOPIC says otherwise; others are dropped."""
_EVENTS = {HintKind.TOOL_START: "tool_start", HintKind.TOOL_END: "tool_end", HintKind.TOOL_ERROR: "tool_error"}
_STATUS = {
    ToolStatus.RUNNING: "running",
    ToolStatus.SUCCEEDED: "succeeded",
    ToolStatus.FAILED: "error",
    ToolStatus.CANCELLED: "cancelled",
    ToolStatus.PAUSED: "cancelled",
}
_MOST_QUEUED = 1000
_SHORT_INT = 0x7F


class ZmqMissing(Exception):
    """The package pyzmq is not installed."""


def record_of(hint: Hint) -> dict[str, Any] | None:
    """The record of a tool that starts or ends; None for a hint that has none. An end says when it began, too."""
    event, call = _EVENTS.get(hint.kind), hint.call
    if event is None or call is None:
        return None
    session = safe(hint.session or hint.task)
    ts_ms = max(0, hint.ts_ms)
    tool: dict[str, Any] = {"tool_call_id": safe(call.call_id), "tool_class": safe(call.tool)}
    elapsed_ms = max(0.0, 1000 * call.elapsed_s)
    tool["started_at_unix_ms"] = max(0, ts_ms - round(elapsed_ms))
    if hint.kind is HintKind.TOOL_START:
        tool["status"] = "running"
    else:
        fallback = "succeeded" if hint.kind is HintKind.TOOL_END else "error"
        status = _STATUS.get(call.status, fallback)
        tool["status"] = fallback if status == "running" else status
        tool["ended_at_unix_ms"] = ts_ms
        tool["duration_ms"] = elapsed_ms
    record = {
        "schema": SCHEMA, "event_type": event, "event_time_unix_ms": ts_ms, "session_id": session, "tool": tool,
    }  # fmt: skip
    if hint.about is not None and hint.about.parent:
        record["parent_session_id"] = safe(hint.about.parent)
    return record


def packed(value: Any) -> bytes:
    """The msgpack bytes of what a record holds: maps, text, whole and floating numbers, None. TypeError for anything else."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int) and 0 <= value < 1 << 64:
        return bytes([value]) if value <= _SHORT_INT else b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return _head(len(text), 0xA0, 32, b"\xda") + text
    if isinstance(value, Mapping):
        return _head(len(value), 0x80, 16, b"\xde") + b"".join(
            packed(name) + packed(part) for name, part in value.items()
        )
    raise TypeError(f"{type(value).__name__} is no part of a record")


def _head(length: int, short: int, most: int, long: bytes) -> bytes:
    return bytes([short | length]) if length < most else long + struct.pack(">H", length)


class ToolEvents:
    """A PUSH socket to `address` ("tcp://host:port"), opened with the first event. Used by one thread at a time."""

    def __init__(self, address: str, *, topic: str = TOPIC) -> None:
        self._address = address
        self._topic = topic.encode()
        self._context: Any = None
        self._socket: Any = None
        self._sent = 0

    def send(self, record: Mapping[str, Any], within_s: float) -> None:
        """Hand a record over. ZmqMissing without pyzmq, Unreachable if nobody takes it in time."""
        try:
            import zmq
        except ImportError:
            raise ZmqMissing("pip install 'agentkv-sdk[dynamo]' (pyzmq)") from None
        frames = [self._topic, struct.pack(">Q", self._sent), packed(record)]
        try:
            socket = self._opened(zmq)
            socket.setsockopt(zmq.SNDTIMEO, max(1, round(1000 * within_s)))
            socket.send_multipart(frames)
        except zmq.Again:
            raise Unreachable(f"{self._address}: nobody takes tool events") from None
        except (zmq.ZMQError, OverflowError, ValueError) as error:
            raise Unreachable(f"{self._address}: {type(error).__name__}") from None
        self._sent += 1

    def close(self) -> None:
        """Let go of the socket; what was handed over and is not sent yet has a moment. Idempotent."""
        socket, context = self._socket, self._context
        self._socket = self._context = None
        if socket is not None:
            socket.close(linger=200)
        if context is not None:
            context.term()

    def _opened(self, zmq: Any) -> Any:
        if self._socket is None:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a frontend that is not there
            self._socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
            self._socket.connect(self._address)
        return self._socket
