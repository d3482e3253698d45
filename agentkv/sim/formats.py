"""Formats: what one record of each kind of trace file says, as a Call; which format a file is in.

Covers our own format, the project's two files of facts, TraceLab's rounds and Mooncake's requests (docs/traces.md).
Reading lines is `lines.py`; order, clocks, duplicates and parallel calls are `grouping.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentkv.errors import ConfigError
from agentkv.sim import fields
from agentkv.sim.fields import Unusable
from agentkv.sim.grouping import Call
from agentkv.sim.requests import Requests
from agentkv.sim.trace import KINDS, VERSION, Kind

Parse = Callable[[dict[str, Any], int], Call]
"""(record, line number) -> what it says; raises Unusable with the reason."""


def parser(name: str) -> Parse:
    """A parser of the format `name`; raises ConfigError where there is no such format."""
    if name not in FORMATS:
        raise ConfigError(f"format={name!r} is unknown; choose one of {['auto', *FORMATS]}")
    return FORMATS[name]()


def detect(record: dict[str, Any]) -> str:
    """The name of the format that `record` is in; raises Unusable where it is none of ours."""
    if "duration_s" in record and "session" in record:
        return "agentkv"
    if "dur" in record and "prompt_tok" in record:
        return "weka"
    if "dur" in record and "arg" in record:
        return "local_tools"
    if "input_tokens_total" in record and "session_id" in record:
        return "tracelab"
    if ("input_length" in record or "input_tokens" in record) and ("hash_ids" in record or "timestamp" in record):
        return "mooncake"
    raise Unusable("no known format")


def header(record: dict[str, Any], where: str) -> str | None:
    """The source named in our own format's first line; None where `record` is no such line.

    Raises ConfigError on another version than ours.
    """
    version = record.get("v")
    if not isinstance(version, str) or not version.startswith("agentkv.trace/"):
        return None
    if version != VERSION:
        raise ConfigError(f"{where}: version {version!r}, this program reads {VERSION!r}")
    return None if "session" in record else str(record.get("source", ""))


def from_agentkv(record: dict[str, Any], line: int) -> Call:
    """A line of our own format."""
    return Call(
        line=line,
        session=fields.session_name(record, "session"),
        step=fields.tokens(record, "step"),
        kind=_kind(record, "kind"),
        tool=fields.word(record, "tool"),
        command=fields.word(record, "command"),
        start=fields.start(record, "start_s"),
        duration_s=fields.required(fields.seconds(record, "duration_s"), "duration_s"),
        prompt_tokens=fields.tokens(record, "prompt_tokens") or 0,
        output_tokens=fields.tokens(record, "output_tokens") or 0,
        next_prompt_tokens=fields.tokens(record, "next_prompt_tokens"),
        reuse_tokens=fields.tokens(record, "reuse_tokens"),
        llm_s=fields.seconds(record, "llm_s") or 0.0,
        censored=fields.flag(record, "censored"),
        timeout_s=fields.seconds(record, "timeout_s"),
        parallel=max(1, fields.tokens(record, "parallel") or 1),
        arg_bytes=fields.tokens(record, "arg_bytes") or 0,
        arrival_s=fields.start(record, "arrival_s"),
    )


def from_weka(record: dict[str, Any], line: int) -> Call:
    """A line of weka_claude_code.jsonl: a wait with its kind, no tool name; seconds since the session's start."""
    return Call(
        line=line,
        session=fields.session_name(record, "session"),
        step=fields.tokens(record, "step"),
        kind=_kind(record, "tool"),
        start=fields.start(record, "start"),
        duration_s=fields.required(fields.seconds(record, "dur"), "dur"),
        prompt_tokens=int(fields.required(fields.tokens(record, "prompt_tok"), "prompt_tok")),
        output_tokens=fields.tokens(record, "out_tok") or 0,
        next_prompt_tokens=fields.tokens(record, "next_prompt_tok"),
        reuse_tokens=fields.tokens(record, "reuse_tok"),
        llm_s=fields.seconds(record, "llm_s") or 0.0,
    )


def from_local_tools(record: dict[str, Any], line: int) -> Call:
    """A line of local_tools.jsonl: a measured tool call with its command; no tokens."""
    return Call(
        line=line,
        session=fields.session_name(record, "session"),
        step=fields.tokens(record, "step"),
        tool=fields.word(record, "tool"),
        command=fields.word(record, "arg"),
        start=fields.start(record, "start"),
        duration_s=fields.required(fields.seconds(record, "dur"), "dur"),
        next_prompt_tokens=0,
        reuse_tokens=0,
        censored=fields.flag(record, "censored"),
        timeout_s=fields.seconds(record, "timeout_s"),
        parallel=max(1, fields.tokens(record, "n_par") or 1),
        arg_bytes=fields.tokens(record, "arg_bytes") or 0,
    )


def from_tracelab(record: dict[str, Any], line: int) -> Call:
    """A round of TraceLab: a model call with its tool calls; without any, the session waits for a person.

    Wall latency of each tool (result seen minus call emitted) is its duration; a tool without one is left out.
    """
    session = fields.session_name(record, "session_id")
    prompt = int(fields.required(fields.tokens(record, "input_tokens_total"), "input_tokens_total"))
    input_at, output_at, by_person = _events(record.get("timing_events"))
    calls = []
    told = record.get("tools") or []
    for tool in told if isinstance(told, list) else []:
        if not isinstance(tool, dict) or (wall_s := fields.seconds(tool, "tool_wall_latency_ms", unit_s=1e-3)) is None:
            continue
        calls.append(
            Call(
                line=line,
                session=session,
                tool=fields.word(tool, "tool_name"),
                start=fields.wall_s(tool.get("emitted_at")),
                duration_s=wall_s,
                arg_bytes=fields.tokens(tool, "input_chars") or 0,
            )
        )
    ready = [call.start for call in calls if call.start is not None]
    return Call(
        line=line,
        session=session,
        step=fields.tokens(record, "round_index"),
        kind="tool" if calls else "human",
        start=min(ready) if ready else output_at,
        begin=input_at,
        absolute=True,
        duration_s=max((call.duration_s or 0.0) + (call.start or 0.0) - min(ready, default=0.0) for call in calls)
        if calls
        else None,
        prompt_tokens=prompt,
        output_tokens=fields.tokens(record, "output_tokens") or 0,
        prefix_tokens=fields.tokens(record, "prefix_tokens"),
        llm_s=max(0.0, output_at - input_at) if input_at is not None and output_at is not None else 0.0,
        by_person=by_person,
        parts=calls,
    )


def _events(told: object) -> tuple[float | None, float | None, bool]:
    """When a round's last input came, when its last output was there, and whether a person wrote some of the input."""
    inputs: list[float] = []
    outputs: list[float] = []
    by_person = False
    for event in told if isinstance(told, list) else []:
        at = fields.wall_s(event.get("timestamp")) if isinstance(event, dict) else None
        if at is None:
            continue
        if event.get("event_type") in ("user_message", "tool_result"):
            by_person |= event["event_type"] == "user_message" and not outputs
            inputs += [at] if not outputs else []
        elif event.get("event_type") in ("reasoning", "text", "tool_call"):
            outputs.append(at)
    return (max(inputs) if inputs else None, max(outputs) if outputs else None, by_person)


def _kind(record: dict[str, Any], name: str) -> Kind:
    value = record.get(name, "tool")
    for kind in KINDS:
        if value == kind:
            return kind
    raise Unusable("unknown kind of wait")


FORMATS: dict[str, Callable[[], Parse]] = {
    "agentkv": lambda: from_agentkv,
    "weka": lambda: from_weka,
    "local_tools": lambda: from_local_tools,
    "tracelab": lambda: from_tracelab,
    "mooncake": lambda: Requests().parse,
}
