"""The first model call of a process: the tokeniser's table loads beside it, and nobody's event loop waits for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, threading, time
from agentkv import AgentKV, ScriptedEngine
from agentkv.context import tokens
from agentkv_langgraph import AgentKVCallback
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult

class Model(BaseChatModel):
    @property
    def _llm_type(self): return "m"
    def _generate(self, *a, **k): return ChatResult(generations=[ChatGeneration(message=AIMessage("one two three"))])
    async def _agenerate(self, *a, **k): return self._generate()

callers = []
load = tokens._load
def loaded(name):
    callers.append((threading.current_thread().name, threading.current_thread().daemon))
    time.sleep(float(sys.argv[2]))
    return load(name)
tokens._load = loaded

def bill(kv):
    (call,) = kv.report("t").calls
    return call.usage.output_tokens, call.estimated

with AgentKV.with_engine(ScriptedEngine([])) as kv:
    model = Model(callbacks=[AgentKVCallback(kv)])
    with kv.task("t", final=False):
        if sys.argv[1] == "loop":
            asyncio.run(model.ainvoke("x"))
        if sys.argv[1] == "thread":
            model.invoke("x")
    print([] if sys.argv[1] == "exit" else bill(kv))
    print(callers)
"""


def ran(*args: str) -> tuple[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", PROGRAM, *args]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    first, second = done.stdout.splitlines()[-2:]
    return first, second


def test_in_an_event_loop_the_first_count_is_an_estimate_and_waits_for_nothing() -> None:
    """The table would take ten minutes here; the process does not wait for it at its end either."""
    counted, callers = ran("loop", "600")
    assert counted.endswith(", True)")
    assert "[('agentkv-tokens', True)]" == callers


def test_in_a_thread_the_first_count_is_exact() -> None:
    """It waits for what loads already."""
    assert ("(3, True)", "[('agentkv-tokens', True)]") == ran("thread", "0.1")


@pytest.mark.parametrize("seconds", ["0", "0.05"])
def test_a_process_may_end_while_the_table_loads(seconds) -> None:
    """At any moment of it."""
    for _ in range(2):
        assert "[]" == ran("exit", seconds)[0]
