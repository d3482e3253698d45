"""`make engines` without engines: what is there stays, what fails is reported, what runs is ended."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("make_engines", Path(__file__).with_name("make.py"))
assert _spec is not None
assert _spec.loader is not None
make = sys.modules["make_engines"] = importlib.util.module_from_spec(_spec)  # its dataclasses look themselves up
_spec.loader.exec_module(make)
NONE = make.Engine(
    name="none", wanted={"no-such-distribution": "1."}, pip=[["install", "--no-index", "no-such-distribution==1.0"]],
    tests=["test_nothing*.py"], size="0 MB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A checkout's folder with an environment that is ours already: making one takes seconds."""
    monkeypatch.setattr(make, "FOLDER", tmp_path)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    for name in ("none", "there"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    site = tmp_path / "there" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "thing-1.5.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.5\n")
    return tmp_path


@pytest.mark.parametrize(("version", "there"), [("1.", True), ("1.5", True), ("", True), ("2.", False)])
def test_what_is_there_is_seen_by_its_version(version, there):
    """Without importing it."""
    assert there is make.installed(replace(NONE, name="there", wanted={"thing": version}))


def test_one_that_cannot_be_installed_is_reported_and_the_others_go_on(monkeypatch, capsys):
    """The table has the reason, and the exit code says that it was not all."""
    monkeypatch.setattr(make, "ENGINES", (NONE, replace(NONE, name="there", wanted={"thing": "1.5"})))
    monkeypatch.setattr(sys, "argv", ["make.py", "--install-only"])
    assert 1 == make.main()
    told = capsys.readouterr().out
    assert "none       not installed" in told
    assert "No matching distribution" in told
    assert "there      was there" in told


def test_an_engine_without_tests_is_not_good(monkeypatch, capsys):
    """Nothing tested is no success."""
    monkeypatch.setattr(make, "ENGINES", (replace(NONE, name="there", wanted={"thing": "1.5"}),))
    monkeypatch.setattr(sys, "argv", ["make.py"])
    assert 1 == make.main()
    assert "there is no tests/engines/test_nothing" in capsys.readouterr().out


def test_what_takes_too_long_is_ended_with_what_it_started(folder):
    """Servers of tests, too."""
    child = folder / "child"
    script = (
        "import subprocess, sys, time, signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    runs = make.Runs(1.0)
    runs.patience_s = 0.2
    why = runs.run([sys.executable, "-c", script], folder / "log", "a sleep", 1.5)
    assert "stopped after 2 s" == why
    pid, ends = int(child.read_text()), time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and _runs(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    """Whether it lives and is no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
