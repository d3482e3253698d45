"""`agentkv plan`: what is printed, its JSON, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.cli.machines import costs_from_options
from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.runtime.machine import Place, machine_digest
from agentkv.runtime.ratefiles import save_rates
from agentkv.sim.plan import FORMULAS
from agentkv.sim.synthetic import synthetic
from agentkv.sim.trace import write

MACHINE = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-80")


def run(*argv):
    ended = CliRunner().invoke(app, [*MACHINE, *argv])
    assert ended.exception is None, ended.output
    return ended.stdout


def test_the_plan_shows_inputs_tables_verdict_and_formulas():
    """A reader can redo every number."""
    shown = run("--tasks", "300", "--steps", "12", "--tokens-per-call", "1500")
    for words in ("300 tasks at a time of llama-3.1-8b on h100-80", "12 steps x 1 calls", "131,072 bytes a token",
                  "nowhere", "recompute", "times as many", "the context wall comes first", *FORMULAS):  # fmt: skip
        assert words in shown


def test_json_is_one_object_with_finite_numbers():
    """For programs."""
    told = json.loads(run("--json", "--disk", "0"), parse_constant=pytest.fail)
    assert {"inputs", "task", "kv_bytes_per_task", "capacity", "crossover", "break_even_tokens", "walls", "verdict",
            "too_long", "formulas"} == set(told)  # fmt: skip
    assert None is told["break_even_tokens"]["disk"]
    assert 12 == told["task"]["calls"]


def test_a_trace_replaces_the_numbers_and_its_skips_are_shown(tmp_path):
    """Calls, tokens and waits as recorded."""
    write(tmp_path / "t.jsonl", synthetic(sessions=5, steps=7).sessions)
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"cut')
    shown = run("--trace", str(tmp_path / "t.jsonl"))
    assert "5 sessions of t.jsonl" in shown
    assert "1 x cut last line" in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--model", "llama-3.1-9b", "--gpu", "h200"), "nearest known: llama-3.1-8b"),
        (("--model", "llama-3.1-8b", "--gpu", "h2000"), "nearest known: h200"),
        ((*MACHINE[1:], "--host", "lots"), "--host='lots'"),
        ((*MACHINE[1:], "--trace", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_1(argv, words):
    """Unknown names tell the nearest known."""
    ended = subprocess.run(
        [sys.executable, "-m", "agentkv.cli", "plan", *argv], capture_output=True, text=True, check=False
    )
    assert (1, "") == (ended.returncode, ended.stdout)
    assert words in ended.stderr
    assert 1 == ended.stderr.count("\n")


def test_this_machine_is_a_card_once_it_was_measured(tmp_path, monkeypatch):
    """`--gpu measured` takes what `agentkv calibrate` kept."""
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"nothing was.*agentkv calibrate"):
        costs_from_options("m", "measured", device_memory="1GiB")
    place = Place(machine=machine_digest(), cpu="c", cores=2, device="cpu", fingerprint="ab", model="m",
                  token_bytes=23_040, context_tokens=8192)  # fmt: skip
    rates = Rates(memcpy_bytes_s=9e9, h2d_bytes_s=8e9, d2h_bytes_s=7e9, prefill=Prefill(linear_s=1e-3))
    assert save_rates(place, rates) is not None
    costs = costs_from_options("m", "measured", device_memory="1GiB")
    assert (8e9, 7e9, 23_040, 1 << 30, None) == (
        costs.h2d_bytes_s, costs.d2h_bytes_s, costs.token_bytes, costs.device_bytes, costs.read_bytes_s,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--device-memory"):
        costs_from_options("m", "measured")
    with pytest.raises(ConfigError, match="leave --gpus"):
        costs_from_options("m", "measured", gpus=2, device_memory="1GiB")


def test_the_page_shows_what_is_really_printed(monkeypatch):
    """docs/plan.md's example, line for line."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = [line.rstrip() for line in run("--tasks", "300", "--steps", "12", "--tokens-per-call", "1500").splitlines()]
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert "\n".join(shown).rstrip() in page
