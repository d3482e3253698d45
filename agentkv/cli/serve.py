"""`agentkv serve`: the OpenAI-compatible server over the embedded engine, or over an endpoint elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from agentkv.runtime.agentkv import AgentKV

_HELP = """Serve MODEL to OpenAI clients: chats, completions, responses, and hints about waits.

MODEL is "smollm2-135m", a Hugging Face folder, a GGUF file, or a hub name; with --base-url it is the name of a model
there. The server listens at 127.0.0.1:8000 until it gets SIGTERM (or Ctrl-C): then new calls are refused, /health says
"draining", and those under way have --drain seconds to end.

Examples:

  agentkv serve smollm2-135m

  agentkv serve ./my-model --port 9000 --device-memory 4GiB --disk /var/cache/agentkv

  AGENTKV_API_KEY=sk-my-secret agentkv serve smollm2-135m --host 0.0.0.0

Then, with the openai package: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="...").

Keys: AGENTKV_API_KEY is one key; AGENTKV_API_KEYS is "alice=sk-...,bob=sk-..."; --keys is a TOML file with a table for
each, which may hold a budget and a salt: \\[keys.alice] key = "sk-..." tokens = 1000000 salt = "...". Tenants never share
tasks, sessions or KV. Without a key the server stays on this machine.
"""
_LOADED = "agentkv: {model} is ready at {url}/v1"


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command(help=_HELP)(serve)


def serve(
    *,
    model: Annotated[str, typer.Argument(help="What to serve.", show_default=True)] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="The address to listen at; one that others can reach needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any free one, and the first line says which.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What callers call the model; by default MODEL as it is.")] = None,
    keys: Annotated[Path | None, typer.Option(help="A TOML file of API keys with their budgets and salts.")] = None,
    device: Annotated[str, typer.Option(help='"auto", "cpu", "cuda", or several as "cuda:0,cuda:1".')] = "auto",
    device_memory: Annotated[str, typer.Option(help="Bytes of KV on each device.")] = "256MiB",
    host_memory: Annotated[str, typer.Option(help='Bytes of KV in host memory; "none" for no such tier.')] = "auto",
    disk: Annotated[Path | None, typer.Option(help="A folder for the disk tier.")] = None,
    disk_memory: Annotated[str, typer.Option(help="Bytes of KV on disk.")] = "4GiB",
    persist: Annotated[bool, typer.Option("--persist", help="Keep unfinished sessions for the next start.")] = False,
    dtype: Annotated[str, typer.Option(help='"auto", "bfloat16", "float16" or "float32".')] = "auto",
    policy: Annotated[str, typer.Option(help='"lazy", "hazard", "ladder" or "keep".')] = "lazy",
    ledger: Annotated[str | None, typer.Option(help='"memory", or a database URL; by default your data folder.')] = None,
    context: Annotated[bool, typer.Option("--context/--no-context", help="Keep prompts short and steady.")] = True,
    base_url: Annotated[str | None, typer.Option(help="Serve a model of this OpenAI-compatible endpoint instead.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that calls under way have to end after SIGTERM.", min=0)] = 30.0,
    most_calls: Annotated[int, typer.Option(help="Calls under way or waiting; more are refused with 503.", min=1)] = 1024,
) -> None:  # fmt: skip
    """See `_HELP`."""
    from agentkv.server.admission import Life
    from agentkv.server.http import HttpServer, address_of, bind
    from agentkv.server.keys import Keys

    known = Keys.read(keys, os.environ)
    with bind(
        host, port, guarded=known is not None
    ) as sock:  # before the model is loaded: a taken port is told at once
        _say(f"loading {model}; it will be served at {address_of(sock)}/v1")
        options: dict[str, Any] = {"ledger": ledger} | ({} if context else {"context": None})
        if base_url is not None:
            kv = _remote(base_url, model, options)
        else:
            kv = _local(
                model,
                options
                | {
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
            served = Served(kv, name=name, keys=known, life=life)
            try:
                server = HttpServer(served.app, sock, life=life, drain_s=drain)
                server.on_ready = lambda: typer.echo(_LOADED.format(model=name or kv.engine.model, url=server.url))
                server.run()
            finally:
                served.close()
    _say("stopped")


def _local(model: str, options: dict[str, Any]) -> AgentKV:
    from agentkv.runtime.agentkv import AgentKV

    return AgentKV.local(model, progress=_say, **options)


def _remote(base_url: str, model: str, options: dict[str, Any]) -> AgentKV:
    from agentkv.runtime.agentkv import AgentKV

    return AgentKV.remote(base_url=base_url, model=model, **options)


def _say(text: str) -> None:
    """To a person who waits; the one line on standard output is that the server is ready."""
    typer.echo(f"agentkv: {text}", err=True)
