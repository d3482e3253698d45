"""The planner: what a number of agent tasks needs of one engine, and which wall they reach first.

Plans by task, not by request: a task is a chain of model calls whose prompts accumulate. Covers tokens, device time,
KV, tiers and walls, by the formulas in `FORMULAS`; does not simulate queues or policies (`agentkv simulate` does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentkv.errors import ConfigError
from agentkv.policy.cost import Crossover, crossover, table_lengths
from agentkv.sim.costs import Costs
from agentkv.sim.trace import Trace

CALLS_PER_TURN = 4
"""Model calls behind one visible turn, where nobody says otherwise: 8-15 calls a task, 2-4 turns."""

LARGEST_BATCH = 64

FORMULAS = (
    "model calls      = steps x calls per step",
    "prompt of call i = first prompt + (i - 1) x (new input + output per call)",
    "prompt tokens    = sum over calls (accumulated: each call sends the whole context again)",
    "prefill          = sum of a P^2 + b P + c over prompts P; with reuse only the part behind the kept prefix",
    "decode           = output x (base / batch + per token x P), batch = what the device holds, at most 64",
    "KV               = context x layers x 2 x kv_heads x head_dim x item bytes (MLA: rank + rope instead of 2 x ...)",
    "context wall     = room for KV / (KV per token x mean context): tasks whose contexts fit",
    "chain wall       = (waits + undisturbed model time of a task) / device time of a task: tasks that keep it busy",
)
"""Printed with every plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of a task: `reuse_tokens` of its prompt are there, then `wait_s` for a tool or a person."""

    prompt_tokens: int
    reuse_tokens: int
    output_tokens: int
    wait_s: float
    visible: bool
    """Whether a person sees it as a turn: it answers the person's own text."""


Task = tuple[ModelCall, ...]


def uniform_task(
    *,
    steps: int,
    calls_per_step: float = 1.0,
    tokens_per_call: int,
    output_per_call: int,
    first_prompt: int,
    wait_s: float,
    turns: int | None = None,
) -> Task:
    """A task whose calls are all alike. `turns`: what a person sees of it; default one for each 4 calls.

    Raises ConfigError on numbers that describe no task.
    """
    calls = round(steps * calls_per_step)
    numbers = {"tokens_per_call": tokens_per_call, "output_per_call": output_per_call, "first_prompt": first_prompt}
    if calls < 1 or min(numbers.values()) < 0 or first_prompt < 1 or not 0 <= wait_s < math.inf:
        raise ConfigError(f"steps={steps}, calls_per_step={calls_per_step}, wait_s={wait_s}, {numbers}: no task")
    turns = max(1, round(calls / CALLS_PER_TURN)) if turns is None else turns
    if not 1 <= turns <= calls:
        raise ConfigError(f"turns={turns}: from 1 to the {calls} model calls of a task")
    seen = {index * calls // turns for index in range(turns)}
    growth = tokens_per_call + output_per_call
    return tuple(
        ModelCall(
            prompt_tokens=first_prompt + index * growth,
            reuse_tokens=first_prompt + index * growth - tokens_per_call if index else 0,
            output_tokens=output_per_call,
            wait_s=wait_s,
            visible=index in seen,
        )
        for index in range(calls)
    )


def traced_tasks(trace: Trace) -> tuple[Task, ...]:
    """One task for each session of a trace. Raises ConfigError where the trace has no tokens."""
    tasks = []
    for session in trace.sessions:
        calls: list[ModelCall] = []
        reuse, visible = 0, True
        for wait in session:
            calls.append(
                ModelCall(
                    prompt_tokens=wait.prompt_tokens,
                    reuse_tokens=min(reuse, wait.prompt_tokens),
                    output_tokens=wait.output_tokens,
                    wait_s=wait.duration_s,
                    visible=visible,
                )
            )
            reuse, visible = wait.reuse_tokens, wait.kind != "tool"
        if calls and max(call.prompt_tokens for call in calls) > 0:
            tasks.append(tuple(calls))
    if not tasks:
        raise ConfigError(f"{trace.source}: no session with tokens to plan with ({trace.skipped.summary()})")
    return tuple(tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Means of one task. Tokens, bytes, seconds of the device that nobody else can use."""

    calls: float
    turns: float
    prompt_tokens: float
    visible_tokens: float
    new_tokens: float
    output_tokens: float
    mean_context: float
    peak_context: float
    wait_s: float
    alone_s: float
    growth: float
    """By how many tokens a prompt exceeds the one before, compactions left out."""
    prefill_without_reuse_s: float
    prefill_s: float
    decode_s: float
    batch: int

    @property
    def device_s(self) -> float:
        """Device time of a task that reuses its prefix."""
        return self.prefill_s + self.decode_s

    @property
    def off_by(self) -> float:
        """Accumulated prompt tokens over those of the visible turns alone."""
        return self.prompt_tokens / max(1.0, self.visible_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Where the KV of a number of tasks with `context_tokens` each would lie, fastest tier first."""

    context_tokens: int
    task_bytes: int
    total_bytes: int
    device: int
    host: int
    disk: int
    nowhere: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """How many tasks until memory (`context`) or device time (`chain`) is used up."""

    name: str
    tasks: float
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `agentkv plan` prints."""

    costs: Costs
    tasks: int
    estimate: Estimate
    capacity: tuple[Capacity, ...]
    crossing: Crossover
    walls: tuple[Wall, ...]
    """The one that comes first is first."""

    @property
    def too_long(self) -> str | None:
        """What to say where the contexts grow beyond what the model can read."""
        peak, limit = self.estimate.peak_context, self.costs.context_tokens
        if peak <= limit:
            return None
        return f"A context grows to {peak:,.0f} tokens, the model reads {limit:,}: fold or cut it, whatever the memory."

    @property
    def verdict(self) -> str:
        """One sentence."""
        first = self.walls[0]
        reach = f"the {first.name} wall comes first, at {first.tasks:,.0f} tasks"
        if self.tasks <= first.tasks:
            return f"{self.tasks} tasks stay below both walls; {reach}."
        if self.tasks <= self.walls[1].tasks:
            return f"{self.tasks} tasks are beyond one wall: {reach}."
        return f"{self.tasks} tasks are beyond both walls; {reach}, the {self.walls[1].name} wall at {self.walls[1].tasks:,.0f}."


def make_plan(costs: Costs, tasks: int, sample: Sequence[Task]) -> Plan:
    """The plan for `tasks` tasks at a time of which `sample` are typical. Raises ConfigError."""
    if tasks < 1 or not sample:
        raise ConfigError(f"tasks={tasks} with {len(sample)} samples: nothing to plan")
    estimate = _estimate(costs, tasks, sample)
    lengths = sorted({4096, 8192, 16_384, 32_768, 65_536, 131_072, max(1, round(estimate.mean_context))})
    return Plan(
        costs=costs,
        tasks=tasks,
        estimate=estimate,
        capacity=tuple(capacity(costs, tasks, tokens) for tokens in lengths if tokens <= costs.context_tokens),
        crossing=crossover(costs.rates(), costs.token_bytes, table_lengths(min(costs.context_tokens, 131_072))),
        walls=_walls(costs, estimate),
    )


def capacity(costs: Costs, tasks: int, context_tokens: int) -> Capacity:
    """A row of the capacity table."""
    task_bytes = context_tokens * costs.token_bytes
    left, held = tasks, []
    for size_bytes in (costs.device_bytes, costs.host_bytes, costs.disk_bytes):
        fits = min(left, int(size_bytes // task_bytes))
        held.append(fits)
        left -= fits
    return Capacity(
        context_tokens=context_tokens,
        task_bytes=task_bytes,
        total_bytes=tasks * task_bytes,
        device=held[0],
        host=held[1],
        disk=held[2],
        nowhere=left,
    )


def _estimate(costs: Costs, tasks: int, sample: Sequence[Task]) -> Estimate:
    count = len(sample)
    every = [call for task in sample for call in task]
    mean_context = sum(call.prompt_tokens + call.output_tokens for call in every) / len(every)
    batch = max(1, min(tasks, LARGEST_BATCH, int(costs.device_tokens // max(1.0, mean_context))))
    prefill, base_s, per_token_s = costs.prefill, costs.decode_base_s, costs.decode_per_token_s
    extend_s = sum(prefill.extend_s(call.reuse_tokens, call.prompt_tokens) for call in every)
    alone_s = sum(call.output_tokens * costs.decode_s(call.prompt_tokens) for call in every)
    return Estimate(
        calls=len(every) / count,
        turns=sum(call.visible for call in every) / count,
        prompt_tokens=sum(call.prompt_tokens for call in every) / count,
        visible_tokens=sum(call.prompt_tokens for call in every if call.visible) / count,
        new_tokens=sum(call.prompt_tokens - call.reuse_tokens for call in every) / count,
        output_tokens=sum(call.output_tokens for call in every) / count,
        mean_context=mean_context,
        peak_context=sum(max(call.prompt_tokens + call.output_tokens for call in task) for task in sample) / count,
        wait_s=sum(call.wait_s for call in every) / count,
        alone_s=(extend_s + alone_s) / count,
        growth=_mean([max(0, b.prompt_tokens - a.prompt_tokens) for task in sample for a, b in pairwise(task)]),
        prefill_without_reuse_s=sum(prefill.recompute_s(call.prompt_tokens) for call in every) / count,
        prefill_s=extend_s / count,
        decode_s=sum(call.output_tokens * (base_s / batch + per_token_s * call.prompt_tokens) for call in every)
        / count,
        batch=batch,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _walls(costs: Costs, estimate: Estimate) -> tuple[Wall, ...]:
    token_bytes = costs.token_bytes * estimate.mean_context
    context, with_host = costs.device_bytes / token_bytes, (costs.device_bytes + costs.host_bytes) / token_bytes
    cycle_s = estimate.wait_s + estimate.alone_s
    chain = cycle_s / estimate.device_s
    cold = cycle_s / (estimate.prefill_without_reuse_s + estimate.decode_s)
    walls = [
        Wall(
            name="context",
            tasks=context,
            advice=(
                f"let waiting contexts leave the device: with the host tier {with_host:,.0f} tasks fit",
                (
                    f"slim tool output and fold old turns into a summary: a context grows by about {estimate.growth:,.0f} "
                    "tokens a call; half the mean context is twice the tasks"
                ),
                "cut very long tasks into sub-tasks with contexts of their own",
            ),
        ),
        Wall(
            name="chain",
            tasks=chain,
            advice=(
                f"keep the prefix stable: without reuse the wall is at {cold:,.0f} tasks instead of {chain:,.0f}",
                f"make fewer calls ({estimate.calls:.0f} a task): several tools at once, a cap on retries and reflection",
                (
                    f"route simple steps to a smaller model; decoding is {estimate.decode_s / estimate.device_s:.0%} of the "
                    "device time, prefill the rest"
                ),
            ),
        ),
    ]
    return tuple(sorted(walls, key=lambda wall: wall.tasks))
