"""A bill as plain JSON values, money as text; the schemas beside this file describe it, and the overview of many."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from agentkv.budget.split import CLASSES

if TYPE_CHECKING:
    from agentkv.budget.bill import Bill

VERSION = "agentkv.bill/2"


def schema(name: str = "bill") -> dict[str, Any]:
    """The JSON schema of a "bill", or of many "bills" at a glance."""
    found: dict[str, Any] = json.loads(files("agentkv.budget").joinpath(f"{name}.schema.json").read_text("utf-8"))
    return found


def bill_to_json(bill: Bill) -> dict[str, Any]:
    """The bill as plain JSON values."""
    usage, stalls = bill.usage, bill.resume_stalls_s
    return {
        "v": VERSION,
        "task": bill.task,
        "task_type": bill.task_type,
        "completed": bill.completed,
        "started_ms": bill.started_ms,
        "finished_ms": bill.finished_ms,
        "model_calls": len(bill.calls),
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "total_tokens": usage.total_tokens,
        "drafted_tokens": sum(call.drafted_tokens for call in bill.calls),
        "accepted_tokens": sum(call.accepted_tokens for call in bill.calls),
        "estimated": bill.estimated,
        "cost_usd": _money(bill.cost_usd),
        "unpriced_calls": bill.unpriced_calls,
        "served_locally": sum(call.served_locally for call in bill.calls),
        "loops": bill.loops,
        "kv_hit_rate": bill.hit_rate,
        "cached_by": dict(bill.cached_by),
        "peak_context_tokens": bill.peak_context_tokens,
        "mean_context_tokens": bill.mean_context_tokens,
        "visible_tokens": bill.visible_tokens,
        "delivered": bill.delivered,
        "effective_token_ratio": bill.effective_token_ratio,
        "effective_utilisation": bill.effective_utilisation,
        "raw_utilisation": bill.raw_utilisation,
        "retrievals": bill.shaping.retrievals,
        "agent_messages": bill.agent_messages,
        "agent_message_tokens": bill.agent_message_tokens,
        "split": _split(bill),
        "work": asdict(bill.work) | {"unused_cost_usd": _money(bill.work.unused_cost_usd)},
        "stall": asdict(bill.stalls),
        "spenders": [
            asdict(one) | {"branches": len(one.branches), "cost_usd": _money(one.cost_usd)} for one in bill.spenders
        ],
        "context": asdict(bill.shaping),
        "calls": [asdict(call) | {"cost_usd": _money(call.cost_usd)} for call in bill.calls],
        "tools": [asdict(tool) for tool in bill.tools],
        "moved": {direction: asdict(moved) for direction, moved in bill.moved.items()},
        "drops": bill.drops,
        "failed_moves": bill.failed_moves,
        "resume_stalls_s": list(stalls),
        "resume_stall_median_s": statistics.median(stalls) if stalls else None,
        "resume_stall_max_s": max(stalls, default=None),
        "time": asdict(bill.spans),
        "diagnosis": bill.diagnosis.to_json(),
    }


def _split(bill: Bill) -> dict[str, Any]:
    shares = bill.split.shares()
    return {
        name: {
            "tokens": part.tokens,
            "cost_usd": None if bill.cost_usd is None else _money(part.cost_usd),
            "share": shares[name],
        }
        for name, part in bill.split.parts.items()
        if name in CLASSES
    }


def _money(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount:f}"
