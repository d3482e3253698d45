"""`agentkv simulate`: tables, JSON, plots, refusals."""

import json

import pytest
from typer.testing import CliRunner

from agentkv.cli import app
from agentkv.errors import ConfigError

SMALL = ["simulate", "--sessions", "4", "--agents", "2", "--policy", "lru,lazy,belady,infinite"]


def invoke(*extra):
    return CliRunner().invoke(app, [*SMALL, *extra])


def test_the_json_holds_every_policy_with_ratios_and_the_gap():
    """Parsed strictly: no NaN, no infinity."""
    result = invoke("--json", "--seeds", "2")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout, parse_constant=pytest.fail)
    assert ["lru", "lazy", "belady", "infinite"] == list(told["policies"])
    assert 1.0 == told["policies"]["lru"]["vs_lru"]["task_mean_s"]["mean"]
    assert told["policies"]["lazy"]["figures"]["stall_p95_s"]["half"] is not None


def test_the_table_has_a_line_for_each_policy_and_says_what_was_skipped():
    """For people."""
    result = invoke()
    assert result.exit_code == 0, result.output
    assert {"lru", "lazy", "belady", "infinite"} <= {
        line.split()[0] for line in result.stdout.splitlines() if line.split()
    }
    assert "0 skipped" in result.stdout


def test_the_plot_is_written(tmp_path):
    """SVG with the tiers and the lanes."""
    path = tmp_path / "run.svg"
    assert invoke("--plot", str(path), "--policy", "lazy").exit_code == 0
    assert "device" in path.read_text(encoding="utf-8") or path.stat().st_size > 1000


def test_a_trace_file_is_read(tmp_path):
    """Our own format; and both sources at once are refused."""
    from agentkv.sim.synthetic import synthetic
    from agentkv.sim.trace import write

    path = tmp_path / "t.jsonl"
    write(path, synthetic(sessions=3).sessions, source="made up")
    result = invoke("--trace", str(path), "--policy", "lazy", "--json")
    assert result.exit_code == 0, result.output
    assert "4 sessions" in json.loads(result.stdout)["workload"]
    assert isinstance(invoke("--trace", str(path), "--synthetic").exception, ConfigError)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--policy", "lasy"],
        ["--policy", ","],
        ["--gpu", "h1000"],
        ["--plot", "run.gif"],
        ["--window", "99999", "--device-memory", "1GiB"],
    ],
)
def test_what_cannot_be_simulated_is_refused_before_it_runs(wrong):
    """One sentence each."""
    assert isinstance(invoke(*wrong).exception, ConfigError)


def test_an_interrupt_ends_with_130_and_without_a_traceback(monkeypatch):
    """Ctrl-C in the middle of a run."""
    from agentkv.sim import compare

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", interrupted)
    result = invoke()
    assert 130 == result.exit_code
    assert "interrupted" in result.stderr
