"""The benchmark script on a CPU, and with nothing installed but what a bare machine with a GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "structlog", "langgraph", "langchain_core", "openai", "sqlalchemy", "platformdirs", "psutil", "tiktoken",
    "starlette", "gguf", "accelerate", "cuda", "agentkv_langgraph",
)  # fmt: skip
BARE = f"""
import importlib.machinery, runpy, sys

find = importlib.machinery.PathFinder.find_spec

class Without:
    def __call__(self, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else find(name, path, target)

importlib.machinery.PathFinder.find_spec = Without()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script(*arguments):
    """(exit status, the JSON objects that it printed, what it said on standard error)."""
    command = [sys.executable, "-c", BARE, str(ROOT / "benchmarks/gpu.py"), "--json", *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_every_section_runs_on_a_cpu_with_torch_and_its_kin_only(tmp_path):
    """One object per section as it ends, one with everything last, nothing skipped and nothing left out."""
    code, printed, said = script("--device", "cpu", "--small", "--scratch", str(tmp_path))
    assert 0 == code, said
    *sections, last = printed
    assert ["link", "torture", "arena", "resume", "decode", "slab"] == [one["section"] for one in sections]
    assert sections == last["sections"]
    assert [] == last["summary"]["skipped"] == last["summary"]["failed"] == last["summary"]["missed"]
    assert all(one["figures"] and not one["notes"] for one in sections)
    by_name = {one["section"]: one for one in sections}
    assert 0 == by_name["torture"]["figures"]["mismatches"]
    assert 1000 == by_name["torture"]["figures"]["operations"]
    assert {"8_kib", "32_kib", "192_kib", "1024_kib", "2048_kib", "5120_kib"} == set(by_name["link"]["figures"])
    assert {"64", "256"} == set(by_name["resume"]["figures"])
    judged = {line["what"]: line["ok"] for one in sections for line in one["lines"]}
    assert None is judged["h2d at 192 KiB"]
    assert None is judged["p99 between tokens, with copies"]


def test_a_section_that_does_not_fit_the_budget_says_so():
    """Instead of running into somebody's time limit."""
    code, printed, said = script("--device", "cpu", "--small", "--budget-s", "0.5", "--sections", "arena,slab")
    assert 0 == code, said
    assert ["arena", "slab"] == printed[-1]["summary"]["skipped"]
    assert all("left of the budget" in one["skipped"] for one in printed[:-1])


@pytest.mark.slow
def test_this_folder_runs_without_our_other_packages():
    """As its ini file says, tests that start processes excepted."""
    bare = BARE.replace(
        'runpy.run_path(sys.argv[0], run_name="__main__")', "import pytest; sys.exit(pytest.main(sys.argv))"
    )
    arguments = ["-c", str(ROOT / "tests/gpu/bare.ini"), str(ROOT / "tests/gpu"), "-q", "-k", "not bare_machine"]
    command = [sys.executable, "-c", bare, *arguments]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=110, check=False, env=env)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert " passed" in done.stdout
