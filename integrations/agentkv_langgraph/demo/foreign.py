"""`agentkv demo --engine`: the same agents on somebody else's engine, with hints on their way and receipts for them.

Covers which engine that is (a llama.cpp server or vLLM, started here in a process of its own, or one that is there
already) and the table at the end: what the calls found in the engine's cache, and what became of the hints. The
servers are those of the examples, so they need a checkout; everything else does not.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import agentkv
from agentkv import AgentKV
from agentkv.core.residency import Policy
from agentkv.errors import ConfigError
from agentkv_langgraph.demo.closing import Outcome
from agentkv_langgraph.demo.settings import CONTEXT, MakeKV

ROOT = Path(agentkv.__file__).parents[1]
SLOTS, TOKENS = 2, 6144
"""Of the llama.cpp server: fewer slots than tasks, on purpose. Twice the mark at which turns are folded: whoever does not know an
engine's tokenizer counts too few.
"""
POOL_TOKENS = 6144
"""Of vLLM: too few for all contexts, on purpose."""
_RECEIPTS = ("applied", "advisory", "unsupported", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An engine that answers: where, under which model name, and in words."""

    url: str
    model: str
    words: str
    prewarm: bool = False

    def maker(self) -> MakeKV:
        """Makes the AgentKV of a run on it."""

        def make(*, tiers: bool, policy: str | Policy, saved: bool = True) -> Any:  # noqa: ARG001  the engine has its own
            return AgentKV.remote(
                base_url=self.url, model=self.model, context=CONTEXT, ledger=None if saved else "memory",
                prewarm=self.prewarm,
            )  # fmt: skip

        return make


@contextmanager
def served(engine: str, *, model: str) -> Iterator[Served]:
    """The engine, for as long as this is open. Raises ConfigError with what to do where it cannot be started."""
    if engine.startswith(("http://", "https://")):
        yield Served(url=engine, model=model, words=f"{model} at {engine}", prewarm=True)
    elif engine == "llamacpp":
        module = _example("llamacpp")
        if not module.installed():
            raise ConfigError(
                "llama.cpp's server is missing: pip install xllamacpp (or make engines ARGS='--only llamacpp')"
            )
        threads = max(1, (os.cpu_count() or 2) - 1)  # one core is left for the tools
        with module.server(slots=SLOTS, tokens=TOKENS, threads=threads) as url:
            yield Served(url=url, model="smollm2", words=f"SmolLM2-135M on a llama.cpp server with {SLOTS} slots")
    elif engine == "vllm":
        module = _example("vllm_agents")
        if module.missing():
            raise ConfigError(module.missing())
        with module.server(pool_tokens=POOL_TOKENS, tokens=POOL_TOKENS) as running:
            words = f"SmolLM2-135M on vLLM with room for {POOL_TOKENS:,} tokens"
            with _variable("AGENTKV_VLLM_SOCKET", running.socket):
                yield Served(url=running.url, model=module.MODEL, words=words, prewarm=True)
    else:
        raise ConfigError(f"--engine {engine} is unknown; there are llamacpp, vllm, and the address of a server")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """The environment variable, for as long as this is open: where the adapter looks for the plug-in."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _example(name: str) -> Any:
    """A server of the examples; they are in a checkout only."""
    folder = ROOT / "examples"
    if not (folder / f"{name}.py").is_file():
        raise ConfigError(
            f"the server that --engine would start is one of the examples, and there is no {folder}; start one yourself "
            "and give its address: --engine http://localhost:8000/v1"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def closing_table(run: Outcome) -> Table:
    """One row per task: what its calls after the first found in the engine's cache, and how soon they answered."""
    table = Table(
        title="Closing table: calls after a tool", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("task", "calls", "prompt tokens", "of them cached", "first token ms\nmed/max", "tools s"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for title, bill in run.bills.items():
        table.add_row(*_cells(title, [bill]))
    table.add_section()
    table.add_row(*_cells("all", list(run.bills.values())))
    return table


def _cells(title: str, bills: list[Any]) -> list[str]:
    calls = [call for bill in bills for call in answers_after_tools(bill)]
    tokens, cached = sum(call.usage.input_tokens for call in calls), sum(call.usage.cached_tokens for call in calls)
    ttft_ms = [1000 * call.timing.ttft_s for call in calls]
    waits = sum(tool.actual_s for bill in bills for tool in bill.tools)
    return [
        title, str(len(calls)), f"{tokens:,}", f"{cached:,} ({cached / tokens:.0%})" if tokens else "-",
        f"{statistics.median(ttft_ms):,.0f}/{max(ttft_ms):,.0f}" if ttft_ms else "-", f"{waits:.1f}",
    ]  # fmt: skip


def answers_after_tools(bill: Any) -> list[Any]:
    """The task's answered calls but its first."""
    calls = [call for call in bill.calls if call.status == "ok" and call.purpose == "answer"]
    return calls[1:]


def receipts(stats: Mapping[str, Any]) -> list[str]:
    """What became of the hints, in lines."""
    reach = stats.get("reach") or {}
    counts = ", ".join(f"{reach.get(name, 0)} {name}" for name in _RECEIPTS)
    return [f"Hints to {reach.get('adapter', 'nobody')}: {counts}.", *(f"  {line}" for line in reach.get("last", ()))]
