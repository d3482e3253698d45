"""`agentkv demo --engine`: the same agents on somebody else's server, with its hits and receipts at the end."""

from __future__ import annotations

import json

import pytest
import typer
from agentkv_langgraph.demo import foreign
from agentkv_langgraph.demo.command import register
from rich.console import Console
from typer.testing import CliRunner

from agentkv.adapters.strict import StrictServer
from agentkv.errors import ConfigError


def run(*arguments):
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, arguments)


@pytest.mark.timeout(300)
def test_the_demo_runs_on_a_server_that_is_there(tmp_path, monkeypatch):
    """By its address: real graphs and tools, bills, a table of hits, and what became of the hints."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    file = tmp_path / "out.json"
    with StrictServer(answer="It lists two files.") as server:
        done = run("--engine", server.url, "--model", "m", "--tasks", "1", "--turns", "1", "--json", str(file))
        asked = [one for one in server.asked if one.path.endswith("completions")]
    assert 0 == done.exit_code, done.output
    assert "Closing table: calls after a tool" in done.output
    assert "Hints to unknown: 0 applied" in done.output
    assert len(asked) >= 3
    assert "unsupported" in str(json.loads(file.read_text())["run"]["stats"]["reach"])


@pytest.mark.parametrize("option", [["--compare"], ["--keep-s", "1"]])
def test_what_is_the_embedded_engines_own_is_refused(option):
    """There are no tiers of ours to compare."""
    done = run("--engine", "http://127.0.0.1:1/v1", *option)
    assert 0 != done.exit_code


def test_an_engine_that_nobody_knows_is_refused_with_what_there_is():
    """And one that is not installed with how to install it."""
    with pytest.raises(ConfigError, match="llamacpp, vllm"), foreign.served("tgi", model="m"):
        pass


def test_a_missing_engine_says_what_to_do(monkeypatch, tmp_path):
    """`make engines` in a checkout, an address without one."""

    class Example:
        @staticmethod
        def missing():
            return "vLLM is missing: make engines ARGS='--only vllm'"

        @staticmethod
        def installed():
            return False

    monkeypatch.setattr(foreign, "_example", lambda _: Example)
    for engine in ("vllm", "llamacpp"):
        with pytest.raises(ConfigError, match="make engines"), foreign.served(engine, model="m"):
            pass
    monkeypatch.undo()
    monkeypatch.setattr(foreign, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match="--engine http"), foreign.served("vllm", model="m"):
        pass


def test_the_plug_ins_address_is_set_for_the_run_only(monkeypatch):
    """Whatever it was before."""
    monkeypatch.delenv("AGENTKV_X", raising=False)
    with foreign._variable("AGENTKV_X", "/a"):
        assert "/a" == foreign.os.environ["AGENTKV_X"]
    assert "AGENTKV_X" not in foreign.os.environ


def test_a_run_without_calls_has_an_empty_table():
    """Nothing to divide by."""
    console = Console(record=True, width=100)
    console.print(foreign.closing_table(foreign.Outcome(bills={}, wall_s=0.0, stats={})))
    assert "all" in console.export_text()
    assert ["Hints to nobody: 0 applied, 0 advisory, 0 unsupported, 0 failed."] == foreign.receipts({})
