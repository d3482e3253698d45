"""`agentkv simulate`: options, progress, and the comparison for people and programs. Simulating is `sim/compare.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agentkv.cli import plot as plots
from agentkv.cli.machines import costs_from_options
from agentkv.errors import ConfigError
from agentkv.units import format_bytes

if TYPE_CHECKING:
    from agentkv.sim.compare import Mean, Row
    from agentkv.sim.costs import Costs
    from agentkv.sim.trace import Trace
    from agentkv.sim.workload import Workload

INTERRUPTED = 130
DEFAULT_POLICIES = "lru,lazy,hazard,ladder,belady,infinite"


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(simulate)


def simulate(
    *,
    trace: Annotated[Path | None, typer.Option(help="A trace file; see docs/traces.md.")] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="A made-up trace (default without --trace).")] = False,
    model: Annotated[str, typer.Option(help="A known name, or a Hugging Face config.json.")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help='A card: "h200", "2xh200" ...; "measured": this machine.')] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Cards side by side (tensor parallel).")] = 1,
    agents: Annotated[int, typer.Option(min=1, help="Agents at a time.")] = 16,
    policy: Annotated[str, typer.Option(help="Names with commas between, or `all`.")] = DEFAULT_POLICIES,
    seeds: Annotated[int, typer.Option(min=1, help="Repeats with other orders of sessions.")] = 1,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions in a run; default all of the trace.")] = None,
    window: Annotated[int | None, typer.Option(min=64, help="Longer contexts are shrunk to so many tokens.")] = None,
    humans: Annotated[bool, typer.Option(help="Whether waits on people take their time.")] = True,
    open_loop: Annotated[bool, typer.Option("--open-loop", help="Sessions arrive at random.")] = False,
    load: Annotated[float, typer.Option(help="Open loop: how many times what --agents would start.")] = 1.0,
    batch: Annotated[float, typer.Option(min=0, max=1, help="Share of sessions that are batch work.")] = 0.0,
    shared: Annotated[int, typer.Option(min=0, help="Tokens that every session begins with.")] = 2048,
    host: Annotated[str, typer.Option(help="Host memory for contexts.")] = "256GiB",
    disk: Annotated[str, typer.Option(help='Disk for contexts; "0" for none.')] = "0",
    link: Annotated[str | None, typer.Option(help='Bytes per second to one card, as "12GB".')] = None,
    device_memory: Annotated[str | None, typer.Option(help="Room for KV; default what the weights leave.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on the first record that cannot be used.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the first policy's run into this .png or .svg.")] = None,
) -> None:
    """Compare policies on a trace: task times, stalls, bytes, and how much of the gap to the optimum each one closes."""
    from agentkv.policy import RULES
    from agentkv.sim.compare import INFINITE
    from agentkv.sim.workload import workload

    if trace is not None and synthetic:
        raise ConfigError("--trace and --synthetic: give one of them")
    if plot is not None:
        plots.check(plot)
    names = (*RULES, INFINITE) if policy == "all" else tuple(name.strip() for name in policy.split(",") if name.strip())
    if not names:
        raise ConfigError("--policy names no policy")
    costs = costs_from_options(model, gpu, gpus=gpus, host=host, disk=disk, link=link, device_memory=device_memory)
    console = Console(stderr=True)
    try:
        source = _source(trace, strict=strict, console=console)
        window_tokens = window or min(costs.context_tokens, int(costs.device_tokens * 0.9))
        workloads = [
            workload(
                source, agents=agents, seed=seed, sessions=sessions, window_tokens=window_tokens, humans=humans,
                open_loop=open_loop, load=load, batch_share=batch, costs=costs,
            )
            for seed in range(seeds)
        ]  # fmt: skip
        rows = _compared(names, costs, workloads, shared=shared, lanes=plot is not None, console=console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was compared")
        raise typer.Exit(INTERRUPTED) from None
    if plot is not None:
        from agentkv.cli.lanes import draw

        draw(plot, rows[0].results[0], title=f"{rows[0].policy}, {costs.model} on {costs.gpu}, {agents} agents")
    what = f"{workloads[0].waits} waits of {len(workloads[0].sessions)} sessions, {agents} agents, {seeds} seeds"
    if as_json:
        typer.echo(json.dumps(to_json(rows, costs, what=what, source=source.source)))
        return
    out = Console(width=None if Console().is_terminal else 110)
    out.print(table(rows, title=f"{costs.model} on {costs.gpu}: {what}"))
    out.print(
        f"{source.skipped.summary()}; contexts up to {window_tokens} tokens, {format_bytes(costs.token_bytes)} each",
        highlight=False,
    )


def _source(trace: Path | None, *, strict: bool, console: Console) -> Trace:
    from agentkv.sim.synthetic import synthetic
    from agentkv.sim.trace import load

    if trace is None:
        return synthetic()
    with console.status(f"reading {trace.name}"):
        return load(trace, strict=strict)


def _compared(
    names: tuple[str, ...], costs: Costs, workloads: list[Workload], *, shared: int, lanes: bool, console: Console
) -> list[Row]:
    from agentkv.sim.compare import compare

    waits = sum(each.waits for each in workloads)
    bar = Progress(
        TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TextColumn("waits"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
    with bar:
        all_of_them = bar.add_task("", total=waits * len(dict.fromkeys(names)))

        def tell(name: str, done: int) -> None:
            bar.update(all_of_them, advance=done, description=name)

        return compare(names, costs, workloads, shared_tokens=shared, lanes=lanes, progress=tell)


def table(rows: list[Row], *, title: str) -> Table:
    """One line for each policy. "vs lru": mean task time, seed by seed, with its 95 % interval over seeds."""
    grid = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    grid.add_column("policy", no_wrap=True)
    for head in ("task s", "vs lru", "stall P50", "P95", "P99", "moved", "lost", "useful", "closed"):
        grid.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(
            row.policy,
            f"{row['task_mean_s']:.0f}",
            _ratio(row.ratios.get("task_mean_s")),
            *(f"{row[name]:.2f}" for name in ("stall_p50_s", "stall_p95_s", "stall_p99_s")),
            format_bytes(row["moved_bytes"]),
            f"{1 - row['hit_share']:.1%}",
            f"{row['useful']:.0%}",
            "" if row.closed is None else f"{row.closed:.0%}",
        )
    return grid


def to_json(rows: list[Row], costs: Costs, *, what: str, source: str) -> dict[str, Any]:
    """Plain JSON values: means and half-widths of 95 % intervals (null of one seed)."""

    def plain(value: Mean) -> dict[str, float | None]:
        return {"mean": value.mean if math.isfinite(value.mean) else None, "half": value.half}

    return {
        "source": source,
        "workload": what,
        "model": costs.model,
        "gpu": costs.gpu,
        "policies": {
            row.policy: {
                "figures": {name: plain(value) for name, value in row.figures.items()},
                "vs_lru": {name: plain(value) for name, value in row.ratios.items()} or None,
                "gap_closed": row.closed,
            }
            for row in rows
        },
    }


def _ratio(value: Mean | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.3f}" if value.half is None else f"{value.mean:.3f}±{value.half:.3f}"
