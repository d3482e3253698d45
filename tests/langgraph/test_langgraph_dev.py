"""`langgraph dev` serves decorated and attached graphs: a bill for each thread, and nothing of ours blocks its loop.

Needs `langgraph-cli[inmem]` beside agentkv: here, or in the virtual environment that AGENTKV_LANGGRAPH_DEV names (made
by `pip install . 'langgraph-cli[inmem]'`). The server is local, opens no browser and reports to nobody.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
VENV = "AGENTKV_LANGGRAPH_DEV"

SHARED = """
import itertools
import os

from agentkv import AgentKV, ScriptedEngine
from agentkv_langgraph import LangGraphHost

kv = AgentKV.with_engine(
    ScriptedEngine(itertools.repeat("Fine.")), ledger=os.environ["CELL_LEDGER"], host=LangGraphHost()
)
"""
GRAPHS = """
import time
from typing import Any, TypedDict

from agentkv_langgraph import ChatAgentKV
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from shared import kv

ours = ChatAgentKV(kv)
USED = {"input_tokens": 1000, "output_tokens": 1, "total_tokens": 1001}


@kv.node
async def plan(state: MessagesState) -> Any:
    return {"messages": [await ours.ainvoke(state["messages"])]}


async def act(state: MessagesState) -> Any:
    other = GenericFakeChatModel(messages=iter([AIMessage("All is well.", usage_metadata=USED)]))
    async with kv.tool("shell", args={"cmd": "ls"}):
        return {"messages": [await other.ainvoke(state["messages"])]}


steps = StateGraph(MessagesState)
steps.add_node("plan", plan)
steps.add_node("act", act)
steps.add_edge(START, "plan")
steps.add_edge("plan", "act")
agent = kv.attach(steps.compile())


class Asked(TypedDict, total=False):
    thread: str
    told: dict[str, Any]


def tell(state: Asked) -> Any:
    bill = kv.report(state["thread"])
    tools = [call.tool for call in bill.tools]
    return {"told": {"calls": bill.usage.calls, "tokens": bill.usage.total_tokens, "tools": tools}}


async def block(state: Asked) -> Any:
    time.sleep(0.01)
    return {"told": {}}


bill = StateGraph(Asked).add_node("tell", tell).add_edge(START, "tell").compile()
blocks = StateGraph(Asked).add_node("block", block).add_edge(START, "block").compile()
"""


def python_of_the_server() -> str:
    """The interpreter that has the server; skipped, with the reason, where there is none."""
    named = os.environ.get(VENV)
    if named:
        return str(Path(named) / "bin" / "python")
    if importlib.util.find_spec("langgraph_api") is None or importlib.util.find_spec("langgraph_cli") is None:
        pytest.skip(f"langgraph-cli[inmem] is not installed, and {VENV} names no environment that has it")
    return sys.executable


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(folder: Path) -> Iterator[tuple[httpx.Client, Path]]:
    """A server over the graphs above, and the file with all that it wrote."""
    python, port = python_of_the_server(), free_port()
    (folder / "shared.py").write_text(textwrap.dedent(SHARED))
    (folder / "graphs.py").write_text(textwrap.dedent(GRAPHS))
    names = {name: f"./graphs.py:{name}" for name in ("agent", "bill", "blocks")}
    (folder / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": names}))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LANGSMITH_", "LANGCHAIN_"))}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]),
        "CELL_LEDGER": f"sqlite:///{folder / 'ledger.db'}",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGGRAPH_NO_VERSION_CHECK": "true",
        "LANGSMITH_TRACING": "false",
        "NO_COLOR": "1",
    }
    argv = [python, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload", "--port", str(port)]
    log = folder / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            argv, cwd=folder, env=env, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
                _await_start(client, server, log)
                yield client, log
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(30)


def _await_start(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()
        try:
            if client.get("/ok").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def run(client: httpx.Client, graph: str, given: dict[str, Any], thread: str | None = None) -> Any:
    """A run to its end: on a thread, or on none."""
    path = f"/threads/{thread}/runs/wait" if thread else "/runs/wait"
    return client.post(path, json={"assistant_id": graph, "input": given}).raise_for_status().json()


def test_runs_of_two_threads_are_billed_to_their_threads_and_nothing_blocks(tmp_path) -> None:
    """Side by side and one after the other; and the server's detector of blocking calls does find one that blocks."""
    one, two = str(uuid.uuid4()), str(uuid.uuid4())
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    with serving(tmp_path) as (client, log):
        for thread in (one, two):
            client.post("/threads", json={"thread_id": thread}).raise_for_status()
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda thread: run(client, "agent", asked, thread), (one, two)))
        assert [["hi", "Fine.", "All is well."]] * 2 == [
            [message["content"] for message in answer["messages"]] for answer in answers
        ]
        run(client, "agent", asked, two)
        bills = [run(client, "bill", {"thread": thread})["told"] for thread in (one, two)]
        said = log.read_text()
        refused = run(client, "blocks", {})
    assert [(2, ["shell"]), (4, ["shell", "shell"])] == [(told["calls"], told["tools"]) for told in bills]
    assert 1001 < bills[0]["tokens"] < 2002 < bills[1]["tokens"]
    assert "locking" not in said
    assert "BlockingError" == refused["__error__"]["error"]
    assert "agentkv" not in "\n".join(line for line in said.splitlines() if "warning" in line or "error" in line)
