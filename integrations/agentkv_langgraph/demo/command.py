"""`agentkv demo`: options, exit codes and the order of the show.

The run itself is `scene.py`, which loads LangGraph only when the command is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentkv.errors import ConfigError
from agentkv.units import format_seconds
from agentkv_langgraph.demo.closing import Comparison, Outcome, closing_table, to_json
from agentkv_langgraph.demo.settings import DEFAULT_POLICY, Memory, Settings
from agentkv_langgraph.demo.workshop import cache_folder, workshop

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command(name="demo")(demo)


def demo(
    *,
    tasks: Annotated[int, typer.Option(min=1, max=64, help="Tasks at once, each a graph of its own.")] = 4,
    turns: Annotated[int, typer.Option(min=1, max=64, help="Tool calls per task.")] = 6,
    repo: Annotated[Path | None, typer.Option(help="Your own code base; a copy of it is tested.")] = None,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, a GGUF file, or a hub name.")] = "smollm2-135m",
    device_memory: Annotated[
        str, typer.Option(help="The block pool; too small for all contexts, on purpose.")
    ] = "192MiB",
    host_memory: Annotated[str, typer.Option(help="The host tier, or `none`.")] = "128MiB",
    disk: Annotated[
        str | None, typer.Option(help="A folder for the disk tier, or `none`; default: a temporary one.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Do the same work again, with offload on and with it off.")
    ] = False,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that each task may spend.")] = 150_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write what really happened to this file, as a trace for the simulator.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"What moves when: lazy, hazard, ladder or keep; default {DEFAULT_POLICY}, or the ladder with its numbers."
        ),
    ] = None,
    keep_s: Annotated[float | None, typer.Option(help="Ladder: shorter waits stay on the device (0.5).")] = None,
    host_s: Annotated[float | None, typer.Option(help="Ladder: longer waits go to disk (4).")] = None,
    drop_tokens: Annotated[
        int | None, typer.Option(help="Ladder: smaller contexts are dropped and computed again (256).")
    ] = None,
    tool_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which a tool is killed.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 0,
    engine: Annotated[
        str, typer.Option(help="Another engine: llamacpp, vllm, or the address of a server (with --model).")
    ] = "",
) -> None:
    """Several LangGraph agents at once on one small device: hints, three tiers, budgets and bills at work.

    A model of this size cannot be trusted to choose tools: the graphs walk a work list built from the code base, the
    tools really run, and the model writes what it makes of each result.
    """
    numbers = any(number is not None for number in (keep_s, host_s, drop_tokens))
    policy = policy or ("ladder" if numbers else DEFAULT_POLICY)
    if numbers and policy != "ladder":
        raise ConfigError(
            f"--keep-s, --host-s and --drop-tokens are the ladder's; --policy {policy} has no such numbers"
        )
    settings = Settings(
        tasks=tasks,
        turns=turns,
        repo=repo,
        budget_tokens=budget,
        seed=seed,
        keep_s=0.5 if keep_s is None else keep_s,
        host_s=4.0 if host_s is None else host_s,
        drop_tokens=256 if drop_tokens is None else drop_tokens,
        tool_timeout_s=tool_timeout,
        policy_name=policy,
    )
    memory = Memory(device_memory, host_memory, disk)
    settings.policy  # noqa: B018  a ladder that cannot work is refused before a model is loaded
    console = Console()
    if engine and (compare or record is not None or numbers):
        raise ConfigError("--compare, --record and the ladder's numbers are for the embedded engine, not for --engine")
    try:
        if engine:
            failure = _show_foreign(console, settings, engine, model=model, json_file=json_file)
        else:
            failure = _show(console, settings, memory, model=model, compare=compare, json_file=json_file, record=record)
    except KeyboardInterrupt:
        console.print("Stopped. Nothing is left behind.")
        raise typer.Exit(INTERRUPTED) from None
    if failure:
        typer.echo(f"agentkv demo: {failure}", err=True)
        raise typer.Exit(1)


def _show(
    console: Console,
    settings: Settings,
    memory: Memory,
    *,
    model: str,
    compare: bool,
    json_file: Path | None,
    record: Path | None,
) -> str:
    """The whole show. Returns why it failed, "" if it did not."""
    from agentkv_langgraph.demo.scene import perform, perform_again

    console.print(
        f"{settings.tasks} tasks of {settings.turns} tool calls each on {model}; {memory}.\n{settings.policy_words}",
        highlight=False,
    )
    with workshop(cache_folder()) as folder:
        make_kv = memory.maker(model, folder, console)
        run, recording = perform(make_kv, settings, folder, console, record=record)
        for bill in run.bills.values():
            console.print(str(bill), markup=False, highlight=False)
        again = None
        if compare:
            on = perform_again(make_kv, settings, recording, console, tiers=True)
            off = perform_again(make_kv, settings, recording, console, tiers=False)
            again = Comparison(on=on, off=off)
    console.print(closing_table(run, again))
    if again is not None:
        console.print(again.sentence(), highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(run, again), indent=1) + "\n", encoding="utf-8")
    return nothing_moved(run, has_host=memory.host_bytes is not None, has_disk=memory.has_disk, settings=settings)


def _show_foreign(console: Console, settings: Settings, engine: str, *, model: str, json_file: Path | None) -> str:
    """The same agents on another engine. Returns why it failed, "" if it did not."""
    from agentkv_langgraph.demo import foreign
    from agentkv_langgraph.demo.scene import perform

    with workshop(cache_folder()) as folder, foreign.served(engine, model=model) as served:
        console.print(f"{settings.tasks} tasks of {settings.turns} tool calls each: {served.words}.", highlight=False)
        run, _ = perform(served.maker(), settings, folder, console)
    for bill in run.bills.values():
        console.print(str(bill), markup=False, highlight=False)
    console.print(foreign.closing_table(run))
    for line in foreign.receipts(run.stats):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(run, None), indent=1) + "\n", encoding="utf-8")
    return ""


def nothing_moved(run: Outcome, *, has_host: bool, has_disk: bool, settings: Settings) -> str:
    """Why this run showed nothing: a tier that was on and that no block reached. "" if all is well."""
    by_plan = settings.policy_name == "ladder"  # others go to disk only when the host is full
    tiers = [("host", has_host), ("disk", has_disk and by_plan)]
    unused = [tier for tier, is_on in tiers if is_on and not run.reached(tier)]
    if not unused:
        return ""
    if not by_plan:
        return (
            f"no block reached {' and '.join(unused)} under the policy {settings.policy_name!r}, so this run shows no "
            "tiering. Try a smaller --device-memory."
        )
    longest_s = max((tool.actual_s for bill in run.bills.values() for tool in bill.tools), default=0.0)
    return (
        f"no block reached {' and '.join(unused)}, so this run shows no tiering. The longest tool took "
        f"{format_seconds(longest_s)}; the ladder sends contexts to host from {settings.keep_s:g} s and to disk from "
        f"{settings.host_s:g} s on. Try lower --keep-s and --host-s, or a code base with slower tests."
    )
