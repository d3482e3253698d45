"""The chronicle: what a run really did, as a trace file that the simulator can replay and be held against.

Covers turning bills and receipts into lines: one for each model call with the wait that followed it, in the trace
format (docs/traces.md) with two more fields, `call` and `moves`, and a header with the engine's sizes and rates
(docs/validation.md). No prompt text and no arguments: names, counts and times. Reading it back is `agentkv.sim.record`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentkv.budget.bill import Bill
from agentkv.budget.ledger import ModelCall, ToolCallFact
from agentkv.core.residency import Receipt
from agentkv.sim.trace import VERSION, Wait, to_json

_BLOCK_TOKENS = 16
"""Shared prefixes are told in whole blocks of so many tokens."""


class Receipts:
    """Hears of every move of an AgentKV, with the time at which it ended. Thread-safe."""

    def __init__(self, kv: Any) -> None:
        self._lock = threading.Lock()
        self._told: list[tuple[float, Receipt]] = []
        kv.on_receipt(self._hear)

    def _hear(self, receipt: Receipt) -> None:
        with self._lock:
            self._told.append((time.time(), receipt))

    def of(self, session: str) -> list[tuple[float, Receipt]]:
        """(Unix seconds at its end, receipt) for each move of the session, in order."""
        with self._lock:
            return [(at_s, receipt) for at_s, receipt in self._told if receipt.move.session == session]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run leaves: bills by task key, what its moves came to, the engine's counters, and the options it ran with."""

    bills: Mapping[str, Bill]
    receipts: Receipts
    stats: Mapping[str, Any]
    model: str
    policy: Mapping[str, Any]
    """The policy's `name` and its numbers, as `make_policy` takes them."""


def write(path: Path, run: Run) -> None:
    """Write the run to `path`, whole or not at all. Calls that failed or were cancelled are left out, and counted."""
    bills = [bill for bill in run.bills.values() if _ended_well(bill)]
    began_s = min((_submitted_s(_ended_well(bill)[0]) for bill in bills), default=0.0)
    lines = [_header(run)]
    for bill in bills:
        lines += _session_lines(bill, run.receipts, began_s)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _header(run: Run) -> dict[str, Any]:
    kv = run.stats.get("engine", {}).get("kv", {})
    engine = run.stats.get("engine", {})
    calls = [call for bill in run.bills.values() for call in bill.calls]
    first = [well[0].usage.cached_tokens for bill in run.bills.values() if (well := _ended_well(bill))]
    return {
        "v": VERSION,
        "source": "agentkv demo",
        "recorded": {
            "model": run.model,
            "policy": dict(run.policy),
            "block_tokens": _BLOCK_TOKENS,
            "block_bytes": kv.get("block_bytes", 0),
            "device_blocks": kv.get("device", {}).get("blocks", 0),
            "host_blocks": (kv.get("host") or {}).get("blocks", 0),
            "disk_blocks": (kv.get("disk") or {}).get("blocks", 0),
            "shared_tokens": max(first, default=0) // _BLOCK_TOKENS * _BLOCK_TOKENS,
            "rates_bytes_s": dict(kv.get("rates_bytes_s", {})),
            "bytes": dict(kv.get("bytes", {})),
            "prefill": dict(engine.get("prefill", {})),
            "steps": engine.get("steps", 0),
            "preemptions": engine.get("preemptions", 0),
            "left_out_calls": sum(call.status != "ok" for call in calls),
        },
    }


def _session_lines(bill: Bill, receipts: Receipts, began_s: float) -> list[dict[str, Any]]:
    calls = _ended_well(bill)
    first_s = _submitted_s(calls[0])
    told = receipts.of(calls[0].session)
    lines = []
    for step, call in enumerate(calls):
        after = calls[step + 1] if step + 1 < len(calls) else None
        ended_s = _submitted_s(call) + call.timing.total_s
        until_s = float("inf") if after is None else _submitted_s(after)
        tool = _tool_within(bill.tools, _submitted_s(call), until_s)
        wait = Wait(
            session=call.session,
            step=step,
            kind="tool",
            tool="" if tool is None else tool.tool,
            command="" if tool is None else tool.command,
            start_s=round(ended_s - first_s, 6),
            duration_s=0.0 if after is None else round(max(0.0, until_s - ended_s), 6),
            prompt_tokens=call.usage.input_tokens,
            output_tokens=call.usage.output_tokens,
            next_prompt_tokens=0 if after is None else after.usage.input_tokens,
            reuse_tokens=0 if after is None else _reused(call, after),
            llm_s=round(call.timing.total_s, 6),
            censored=tool is not None and tool.status == "cancelled",
        )
        begun_s = began_s if step == 0 else ended_s
        moves = [_move(at_s - began_s, one) for at_s, one in told if begun_s <= at_s < until_s]
        lines.append(
            to_json(wait, arrival_s=round(first_s - began_s, 6) if step == 0 else None)
            | {"call": _call(call, began_s), "tool_s": None if tool is None else round(tool.actual_s, 6)}
            | ({"tool_at_s": round(tool.at_ms / 1000 - tool.actual_s - began_s, 6)} if tool is not None else {})
            | ({"moves": moves} if moves else {})
        )
    return lines


def _call(call: ModelCall, began_s: float) -> dict[str, Any]:
    """The call's own times; `submitted_s` counts from the first call of the run."""
    times = {name: round(value, 6) for name, value in asdict(call.timing).items()}
    return {"submitted_s": round(_submitted_s(call) - began_s, 6), "cached_tokens": call.usage.cached_tokens, **times}


def _move(at_s: float, receipt: Receipt) -> dict[str, Any]:
    move = receipt.move
    return {
        "at_s": round(at_s, 6),
        "action": move.action.value,
        "to": None if move.to is None else move.to.name.lower(),
        "outcome": receipt.outcome.value,
        "blocks": receipt.blocks,
        "bytes": receipt.size_bytes,
        "seconds": round(max(0.0, receipt.finished_s - receipt.submitted_s), 6),
    }


def _reused(call: ModelCall, after: ModelCall) -> int:
    """What of this prompt the next one begins with. The demo's history is append-only, so all of it, unless the next
    prompt is shorter.
    """
    return min(call.usage.input_tokens, after.usage.input_tokens)


def _tool_within(tools: Sequence[ToolCallFact], from_s: float, until_s: float) -> ToolCallFact | None:
    """The tool call that ended last after `from_s`, when the call before it was submitted, up to `until_s`.

    Times in facts are whole milliseconds.
    """
    inside = (tool for tool in tools if from_s < tool.at_ms / 1000 <= until_s + 0.002)
    return max(inside, key=lambda tool: tool.at_ms, default=None)


def _ended_well(bill: Bill) -> list[ModelCall]:
    return [call for call in bill.calls if call.status == "ok"]


def _submitted_s(call: ModelCall) -> float:
    return call.at_ms / 1000
