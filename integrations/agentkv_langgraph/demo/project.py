"""The code base that the demo's agents work on: the bundled sample or the user's own, copied.

Covers where it is, which files it has and which programs can be run on it. What is run on it is `worklist.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentkv.errors import ConfigError
from agentkv.units import MIB

SAMPLE = Path(__file__).parent / "sample"
_SKIPPED = {
    ".git",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "build",
    "dist",
    ".tox",
    ".mypy_cache",
    ".ruff_cache",
}
_LARGEST_BYTES = 8 * MIB
_WORTH_READING_BYTES = 200
_TEST_FILE = re.compile(r"(^|/)test_[^/]*\.py$|_test\.py$")
_COMMITS = (("Stock and prices", "*.toml README.md parcel/stock.py parcel/pricing.py"), ("Routes", "parcel/routes.py"), ("Demand, search and tests", "."))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A code base on disk: tools run in `root`, git reads `original`. A program that is missing is None."""

    root: Path
    original: Path
    files: tuple[str, ...]
    python: str | None
    ruff: str | None
    git: str | None
    env: Mapping[str, str]

    @property
    def tests(self) -> tuple[str, ...]:
        """Its test files, relative to the root."""
        return tuple(path for path in self.files if _TEST_FILE.search(path))

    @property
    def sources(self) -> tuple[str, ...]:
        """Its Python files that are no tests and hold something worth reading."""
        python = (path for path in self.files if path.endswith(".py") and not _TEST_FILE.search(path))
        return tuple(path for path in python if (self.root / path).stat().st_size >= _WORTH_READING_BYTES)


def sample_project(run_dir: Path) -> Project:
    """A fresh copy of the bundled project under `run_dir`, with a git history where git is installed."""
    root = run_dir / "parcel"
    shutil.copytree(SAMPLE, root, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    git = shutil.which("git")
    if git is not None:
        _commit_history(git, root)
    return _project(root, root, run_dir)


def user_project(repo: Path, run_dir: Path) -> Project:
    """The user's own code base: a copy under `run_dir`, since test suites and their plugins write where they run.

    Only git reads the original, and the tests run under its own virtual environment where it has one.
    """
    if not repo.is_dir():
        raise ConfigError(f"--repo {repo} is no folder")
    original = repo.resolve()
    files = _files(original)
    if not files:
        raise ConfigError(f"--repo {repo} holds no files that the demo could work on")
    root = run_dir / original.name
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(original / name, root / name, follow_symlinks=False)
    return _project(root, original, run_dir)


def _project(root: Path, original: Path, run_dir: Path) -> Project:
    return Project(
        root=root,
        original=original,
        files=_files(root),
        python=_python_with_pytest(original),
        ruff=_ruff(),
        git=shutil.which("git") if (original / ".git").exists() else None,
        env=_quiet_env(run_dir),
    )


def _files(root: Path) -> tuple[str, ...]:
    """The files that git tracks, or all but the usual caches; what is larger than a source file is left out."""
    return tuple(name for name in _listed(root) if _is_small_file(root / name))


def _listed(root: Path) -> list[str]:
    git = shutil.which("git")
    if git is not None and (root / ".git").exists():
        listed = subprocess.run(  # noqa: S603  fixed arguments
            [git, "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False, timeout=30
        )
        if listed.returncode == 0 and listed.stdout:
            return listed.stdout.split("\0")[:-1]
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        found += [str((Path(folder) / name).relative_to(root)) for name in sorted(names)]
    return found


def _is_small_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= _LARGEST_BYTES


def _python_with_pytest(root: Path) -> str | None:
    """The project's own virtual environment if it has pytest, else ours."""
    own = root / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    for python in [str(own)] * own.exists() + [sys.executable]:
        asked = subprocess.run(  # noqa: S603  fixed arguments
            [python, "-c", "import pytest"], capture_output=True, check=False, timeout=60
        )
        if asked.returncode == 0:
            return python
    return None


def _ruff() -> str | None:
    beside = Path(sys.executable).parent / "ruff"
    return str(beside) if beside.exists() else shutil.which("ruff")


def _quiet_env(run_dir: Path) -> Mapping[str, str]:
    """The tools' environment: no colours, no questions, and every cache under `run_dir`."""
    scratch = run_dir / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    ours = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "RUFF_NO_CACHE": "true",
        "MYPY_CACHE_DIR": str(scratch / "mypy"),
        "COVERAGE_FILE": str(scratch / "coverage"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "TMPDIR": str(scratch),
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "100",
    }
    return {**os.environ, **ours}


def _commit_history(git: str, root: Path) -> None:
    who = ["-c", "user.name=parcel", "-c", "user.email=parcel@example.invalid", "-c", "commit.gpgsign=false"]

    def run(*arguments: str) -> None:
        subprocess.run(  # noqa: S603  fixed arguments
            [git, "-C", str(root), *who, *arguments], capture_output=True, check=True, timeout=30
        )

    run("init", "-q", "-b", "main")
    for message, paths in _COMMITS:
        run("add", *paths.split())
        run("commit", "-q", "-m", message)
