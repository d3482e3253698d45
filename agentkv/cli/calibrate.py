"""`agentkv calibrate`: options, progress, and the answer for people and programs. Measuring is `runtime/calibration.py`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentkv.cli import plot as plots
from agentkv.policy.cost import Crossover, crossover, in_words, table_lengths
from agentkv.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from agentkv.runtime.calibration import Calibration

INTERRUPTED = 130
LONGEST_ROW_TOKENS = 32_768
_BUSY = 0.5
"""Load per core above which figures may be low."""


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(calibrate)


def calibrate(
    *,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, a GGUF file, or a hub name.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help='"auto", "cpu" or "cuda:0".')] = "auto",
    disk: Annotated[
        str | None, typer.Option(help="The disk tier's folder, or `none`; default: the user's cache folder.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure, loading the model apart.")] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the crossover into this .png or .svg file.")] = None,
) -> None:
    """Measure this machine, and say when computing a context again loses to bringing it back.

    Copies between host and device, the disk at the model's block size, and the model's prefill. The result is kept in
    your cache folder and used by the embedded engine from its next start; real transfers refine it.
    """
    from agentkv.runtime.calibration import calibrate as measure
    from agentkv.runtime.ratefiles import rates_folder, save_rates

    if plot is not None:
        plots.check(plot)
    console = Console(stderr=True)
    _warn_if_busy(console)
    folder = None if disk == "none" else Path(disk) if disk is not None else rates_folder() / "probe"
    try:
        with console.status("starting") as status:
            found = measure(
                model, device=device, disk=folder, seconds=seconds, progress=lambda line: status.update(f"{line} ...")
            )
    except KeyboardInterrupt:
        console.print("interrupted: nothing was saved")
        raise typer.Exit(INTERRUPTED) from None
    saved = save_rates(found.place, found.rates)
    lengths = table_lengths(min(found.place.context_tokens, LONGEST_ROW_TOKENS))
    crossing = crossover(found.rates, found.place.token_bytes, lengths)
    if plot is not None:
        plots.draw(plot, crossing, title=f"{found.place.model} on {_machine(found)}")
    if as_json:
        typer.echo(json.dumps(to_json(found, crossing, saved=saved, plot=plot)))
        return
    out = Console()
    out.print(rates_table(found))
    out.print(crossing_table(crossing))
    for line in sentences(crossing, disk_off=found.disk_off):
        out.print(line, highlight=False, soft_wrap=True)
    out.print("not saved" if saved is None else f"saved as {saved}", highlight=False, soft_wrap=True)


def to_json(found: Calibration, crossing: Crossover, *, saved: Path | None, plot: Path | None) -> dict[str, Any]:
    """Plain JSON values; a break-even length is null where recompute never loses."""
    place, rates = found.place, found.rates
    return {
        "machine": {"cpu": place.cpu, "cores": place.cores, "device": place.device, "disk": place.mount},
        "model": {
            "name": place.model,
            "bytes_per_token": place.token_bytes,
            "context_tokens": place.context_tokens,
        },
        "rates": {
            "memcpy_bytes_s": rates.memcpy_bytes_s,
            "h2d_bytes_s": rates.h2d_bytes_s,
            "d2h_bytes_s": rates.d2h_bytes_s,
            "read_bytes_s": rates.read_bytes_s,
            "write_bytes_s": rates.write_bytes_s,
            "prefill": {
                "quadratic_s": rates.prefill.quadratic_s,
                "linear_s": rates.prefill.linear_s,
                "constant_s": rates.prefill.constant_s,
            },
        },
        "crossover": [
            {
                "tokens": row.tokens,
                "recompute_s": row.recompute_s,
                "host_s": row.host_s,
                "disk_s": row.disk_s,
                "winner": row.winner,
            }
            for row in crossing.rows
        ],
        "break_even_tokens": {"host": _finite(crossing.host_tokens), "disk": _finite(crossing.disk_tokens)},
        "disk_off": found.disk_off or None,
        "saved": None if saved is None else str(saved),
        "plot": None if plot is None else str(plot),
    }


def rates_table(found: Calibration) -> Table:
    """What was measured."""
    rates, prefill = found.rates, found.rates.prefill
    table = Table(title=f"{found.place.model} on {_machine(found)}", title_justify="left", box=None, show_header=False)
    rows = {
        "memcpy, one thread": rates.memcpy_bytes_s,
        "host to device": rates.h2d_bytes_s,
        "device to host": rates.d2h_bytes_s,
        "disk read": rates.read_bytes_s,
        "disk write": rates.write_bytes_s,
    }
    for name, value in rows.items():
        table.add_row(name, "not measured" if value is None else f"{format_bytes(value)}/s")
    table.add_row(
        "prefill of C tokens",
        f"{prefill.quadratic_s:.2e} s C^2 + {prefill.linear_s:.2e} s C + {prefill.constant_s:.2e} s",
    )
    return table


def crossing_table(crossing: Crossover) -> Table:
    """Seconds by context length and way."""
    table = Table(title="Until a context is on the device again", title_justify="left")
    for name in ("tokens", "recompute", "from host", "from disk"):
        table.add_column(name, justify="right")
    table.add_column("fastest")
    for row in crossing.rows:
        disk = "-" if row.disk_s is None else format_seconds(row.disk_s)
        table.add_row(str(row.tokens), format_seconds(row.recompute_s), format_seconds(row.host_s), disk, row.winner)
    return table


def sentences(crossing: Crossover, *, disk_off: str) -> list[str]:
    """When recompute loses, in words."""
    lines = [f"Recompute loses to the host tier {in_words(crossing.host_tokens)}."]
    if crossing.disk_tokens is None:
        lines.append(f"Disk tier off: {disk_off}.")
    else:
        lines.append(f"Recompute loses to the disk tier {in_words(crossing.disk_tokens)}.")
    return lines


def _finite(tokens: float | None) -> float | None:
    return None if tokens is None or tokens == math.inf else tokens


def _machine(found: Calibration) -> str:
    place = found.place
    return f"{place.cpu}, {place.cores} cores" if place.device == "cpu" else place.device


def _warn_if_busy(console: Console) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        console.print(f"note: the load of this machine is {load:.1f} on {cores} cores; figures may be low")
