"""`agentkv plan`: options, and the plan for people and programs. Reckoning is `sim/plan.py`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentkv.cli.machines import costs_from_options
from agentkv.policy.cost import in_words
from agentkv.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from agentkv.sim.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(plan)


def plan(
    *,
    model: Annotated[str, typer.Option(help="A known name, or a Hugging Face config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help='A card: "h200", "2xh200", "rtx4090-12gbs" ...; "measured": this one.')],
    gpus: Annotated[int, typer.Option(min=1, help="Cards side by side (tensor parallel).")] = 1,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 300,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a task.")] = 12,
    calls_per_step: Annotated[float, typer.Option(help="Model calls of a step.")] = 1.0,
    tokens_per_call: Annotated[
        int, typer.Option(help="New input tokens of a call: tool output, a person's text.")
    ] = 1500,
    output_per_call: Annotated[int, typer.Option(help="Output tokens of a call.")] = 300,
    first_prompt: Annotated[
        int, typer.Option(help="Tokens of the first prompt: instructions, tools, the goal.")
    ] = 4000,
    wait_s: Annotated[float, typer.Option(help="Mean wait after a call, in seconds.")] = 30.0,
    turns: Annotated[
        int | None, typer.Option(help="Turns of a task that a person sees; default a quarter of its calls.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Take calls, tokens and waits from this trace instead.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on the first record that cannot be used.")] = False,
    host: Annotated[str, typer.Option(help="Host memory for contexts.")] = "256GiB",
    disk: Annotated[str, typer.Option(help='Disk for contexts; "0" for none.')] = "1TiB",
    link: Annotated[
        str | None, typer.Option(help='Bytes per second to one card, as "25GB"; default the card\'s.')
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Room for KV on the device; default what the weights leave.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Reckon what a number of agent tasks needs: tokens, device time, memory by tier, and which wall comes first.

    Counts every model call of a task with its whole accumulated prompt, not the turns that a person sees. Prints its
    formulas and inputs.
    """
    from agentkv.sim.plan import make_plan, traced_tasks, uniform_task
    from agentkv.sim.trace import load

    costs = costs_from_options(model, gpu, gpus=gpus, host=host, disk=disk, link=link, device_memory=device_memory)
    if trace is not None:
        with Console(stderr=True).status(f"reading {trace.name}") as status:
            loaded = load(
                trace,
                strict=strict,
                progress=lambda done, size: status.update(f"reading {trace.name}: {done / max(1, size):.0%}"),
            )
        sample = traced_tasks(loaded)
        source = f"{len(sample)} sessions of {trace.name}: {loaded.skipped.summary()}"
    else:
        sample = (
            uniform_task(
                steps=steps,
                calls_per_step=calls_per_step,
                tokens_per_call=tokens_per_call,
                output_per_call=output_per_call,
                first_prompt=first_prompt,
                wait_s=wait_s,
                turns=turns,
            ),
        )
        source = (
            f"{steps} steps x {calls_per_step:g} calls, first prompt {first_prompt}, {tokens_per_call} new input and "
            f"{output_per_call} output tokens a call, {wait_s:g} s wait"
        )
    made = make_plan(costs, tasks, sample)
    if as_json:
        typer.echo(json.dumps(to_json(made, source)))
        return
    out = Console()
    for part in parts(made, source):
        out.print(part, highlight=False, soft_wrap=isinstance(part, str))


def to_json(made: Plan, source: str) -> dict[str, Any]:
    """Plain JSON values; a break-even length is null where recompute never loses."""
    from agentkv.sim.plan import FORMULAS

    crossing = made.crossing
    return {
        "inputs": {"workload": source, "tasks": made.tasks, "costs": asdict(made.costs)},
        "task": asdict(made.estimate) | {"device_s": made.estimate.device_s, "off_by": made.estimate.off_by},
        "kv_bytes_per_task": {
            "mean": made.estimate.mean_context * made.costs.token_bytes,
            "peak": made.estimate.peak_context * made.costs.token_bytes,
        },
        "capacity": [asdict(row) for row in made.capacity],
        "crossover": [asdict(row) | {"winner": row.winner} for row in crossing.rows],
        "break_even_tokens": {"host": _finite(crossing.host_tokens), "disk": _finite(crossing.disk_tokens)},
        "walls": [asdict(wall) for wall in made.walls],
        "verdict": made.verdict,
        "too_long": made.too_long,
        "formulas": list(FORMULAS),
    }


def parts(made: Plan, source: str) -> list[Table | str]:
    """What is printed, top to bottom."""
    from agentkv.sim.plan import FORMULAS

    first = made.walls[0]
    lines = [f"- {line}" for line in first.advice]
    return [
        *_inputs(made, source),
        "",
        _task_table(made),
        _off_by(made),
        "",
        _capacity_table(made),
        "",
        _crossing_table(made),
        _crossing_words(made),
        "",
        made.verdict,
        *([made.too_long] if made.too_long else []),
        f"What moves the {first.name} wall:",
        *lines,
        "",
        "Formulas:",
        *(f"  {line}" for line in FORMULAS),
    ]


def _inputs(made: Plan, source: str) -> list[str]:
    costs, prefill = made.costs, made.costs.prefill
    return [
        f"{made.tasks} tasks at a time of {costs.model} on {costs.gpu}",
        f"workload: {source}",
        (
            f"KV {costs.token_bytes:,} bytes a token; room on the device {format_bytes(costs.device_bytes)}, host "
            f"{format_bytes(costs.host_bytes)}, disk {format_bytes(costs.disk_bytes)}; link {costs.h2d_bytes_s / 1e9:.0f} GB/s"
        ),
        (
            f"prefill of P tokens {prefill.quadratic_s:.2e} P^2 + {prefill.linear_s:.2e} P + {prefill.constant_s:.0e} s; decode "
            f"{costs.decode_base_s:.2e} + {costs.decode_per_token_s:.2e} x context s a step"
        ),
    ]


def _task_table(made: Plan) -> Table:
    one = made.estimate
    table = Table(title="Tokens and device time", title_justify="left")
    for name in ("", "one task", f"{made.tasks} tasks"):
        table.add_column(name, justify="right" if name else "left")
    numbers = {
        "model calls": one.calls,
        "prompt tokens, accumulated": one.prompt_tokens,
        "  of these new (with prefix reuse)": one.new_tokens,
        "output tokens": one.output_tokens,
    }
    for name, value in numbers.items():
        table.add_row(name, f"{value:,.0f}", f"{value * made.tasks:,.0f}")
    times = {
        "prefill without reuse": one.prefill_without_reuse_s,
        "prefill with reuse": one.prefill_s,
        f"decode, {one.batch} at a time": one.decode_s,
    }
    for name, seconds in times.items():
        table.add_row(name, format_seconds(seconds), format_seconds(seconds * made.tasks))
    for name, tokens in (("KV, mean context", one.mean_context), ("KV, peak context", one.peak_context)):
        size_bytes = tokens * made.costs.token_bytes
        table.add_row(f"{name} {tokens:,.0f}", format_bytes(size_bytes), format_bytes(size_bytes * made.tasks))
    return table


def _off_by(made: Plan) -> str:
    one = made.estimate
    return (
        f"Planned by its {one.turns:.1f} visible turns a task would seem to send {one.visible_tokens:,.0f} prompt tokens; "
        f"it sends {one.prompt_tokens:,.0f} in {one.calls:.1f} calls: {one.off_by:.1f} times as many."
    )


def _capacity_table(made: Plan) -> Table:
    table = Table(title=f"Where the contexts of {made.tasks} tasks would lie", title_justify="left")
    for name in ("context", "KV a task", "KV of all", "device", "host", "disk", "nowhere"):
        table.add_column(name, justify="right")
    for row in made.capacity:
        held = (row.device, row.host, row.disk, row.nowhere)
        sizes = (format_bytes(row.task_bytes), format_bytes(row.total_bytes))
        table.add_row(f"{row.context_tokens:,}", *sizes, *(str(number) for number in held))
    return table


def _crossing_table(made: Plan) -> Table:
    table = Table(title="Until a context is on the device again", title_justify="left")
    for name in ("tokens", "recompute", "from host", "from disk"):
        table.add_column(name, justify="right")
    table.add_column("fastest")
    for row in made.crossing.rows:
        disk = "-" if row.disk_s is None else format_seconds(row.disk_s)
        table.add_row(f"{row.tokens:,}", format_seconds(row.recompute_s), format_seconds(row.host_s), disk, row.winner)
    return table


def _crossing_words(made: Plan) -> str:
    words = f"Recompute loses to the host tier {in_words(made.crossing.host_tokens)}"
    if made.crossing.disk_tokens is None:
        return f"{words}; no disk."
    return f"{words}, to the disk tier {in_words(made.crossing.disk_tokens)}."


def _finite(tokens: float | None) -> float | None:
    return None if tokens is None or tokens == math.inf else tokens
