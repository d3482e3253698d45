"""A small Python project that is generated on the spot, and the real output of real commands in it.

Covers the files (a package with one module and one test file per subject, each with one defect), its git history and
what cat, grep, ls, git, pytest and ruff print there. Does not cover the loops that are made of it: `context_loops.py`.
The same call gives the same bytes: dates are fixed, durations and the folder's name are replaced in the output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUBJECTS = (
    "invoice", "refund", "tariff", "voucher", "deposit", "payout", "receipt", "subsidy", "penalty", "mandate",
    "batch", "quota", "royalty", "pension", "escrow", "dividend", "annuity", "bursary", "stipend", "surety",
)  # fmt: skip

_MODULE = '''"""{Name}s: reading them from the import file, totals, and which of them are late."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ledgerly.errors import LedgerError

{NAME}_LIMIT_CENTS = {limit}


@dataclass(frozen=True)
class {Name}:
    """One {name}; amounts are in cents, never in floats."""

    number: str
    amount_cents: int
    days_open: int = 0


def parse_{name}(row: dict[str, str]) -> {Name}:
    """A row of the import file. Raises LedgerError naming the columns that are missing."""
    missing = {{"number", "amount"}} - set(row)
    if missing:
        raise LedgerError(f"{name} row lacks {{', '.join(sorted(missing))}}")
    return {Name}(number=row["number"], amount_cents={parse}, days_open=int(row.get("days", 0)))


def {name}_total(items: list[{Name}]) -> int:
    """The sum in cents; whatever is above the limit counts as the limit."""
    return sum({total} for item in items)


def late_{name}s(items: list[{Name}], after_days: int = {days}) -> list[{Name}]:
    """Those that have been open for at least `after_days` days, the oldest first."""
    late = [item for item in items if {late}]
    return sorted(late, key=lambda item: -item.days_open)
'''

_TESTS = """from ledgerly.errors import LedgerError
from ledgerly.{name} import {NAME}_LIMIT_CENTS, {Name}, late_{name}s, parse_{name}, {name}_total

import pytest

ROWS = [{{"number": "{N}-{{n:04d}}".format(n=n), "amount": str(n * 125), "days": str(n)}} for n in range(1, {rows})]


def test_a_row_becomes_a_{name}():
    assert parse_{name}(ROWS[0]) == {Name}(number="{N}-0001", amount_cents=12500, days_open=1)


def test_a_row_without_amount_is_refused():
    with pytest.raises(LedgerError, match="amount"):
        parse_{name}({{"number": "{N}-0001"}})


def test_the_total_is_cut_at_the_limit():
    items = [parse_{name}(row) for row in ROWS] + [{Name}(number="x", amount_cents={NAME}_LIMIT_CENTS * 2)]
    assert {name}_total(items) == sum(min(n * 12500, {limit}) for n in range(1, {rows})) + {limit}


def test_late_means_at_least_so_many_days():
    items = [parse_{name}(row) for row in ROWS]
    assert [item.days_open for item in late_{name}s(items)] == list(range({rows} - 1, {days} - 1, -1))
"""

_GOOD = {
    "parse": 'int(row["amount"]) * 100',
    "total": "min(item.amount_cents, {NAME}_LIMIT_CENTS)",
    "late": "item.days_open >= after_days",
}
_BAD = (
    ("late", "item.days_open > after_days"),
    ("total", "item.amount_cents"),
    ("parse", 'int(row["amount"])'),
    ("late", "item.days_open >= after_days + 1"),
    ("total", "max(item.amount_cents, {NAME}_LIMIT_CENTS)"),
)

_REPLAY = '''"""Replays an import and tells what it does; `python -m ledgerly.replay LINES`."""

import sys

from ledgerly import SUBJECTS


def main(lines: int) -> None:
    for number in range(lines):
        subject = SUBJECTS[number * 7 % len(SUBJECTS)]
        stamp = f"2026-03-{number // 400 % 28 + 1:02d}T{number // 60 % 24:02d}:{number % 60:02d}:07Z"
        if number == lines * 5 // 8:
            print(f"{stamp} ERROR import: row 48213 of data/march.csv: amount 9144031 is above the clearing cap 8500000")
        elif number % 97 == 13:
            print(f"{stamp} WARNING {subject}: retrying the write of {subject}-{number:05d} after a lock timeout")
        else:
            print(f"{stamp} INFO {subject}: wrote {subject}-{number:05d} in {number * 31 % 90 + 3} ms, queue {number % 40}")


main(int(sys.argv[1]))
'''

_EXPORT = '''"""Dumps the accounts as the API would; `python -m ledgerly.export COUNT`."""

import json
import sys

from ledgerly import SUBJECTS


def main(count: int) -> None:
    rows = []
    for n in range(count):
        row = {"id": f"acct-{n:05d}", "kind": SUBJECTS[n * 3 % len(SUBJECTS)], "balance_cents": n * 7919 % 1000003}
        row |= {"status": "active", "owner": {"name": f"owner {n}", "region": ["north", "south"][n % 2]}, "tags": []}
        if n == count * 3 // 5:
            row |= {"status": "frozen", "error": "sanctions hold until 2026-09-30", "tags": ["manual-review"]}
        rows.append(row)
    print(json.dumps({"version": 3, "count": count, "accounts": rows}, indent=1))


main(int(sys.argv[1]))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """What is wrong in a subject's module: the line as it is and as it should be."""

    subject: str
    path: str
    line: int
    wrong: str
    right: str


class Project:
    """The project in `folder`, with a git history and one defect per subject."""

    def __init__(self, folder: Path, subjects: int) -> None:
        self.folder = folder
        self.subjects = SUBJECTS[:subjects]
        self._env = {
            **os.environ,
            "PYTHONPATH": "src",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "COLUMNS": "100",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_PAGER": "cat",
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
            "TZ": "UTC",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        for role in ("AUTHOR", "COMMITTER"):
            self._env |= {f"GIT_{role}_NAME": "Kim Doe", f"GIT_{role}_EMAIL": "kim@example.org"}
        self._commits = 0
        self._write()
        self.defects = tuple(self._defect(number) for number in range(subjects))

    def run(self, command: str) -> str:
        """What `command` prints, both streams, with what changes from run to run taken out."""
        done = subprocess.run(  # noqa: S602  the commands are ours
            command, shell=True, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=120,
        )  # fmt: skip
        return self._steady(done.stdout.decode())

    def pytests(self, arguments: list[list[str]]) -> list[str]:
        """What each of these pytest runs prints; one process for all, because starting one costs half a second."""
        code = (
            "import contextlib, io, json, sys, pytest\n"
            "out = []\n"
            "for arguments in json.loads(sys.argv[1]):\n"
            "    text = io.StringIO()\n"
            "    with contextlib.redirect_stdout(text):\n"
            "        pytest.main([*arguments, '-p', 'no:cacheprovider', '--color=no'])\n"
            "    out.append(text.getvalue())\n"
            "print(json.dumps(out))\n"
        )
        import json

        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(arguments)], cwd=self.folder, env=self._env, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        return [self._steady(text) for text in json.loads(done.stdout.decode().splitlines()[-1])]

    def commit(self, subject: str, body: str = "") -> str:
        """Commit everything; dates are a day apart, so the hashes are the same in every run."""
        self._commits += 1
        date = f"2026-02-{self._commits % 28 + 1:02d}T09:{self._commits % 60:02d}:00+0000"
        self._env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        quoted = f"-m '{subject}'" + (f" -m '{body}'" if body else "")
        return self.run(f"git add -A && git commit {quoted}")

    def _write(self) -> None:
        package, tests = self.folder / "src" / "ledgerly", self.folder / "tests"
        package.mkdir(parents=True)
        tests.mkdir()
        self.run("git init -q -b main")
        (package / "errors.py").write_text('class LedgerError(Exception):\n    """A row that cannot be used."""\n')
        (package / "__init__.py").write_text(f'"""Ledgerly."""\n\nSUBJECTS = {SUBJECTS!r}\n')
        (package / "replay.py").write_text(_REPLAY)
        (package / "export.py").write_text(_EXPORT)
        (self.folder / "pyproject.toml").write_text(
            '[project]\nname = "ledgerly"\nversion = "0.4.0"\n\n[tool.pytest.ini_options]\nasyncio_mode = "auto"\n'
            '\n[tool.ruff]\nline-length = 100\n\n[tool.ruff.lint]\nselect = ["E", "F", "I"]\n'
        )
        self.commit("Start of the project", "The package, its errors, and two commands.")
        for number in range(len(self.subjects)):
            self._subject(number)

    def _subject(self, number: int) -> None:
        name = self.subjects[number]
        names = {"name": name, "Name": name.capitalize(), "NAME": name.upper(), "N": name[:2].upper()}
        values = {"limit": 40_000 + 1_750 * number, "days": 14 + number % 9, "rows": 31 + number % 7}
        good = {key: text.format(**names) for key, text in _GOOD.items()}
        key, wrong = _BAD[number % len(_BAD)]
        bad = {**good, key: wrong.format(**names)}
        module = self.folder / "src" / "ledgerly" / f"{name}.py"
        module.write_text(_MODULE.format(**names, **values, **bad))
        (self.folder / "tests" / f"test_{name}.py").write_text(_TESTS.format(**names, **values))
        self.commit(
            f"{name.capitalize()}s are read, summed and chased", f"Asked for by finance, ticket FIN-{410 + number}."
        )

    def _defect(self, number: int) -> Defect:
        name = self.subjects[number]
        key, wrong = _BAD[number % len(_BAD)]
        path = f"src/ledgerly/{name}.py"
        wrong, right = (text.format(NAME=name.upper()) for text in (wrong, _GOOD[key]))
        lines = (self.folder / path).read_text().splitlines()
        ahead = {"late": "if ", "total": "sum(", "parse": "amount_cents="}[key]
        line = next(index for index, text in enumerate(lines, 1) if ahead + wrong in text)
        return Defect(subject=name, path=path, line=line, wrong=wrong, right=right)

    def _steady(self, text: str) -> str:
        text = text.replace(str(self.folder), "/srv/ledgerly")
        text = re.sub(r"\bin \d+\.\d+s\b", "in 0.05s", text)
        text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x7f2a10c4d0", text)
        return re.sub(r"^plugins: .*\n|^platform .*\n|^configfile: .*\n|^asyncio: .*\n", "", text, flags=re.MULTILINE)
