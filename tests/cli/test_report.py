"""`agentkv report`: one task or all, as text, JSON or a page, from a saved ledger."""

import json
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from agentkv.budget.facts import Fact, ModelCall, OutcomeFact, TaskFact
from agentkv.budget.store import open_ledger
from agentkv.cli import app
from agentkv.core.usage import Usage
from agentkv.errors import ConfigError

DAY_MS = 86_400_000
NOON_MS = 1_780_056_000_000  # 2026-05-29 12:00 UTC


def call(task, at_ms=NOON_MS, cost="0.25", tokens=100):
    usage = Usage(input_tokens=tokens, output_tokens=10, calls=1)
    return ModelCall(task=task, at_ms=at_ms, usage=usage, cost_usd=None if cost is None else Decimal(cost))


def save(*facts: Fact):
    ledger = open_ledger(None)
    for fact in facts:
        ledger.append(fact)
    ledger.close()


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert code == result.exit_code, result.output
    return result.output


def test_one_task_as_text_as_json_and_as_a_page(tmp_path):
    """The same bill three times."""
    save(TaskFact(task="t", at_ms=NOON_MS), call("t"))
    assert "cost                    $0.25" in run("t")
    assert "0.25" == json.loads(run("t", "--json"))["cost_usd"]
    run("t", "--html", str(tmp_path / "bill.html"), "--zone", "Asia/Shanghai")
    assert "2026-05-29 20:00:00 CST" in (tmp_path / "bill.html").read_text(encoding="utf-8")


def test_without_a_task_the_names_are_listed_the_latest_first():
    """Clean of what would move the cursor; JSON has them as they are."""
    save(call("a"), call("b\x1b[2J"))
    assert ["b?[2J", "a"] == run().splitlines()
    assert ["b\x1b[2J", "a"] == json.loads(run("--json"))


def test_all_tasks_with_what_a_completed_one_costs_and_each_day():
    """Failed and abandoned tasks are charged to the completed one of their type; the zone is named."""
    save(
        call("won"), OutcomeFact(task="won", task_type="fix", completed=True, at_ms=NOON_MS),
        call("lost"), OutcomeFact(task="lost", task_type="fix", completed=False, at_ms=NOON_MS),
        call("other", at_ms=NOON_MS + DAY_MS),
    )  # fmt: skip
    told = json.loads(run("--all", "--json", "--zone", "Asia/Shanghai"))
    fix = next(one for one in told["types"] if one["task_type"] == "fix")
    assert (1, 1, "0.5", 220.0) == (
        fix["completed"], fix["failed"], fix["cost_per_completed_usd"], fix["tokens_per_completed"],
    )  # fmt: skip
    assert [("2026-05-29", "0.50"), ("2026-05-30", "0.25")] == [(d["day"], d["cost_usd"]) for d in told["days"]]
    text = run("--all", "--zone", "Asia/Shanghai")
    assert "Per day (Asia/Shanghai)" in text
    assert "3 tasks, 3 model calls, 330 tokens, $0.75" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_since_leaves_out_what_was_before_in_the_zone_that_was_given():
    """20:00 in Shanghai is noon in UTC."""
    save(call("t"), call("t", at_ms=NOON_MS + 60_000))
    assert 2 == json.loads(run("t", "--json", "--since", "2026-05-29T20:00", "--zone", "Asia/Shanghai"))["model_calls"]
    assert 1 == json.loads(run("t", "--json", "--since", "2026-05-29T20:01", "--zone", "Asia/Shanghai"))["model_calls"]
    assert "Nothing in that time of task 't'" in run("t", "--since", "2030-01-01", code=1)
    assert [] == json.loads(run("--json", "--since", "2030-01-01"))
    assert "1 task," in run("--all", "--since", "2026-05-29")


def test_all_runs_of_a_task_can_be_added_up():
    """Yesterday's process and today's; by default the last one, and a line says that there are others."""
    save(call("t"))
    assert "earlier run" not in CliRunner().invoke(app, ["report", "t"]).stderr
    save(call("t"))
    one, both = (CliRunner().invoke(app, ["report", "t", "--json", *more]) for more in ([], ["--all-runs"]))
    assert (1, 2) == tuple(json.loads(result.stdout)["model_calls"] for result in (one, both))
    assert ("This is the last run; an earlier run of the task spent more: --all-runs adds them up.\n", "") == (
        one.stderr, both.stderr,
    )  # fmt: skip


def test_all_tasks_means_all_their_runs():
    """What a run of yesterday spent was spent, although the task went on today."""
    save(call("t"))
    save(call("t"), call("u"))
    save(call("t", at_ms=NOON_MS + DAY_MS))
    told = json.loads(run("--all", "--json", "--zone", "UTC"))
    assert [("t", 3, 3), ("u", 1, 1)] == [(one["task"], one["runs"], one["model_calls"]) for one in told["tasks"]]
    assert [("2026-05-29", "0.75"), ("2026-05-30", "0.25")] == [(d["day"], d["cost_usd"]) for d in told["days"]]
    later = json.loads(run("--all", "--json", "--since", "2026-05-30T00:00+00:00"))
    assert [("t", 1)] == [(one["task"], one["runs"]) for one in later["tasks"]]
    assert ["t"] == json.loads(run("--json", "--since", "2026-05-30T00:00+00:00"))


def test_many_tasks_are_read_in_batches(monkeypatch):
    """Whatever the size of a batch, the bills are the same."""
    save(*(call(f"t{n}") for n in range(7) for _ in range(n + 1)))
    whole = run("--all", "--json", "--zone", "UTC")
    monkeypatch.setattr("agentkv.budget.readbills._FACTS_AT_ONCE", 5)
    assert whole == run("--all", "--json", "--zone", "UTC")
    assert [f"t{n}" for n in range(6, -1, -1)] == [one["task"] for one in json.loads(whole)["tasks"]]


def test_a_task_that_nobody_knows_is_told_apart():
    """Exit code 1 and where to look; hostile names are quoted."""
    save(call("t"))
    assert 'No task "\'; DROP TABLE agentkv_fact; --"' in run("'; DROP TABLE agentkv_fact; --", code=1)
    assert "t" in run()


@pytest.mark.parametrize(
    "arguments",
    [["--html", "x.html"], ["t", "--html", "x.html", "--json"], ["t", "--all"], ["t", "--zone", "Mars/Olympus"],
     ["t", "--html", "/nowhere/x.html"]],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(arguments):
    """With what to write instead."""
    save(call("t"))
    with pytest.raises(ConfigError):
        run(*arguments)


def test_a_page_replaces_an_older_one_whole_and_is_its_owners_alone(tmp_path):
    """Nothing of it is left lying about."""
    save(call("t"))
    page = tmp_path / "bill.html"
    page.write_text("old", encoding="utf-8")
    run("t", "--html", str(page))
    assert [page] == [one for one in tmp_path.iterdir() if one.is_file()]
    assert 0o600 == page.stat().st_mode & 0o777


def test_totals_that_were_kept_of_a_pruned_task_are_told():
    """Its events are gone."""
    from agentkv.budget.prune import prune
    from agentkv.budget.store import read_ledger

    save(call("t"))
    saved = read_ledger(None)
    prune(saved.database, older_than_s=-60, keep_bills=True)
    saved.close()
    assert "Only totals are left of 't'" in run("t")
    assert 110 == json.loads(run("t", "--json"))["total_tokens"]
