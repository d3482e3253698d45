"""`agentkv serve`: the OpenAI-compatible server over the embedded engine, or over an endpoint elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.errors import ConfigError, ExtraMissing

if TYPE_CHECKING:
    from agentkv.runtime.agentkv import AgentKV

_HELP = """Serve MODEL to OpenAI clients: chats, completions, responses, and hints about waits.

MODEL is "smollm2-135m", a Hugging Face folder, a GGUF file, or a hub name; with --base-url it is the name of a model there. \
The server listens at 127.0.0.1:8000 until it gets SIGTERM (or Ctrl-C): then new calls are refused, /health says "draining", \
and those under way have --drain seconds to end.

Examples:

  agentkv serve smollm2-135m

  agentkv serve ./my-model --port 9000 --device-memory 4GiB --disk /var/cache/agentkv

  agentkv serve ./base-model --chat-template chatml.jinja --allow-origin https://app.example.com

  AGENTKV_API_KEY=sk-my-secret agentkv serve smollm2-135m --host 0.0.0.0

Then, with the openai package: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="...").

Keys: AGENTKV_API_KEY is one key; AGENTKV_API_KEYS is "alice=sk-...,bob=sk-..."; --keys is a TOML file with a table for each, \
which may hold a budget and a salt: \\[keys.alice] key = "sk-..." tokens = 1000000 salt = "...". Tenants never share tasks, \
sessions or KV. Without a key the server stays on this machine.

Coming from another server: --api-key is AGENTKV_API_KEY, --served-model-name and --alias are --name. --max-model-len, \
--ctx-size and num_ctx have no counterpart: the context is the model's own, as far as --device-memory holds it. \
--gpu-memory-utilization is --device-memory, in bytes; --swap-space and --cache-ram are --host-memory and --disk. --max-num-seqs \
and --parallel are not set: up to 16 calls run together while memory lasts, the others wait. Tools need no option, whatever \
the model's format of calls; the model stays loaded until the server ends.
"""
_LOADED = "agentkv: {model} is ready at {url}/v1"


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command(help=_HELP)(serve)


_MODEL, _MEMORY, _CALLERS = "The model", "Memory for KV", "Who calls"
_LOADED_HERE = (
    "chat_template", "device", "dtype", "device_memory", "host_memory", "disk", "disk_memory", "persist", "policy",
)  # fmt: skip
"""Options of `AgentKV.local`: with --base-url there is nothing that they could change."""


def serve(
    *,
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="What to serve.", show_default=True)] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="The address to listen at; one that others can reach needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any free one, and the first line says which.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What callers call the model; by default MODEL as it is.", rich_help_panel=_MODEL)] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja template in place of the model's own; a base model has none.", rich_help_panel=_MODEL)] = None,
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", or several as "cuda:0,cuda:1": the model is on each.', rich_help_panel=_MODEL)] = "auto",
    dtype: Annotated[str, typer.Option(help='"auto", "bfloat16", "float16" or "float32".', rich_help_panel=_MODEL)] = "auto",
    base_url: Annotated[str | None, typer.Option(help="Serve a model of this OpenAI-compatible endpoint instead.", rich_help_panel=_MODEL)] = None,
    device_memory: Annotated[str, typer.Option(help="Bytes of KV on each device; no prompt can be longer than they hold.", rich_help_panel=_MEMORY)] = "256MiB",
    host_memory: Annotated[str, typer.Option(help='Bytes of KV in host memory; "none" for no such tier.', rich_help_panel=_MEMORY)] = "auto",
    disk: Annotated[Path | None, typer.Option(help="A folder for the disk tier.", rich_help_panel=_MEMORY)] = None,
    disk_memory: Annotated[str, typer.Option(help="Bytes of KV on disk.", rich_help_panel=_MEMORY)] = "4GiB",
    persist: Annotated[bool, typer.Option("--persist", help="Keep unfinished sessions for the next start.", rich_help_panel=_MEMORY)] = False,
    policy: Annotated[str, typer.Option(help='"lazy", "hazard", "ladder" or "keep".', rich_help_panel=_MEMORY)] = "lazy",
    keys: Annotated[Path | None, typer.Option(help="A TOML file of API keys with their budgets and salts.", rich_help_panel=_CALLERS)] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help='A web page\'s origin whose scripts may call, such as https://app.example.com; again for more, "*" for all.', rich_help_panel=_CALLERS)] = None,
    most_calls: Annotated[int, typer.Option(help="Calls under way or waiting; more are refused with 503.", min=1, rich_help_panel=_CALLERS)] = 1024,
    ledger: Annotated[str | None, typer.Option(help='Where bills are kept: "memory", or a database URL; by default your data folder.')] = None,
    shorten: Annotated[bool, typer.Option("--context/--no-context", help="Keep prompts short and steady.")] = True,
    drain: Annotated[float, typer.Option(help="Seconds that calls under way have to end after SIGTERM.", min=0)] = 30.0,
) -> None:  # fmt: skip
    """See `_HELP`."""
    _refuse_without_extras()
    from agentkv.server.admission import Life
    from agentkv.server.http import HttpServer, address_of, bind
    from agentkv.server.keys import Keys
    from agentkv.server.origins import checked_origins

    known, origins = Keys.read(keys, os.environ), checked_origins(allow_origin or ())
    if base_url is not None:
        _refuse_what_is_loaded_here(context)
    with bind(
        host, port, guarded=known is not None
    ) as sock:  # before the model is loaded: a taken port is told at once
        _say(f"loading {model}; it will be served at {address_of(sock)}/v1")
        options: dict[str, Any] = {"ledger": ledger} | ({} if shorten else {"context": None})
        if base_url is not None:
            kv = _remote(base_url, model, options)
        else:
            kv = _local(
                model,
                options
                | {
                    "chat_template": chat_template,
                    "device": device,
                    "device_memory": device_memory,
                    "host_memory": None if host_memory == "none" else host_memory,
                    "disk": disk,
                    "disk_memory": disk_memory,
                    "persist": persist,
                    "dtype": dtype,
                    "policy": policy,
                },
            )
        from agentkv.runtime.serving import Served

        life = Life(most_calls=most_calls)
        with kv:
            served = Served(kv, name=name, keys=known, life=life, allow_origins=origins)
            try:
                server = HttpServer(served.app, sock, life=life, drain_s=drain)
                server.on_ready = lambda: typer.echo(_LOADED.format(model=name or kv.engine.model, url=server.url))
                server.run()
            finally:
                served.close()
    _say("stopped")


def _refuse_without_extras() -> None:
    """Now rather than when the model is loaded."""
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise ExtraMissing(f"agentkv serve needs {' and '.join(missing)}: pip install 'agentkv-sdk[local,serve]'")


def _refuse_what_is_loaded_here(context: typer.Context) -> None:
    """A given option without any effect is a mistake."""
    sources = {name: context.get_parameter_source(name) for name in _LOADED_HERE}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{named}: of a model that is loaded here; with --base-url it is loaded elsewhere")


def _local(model: str, options: dict[str, Any]) -> AgentKV:
    from agentkv.runtime.agentkv import AgentKV

    return AgentKV.local(model, progress=_say, **options)


def _remote(base_url: str, model: str, options: dict[str, Any]) -> AgentKV:
    from agentkv.runtime.agentkv import AgentKV

    return AgentKV.remote(base_url=base_url, model=model, **options)


def _say(text: str) -> None:
    """To a person who waits; the one line on standard output is that the server is ready."""
    typer.echo(f"agentkv: {text}", err=True)
