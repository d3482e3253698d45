"""The planner: sums by hand, walls, capacity, and traces as input."""

from __future__ import annotations

import pytest

from agentkv.core.rates import Prefill
from agentkv.errors import ConfigError
from agentkv.sim.costs import Costs, costs_for
from agentkv.sim.plan import capacity, make_plan, traced_tasks, uniform_task
from agentkv.sim.synthetic import requests, synthetic
from agentkv.sim.trace import Trace, Wait

COSTS = Costs(
    token_bytes=10,
    prefill=Prefill(quadratic_s=0.0, linear_s=0.001),
    decode_base_s=0.08,
    decode_per_token_s=0.0,
    h2d_bytes_s=1e6,
    d2h_bytes_s=1e6,
    device_bytes=40_000,
    host_bytes=100_000,
    disk_bytes=0,
    context_tokens=4000,
)


def task(**changes):
    told = {"steps": 3, "tokens_per_call": 200, "output_per_call": 100, "first_prompt": 500, "wait_s": 10.0}
    return uniform_task(**told | changes)


def test_a_task_counts_every_call_with_its_whole_prompt():
    """500 + 800 + 1100 prompt tokens in 3 calls; new are 500 + 200 + 200: outputs are there already."""
    one = make_plan(COSTS, 4, [task()]).estimate
    assert (3, 2400, 900, 300) == (one.calls, one.prompt_tokens, one.new_tokens, one.output_tokens)
    assert (2.4, 0.9) == (pytest.approx(one.prefill_without_reuse_s), pytest.approx(one.prefill_s))
    assert (900, 1200, 300) == (one.mean_context, one.peak_context, one.growth)


def test_decode_is_shared_by_what_the_device_holds():
    """4,000 tokens of room for contexts of 900: four at a time; the base cost of a step is shared by them."""
    one = make_plan(COSTS, 300, [task()]).estimate
    assert (4, pytest.approx(300 * 0.08 / 4)) == (one.batch, one.decode_s)
    assert 2 == make_plan(COSTS, 2, [task()]).estimate.batch


def test_planning_by_visible_turns_is_off_by_about_four():
    """A mid-size task: 12 calls behind 3 turns send four to five times what the turns seem to."""
    plan = make_plan(costs_for("llama-3.1-8b", "h100-80"), 300, [task(steps=12)])
    assert (12, 3) == (plan.estimate.calls, plan.estimate.turns)
    assert 4 < plan.estimate.off_by < 5.5
    assert 1 == make_plan(COSTS, 300, [task(turns=3)]).estimate.off_by


def test_steps_may_take_several_calls():
    """C1: steps x model calls per step."""
    assert 30 == len(task(steps=12, calls_per_step=2.5))


def test_the_capacity_table_fills_the_fastest_tier_first():
    """1,000 tokens of 10 bytes: 4 on the device, 10 in host memory, the rest nowhere."""
    row = capacity(COSTS, 20, 1000)
    assert (4, 10, 0, 6) == (row.device, row.host, row.disk, row.nowhere)
    assert (10_000, 200_000) == (row.task_bytes, row.total_bytes)


def test_every_task_of_a_capacity_row_is_somewhere():
    """300 tasks on an 80 GB card."""
    plan = make_plan(costs_for("llama-3.1-8b", "h100-80", disk_bytes=1e12), 300, [task()])
    assert [4096, 8192, 16_384] == [row.context_tokens for row in plan.capacity][1:4]
    for row in plan.capacity:
        assert 300 == row.device + row.host + row.disk + row.nowhere


def test_many_short_contexts_meet_the_chain_wall_and_few_long_ones_the_context_wall():
    """C9: which comes first follows from the workload."""
    costs = costs_for("llama-3.1-8b", "h100-80")
    chain = make_plan(costs, 300, [task(steps=40, tokens_per_call=50, output_per_call=500, wait_s=0.5)])
    context = make_plan(costs, 300, [task(steps=8, tokens_per_call=8000, output_per_call=50, wait_s=60)])
    assert ("chain", "context") == (chain.walls[0].name, context.walls[0].name)
    assert any("fewer calls (40 a task)" in line for line in chain.walls[0].advice)
    assert any("host tier" in line for line in context.walls[0].advice)


def test_the_context_wall_is_the_number_of_contexts_that_fit():
    """40,000 bytes over 900 tokens of 10 bytes."""
    walls = {wall.name: wall.tasks for wall in make_plan(COSTS, 300, [task()]).walls}
    assert 40_000 / 9000 == pytest.approx(walls["context"])
    assert (30 + 0.9 + 300 * 0.08) / (0.9 + 6.0) == pytest.approx(walls["chain"])


@pytest.mark.parametrize(("tasks", "words"), [(1, "stay below both"), (6, "beyond one"), (300, "beyond both")])
def test_the_verdict_says_where_the_asked_number_stands(tasks, words):
    """Below, between and beyond."""
    assert words in make_plan(COSTS, tasks, [task()]).verdict


def test_a_context_beyond_the_model_is_named():
    """No memory helps there."""
    assert None is make_plan(COSTS, 1, [task()]).too_long
    assert "the model reads 4,000" in make_plan(COSTS, 1, [task(steps=30)]).too_long


def test_a_trace_gives_its_own_tasks():
    """Calls, prompts, reuse and waits as recorded; a call after a person's wait is a visible turn."""
    facts = {"session": "s", "output_tokens": 5, "start_s": 0.0}
    waits = (
        Wait(step=0, kind="tool", prompt_tokens=100, next_prompt_tokens=150, reuse_tokens=90, duration_s=3, **facts),
        Wait(step=1, kind="human", prompt_tokens=150, next_prompt_tokens=170, reuse_tokens=150, duration_s=7, **facts),
        Wait(step=2, kind="tool", prompt_tokens=170, next_prompt_tokens=180, reuse_tokens=170, duration_s=1, **facts),
    )
    (calls,) = traced_tasks(Trace(sessions=(waits,)))
    assert [0, 90, 150] == [call.reuse_tokens for call in calls]
    assert [True, False, True] == [call.visible for call in calls]
    assert [3, 7, 1] == [call.wait_s for call in calls]


def test_synthetic_traces_can_be_planned_with():
    """Coding agents and chat."""
    for trace in (synthetic(sessions=20), requests(sessions=20)):
        plan = make_plan(costs_for("qwen3-8b", "h200"), 10, traced_tasks(trace))
        assert plan.estimate.new_tokens <= plan.estimate.prompt_tokens


@pytest.mark.parametrize(
    "make",
    [
        lambda: task(steps=0),
        lambda: task(first_prompt=0),
        lambda: task(tokens_per_call=-1),
        lambda: task(wait_s=float("nan")),
        lambda: task(turns=4),
        lambda: make_plan(COSTS, 0, [task()]),
        lambda: make_plan(COSTS, 1, []),
        lambda: traced_tasks(Trace(sessions=())),
    ],
)
def test_what_cannot_be_planned_is_refused(make):
    """With the numbers at fault."""
    with pytest.raises(ConfigError):
        make()
