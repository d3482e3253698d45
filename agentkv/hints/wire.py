"""The neutral hint on the wire: JSON that any engine, plug-in or proxy can read, and vLLM's envelope form of it.

Covers making it of a Hint, reading it back, and what is never in it: prompt text, arguments, command words, and names
that are no plain identifiers (they travel as a digest). Does not cover delivery (`runtime/reach.py`) nor what an engine
makes of it (`adapters/`). Reading never raises: unknown fields are ignored; unknown kinds, newer versions and what
cannot be read are skipped and counted. The schema is in docs/hints.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from agentkv import log
from agentkv.core.forecast import Forecast, Source
from agentkv.core.hint import Hint, HintKind

VERSION = "agentkv.hint/1"
ACTION = ("agentkv.tool_wait", "1.0")
ENVELOPE_VERSION = "0.1"
LONGEST_NAME = 128
MOST_BYTES = 16_384
"""A longer text is no hint."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@/-]{0,127}")
_MOST = 2**53
_SOURCES = ("history", "declared", "prior")
_STRENGTHS = ("retain", "demote", "drop")
_TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCall:
    """The tool call: which one, of which tool, and how many run beside it."""

    id: str
    tool: str
    attempt: int = 1
    n_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WireWait:
    """How long it will still take, counted from the hint's `ts_ms`; `n` calls stand behind it."""

    p10_ms: int
    p50_ms: int
    p90_ms: int
    n: int = 0
    source: Source = "prior"

    @classmethod
    def of(cls, forecast: Forecast) -> Self:
        """The three quantiles of a forecast that counts from now."""
        p10, p50, p90 = (round(1000 * forecast.quantile_s(level)) for level in (0.1, 0.5, 0.9))
        return cls(p10_ms=p10, p50_ms=max(p10, p50), p90_ms=max(p10, p50, p90), n=forecast.n, source=forecast.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireNext:
    """The next model call: -100..100, higher is more important, and its expected output tokens."""

    priority: int = 0
    osl: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireContext:
    """The context that waits."""

    model: str = ""
    tokens: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireKeep:
    """Where the context should be meanwhile."""

    tier: Literal["device", "host", "disk"] = "host"
    ttl_ms: int = 0
    strength: Literal["retain", "demote", "drop"] = "retain"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireHint:
    """A hint as it travels; parts of which nothing is known are None and are left out."""

    id: str
    kind: HintKind
    ts_ms: int
    session: str
    parent: str = ""
    final: bool = False
    turn: int | None = None
    call: WireCall | None = None
    wait: WireWait | None = None
    next: WireNext | None = None
    ctx: WireContext | None = None
    keep: WireKeep | None = None

    @classmethod
    def of(cls, hint: Hint, **known: Any) -> Self:
        """The wire form of `hint`, with what it knows about its session; `known` are parts that count instead, or more (keep).

        A hint without a session is its task's. A wait is told from now on: what has passed is taken off.
        """
        call = wait = None
        if hint.call is not None:
            call = WireCall(
                id=safe(hint.call.call_id), tool=safe(hint.call.tool), attempt=max(1, hint.call.attempt),
                n_parallel=max(1, hint.call.n_parallel),
            )  # fmt: skip
            if hint.wait is not None:
                wait = WireWait.of(hint.wait.after(hint.call.elapsed_s))
        elif hint.wait is not None:
            wait = WireWait.of(hint.wait)
        made = cls(
            id=safe(hint.id), kind=hint.kind, ts_ms=max(0, hint.ts_ms), session=safe(hint.session or hint.task),
            final=hint.final, call=call, wait=wait, **_about(hint),
        )  # fmt: skip
        return replace(made, **known) if known else made

    def to_json(self) -> dict[str, Any]:
        """A JSON object; names are made safe here, whoever gave them."""
        body: dict[str, Any] = {
            "v": VERSION, "id": safe(self.id), "kind": str(self.kind), "ts_ms": self.ts_ms,
            "session": safe(self.session), "final": self.final,
        }  # fmt: skip
        if self.parent:
            body["parent"] = safe(self.parent)
        if self.turn is not None:
            body["turn"] = self.turn
        if self.call is not None:
            call = self.call
            body["call"] = {
                "id": safe(call.id), "tool": safe(call.tool), "attempt": call.attempt, "n_parallel": call.n_parallel,
            }  # fmt: skip
        if self.wait is not None:
            wait = self.wait
            body["wait"] = {
                "p10_ms": wait.p10_ms, "p50_ms": wait.p50_ms, "p90_ms": wait.p90_ms, "n": wait.n, "source": wait.source,
            }  # fmt: skip
        if self.next is not None:
            osl = {} if self.next.osl is None else {"osl": self.next.osl}
            body["next"] = {"priority": max(-100, min(100, self.next.priority)), **osl}
        if self.ctx is not None:
            ctx: dict[str, Any] = {"tokens": self.ctx.tokens}
            if self.ctx.model:
                ctx["model"] = safe(self.ctx.model, _MODEL)
            if self.ctx.salt:
                ctx["salt"] = safe(self.ctx.salt)
            body["ctx"] = ctx
        if self.keep is not None:
            body["keep"] = {"tier": self.keep.tier, "ttl_ms": self.keep.ttl_ms, "strength": self.keep.strength}
        return body

    def to_line(self) -> str:
        """One line of ASCII JSON without a line end."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def to_envelope(self) -> dict[str, Any]:
        """The `kv_hints` envelope with one action; never send it to an engine whose tier insists on `kv.fetch`."""
        name = safe(self.id)
        action = {
            "action_id": name, "action_type": ACTION[0], "action_version": ACTION[1], "payload": self.to_json(),
        }  # fmt: skip
        return {"protocol_version": ENVELOPE_VERSION, "message_id": name, "actions": [action]}


def _about(hint: Hint) -> dict[str, Any]:
    """The parts that the hint's session gives."""
    about = hint.about
    if about is None:
        return {}
    parts: dict[str, Any] = {"parent": safe(about.parent), "next": WireNext(priority=about.priority, osl=about.osl)}
    if about.turn:
        parts["turn"] = about.turn
    if about.model or about.tokens or about.salt:
        parts["ctx"] = WireContext(model=safe(about.model, _MODEL), tokens=about.tokens, salt=safe(about.salt))
    return parts


def read(body: Any) -> WireHint | None:
    """The hint that a JSON object, or a text of one, holds; None for what is skipped, which is counted."""
    try:
        return _read(body)
    except _Unknown as unknown:
        log.count(unknown.counter)
    except (ValueError, TypeError, LookupError, RecursionError):
        log.count("wire_hint_unreadable")
    return None


def read_envelope(body: Any) -> list[WireHint]:
    """Our hints of a `kv_hints` envelope; foreign actions are left to others, of newer versions of ours counted."""
    hints: list[WireHint] = []
    actions = body.get("actions") if isinstance(body, Mapping) else None
    if not isinstance(actions, list | tuple):
        log.count("wire_envelope_unreadable")
        return hints
    for action in actions:
        if not isinstance(action, Mapping) or action.get("action_type") != ACTION[0]:
            continue
        if str(action.get("action_version")).partition(".")[0] != ACTION[1].partition(".")[0]:
            log.count("wire_hint_newer")
            continue
        hint = read(action.get("payload"))
        if hint is not None:
            hints.append(hint)
    return hints


def safe(name: Any, allowed: re.Pattern[str] = _PLAIN) -> str:
    """`name` where it is a plain identifier, else a digest of it: fit for headers, file names and logs alike."""
    text = name if isinstance(name, str) else repr(name)
    if allowed.fullmatch(text) or not text:
        return text
    import xxhash

    return f"x-{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogatepass'))}"


class _Unknown(Exception):
    def __init__(self, counter: str) -> None:
        super().__init__(counter)
        self.counter = counter


def _read(body: Any) -> WireHint:
    if isinstance(body, str | bytes):
        if len(body) > MOST_BYTES:
            raise ValueError("too long for a hint")
        body = json.loads(body)
    if not isinstance(body, Mapping):
        raise TypeError("not an object")
    version = body["v"]
    if version != VERSION:
        name, _, number = str(version).partition("/")
        newer = name == VERSION.partition("/")[0] and number.isascii() and number.isdigit() and int(number[:9]) > 1
        raise _Unknown("wire_hint_newer" if newer else "wire_hint_unreadable")
    kind = body["kind"]
    if kind not in {str(known) for known in HintKind}:
        raise _Unknown("wire_hint_unknown_kind" if isinstance(kind, str) else "wire_hint_unreadable")
    return WireHint(
        id=_name(body, "id"), kind=HintKind(kind), ts_ms=_int(body, "ts_ms"), session=_name(body, "session"),
        parent=_name(body, "parent", ""), final=body.get("final") is True,
        turn=None if body.get("turn") is None else _int(body, "turn"),
        call=_part(body, "call", _call), wait=_part(body, "wait", _wait), next=_part(body, "next", _next),
        ctx=_part(body, "ctx", _ctx), keep=_part(body, "keep", _keep),
    )  # fmt: skip


def _part(body: Mapping[str, Any], name: str, make: Any) -> Any:
    """An optional part; one that cannot be read is left out and counted, the rest of the hint still holds."""
    part = body.get(name)
    if part is None:
        return None
    try:
        if isinstance(part, Mapping):
            return make(part)
    except (ValueError, TypeError, LookupError):
        pass
    log.count("wire_part_unreadable")
    return None


def _call(part: Mapping[str, Any]) -> WireCall:
    attempt, parallel = _int(part, "attempt", 1), _int(part, "n_parallel", 1)
    return WireCall(
        id=_name(part, "id"), tool=_name(part, "tool"), attempt=max(1, attempt), n_parallel=max(1, parallel)
    )


def _wait(part: Mapping[str, Any]) -> WireWait:
    p10, p50, p90 = (_int(part, name) for name in ("p10_ms", "p50_ms", "p90_ms"))
    if not p10 <= p50 <= p90:
        raise ValueError("quantiles must rise")
    source = part.get("source", "prior")
    if source not in _SOURCES:
        source = "prior"
    return WireWait(p10_ms=p10, p50_ms=p50, p90_ms=p90, n=_int(part, "n", 0), source=cast("Source", source))


def _next(part: Mapping[str, Any]) -> WireNext:
    priority = max(-100, min(100, _int(part, "priority", 0, low=-_MOST)))
    return WireNext(priority=priority, osl=None if part.get("osl") is None else _int(part, "osl"))


def _ctx(part: Mapping[str, Any]) -> WireContext:
    model = safe(part.get("model") or "", _MODEL)
    return WireContext(model=model, tokens=_int(part, "tokens", 0), salt=_name(part, "salt", ""))


def _keep(part: Mapping[str, Any]) -> WireKeep:
    tier, strength = part["tier"], part["strength"]
    if tier not in _TIERS or strength not in _STRENGTHS:
        raise ValueError("unknown tier or strength")
    return WireKeep(tier=tier, ttl_ms=_int(part, "ttl_ms", 0), strength=strength)


def _name(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body[name] if default is None else body.get(name, default)
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return safe(value)


def _int(body: Mapping[str, Any], name: str, default: int | None = None, *, low: int = 0) -> int:
    value = body[name] if default is None else body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{name} is no number")
    if not low <= value <= _MOST:
        raise ValueError(f"{name} is out of range")
    return int(value)
