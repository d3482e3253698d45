"""A task with retries, a sub-agent, tools and a response cache; money and tokens that are easy to add up by hand."""

from decimal import Decimal

import pytest

from agentkv.budget.facts import (
    AgentMessageFact,
    ContextFact,
    DeliveryFact,
    ModelCall,
    MoveFact,
    OutcomeFact,
    TaskFact,
    ToolCallFact,
)
from agentkv.core.usage import Timing, Usage

AT_MS = 1_780_000_000_000


def call(task="t", fresh=10, cached=0, output=5, cost="0.10", **more):
    usage = Usage(
        input_tokens=fresh + cached, cached_tokens=cached, output_tokens=output, reasoning_tokens=output // 2, calls=1
    )
    timing = Timing(ttft_s=0.25, restore_s=0.125, decode_s=1.0, total_s=1.5)
    money = None if cost is None else Decimal(cost)
    return ModelCall(task=task, at_ms=AT_MS, usage=usage, timing=timing, model="m", cost_usd=money, **more)


@pytest.fixture
def facts():
    return [
        TaskFact(task="t", at_ms=AT_MS),
        call(node="plan"),
        call(node="act", status="failed", error="APITimeoutError", cost=None),
        call(node="act", attempt=2, cached=90, cost="0.0000001"),
        call(node="search", branch="sub:1", fresh=40),
        call(node="act", served_locally=True, cost=None),
        ToolCallFact(task="t", tool="pytest", command="pytest", at_ms=AT_MS + 9000, actual_s=4.0, predicted_p50_s=3.0),
        ToolCallFact(task="t", tool="pytest", at_ms=AT_MS + 9000, actual_s=1.0, status="failed"),
        MoveFact(task="t", action="demote", to="host", size_bytes=1000, blocks=1, outcome="done"),
        ContextFact(task="t", event="break", cause="clock", before_tokens=5),
        AgentMessageFact(task="t", sender="a", receiver="b", tokens=7),
        DeliveryFact(task="t", tokens=5),
        OutcomeFact(task="t", task_type="fix", completed=True),
        TaskFact(task="t", at_ms=AT_MS + 20_000, event="finished", final=True),
    ]
