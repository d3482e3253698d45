"""Real outputs made on the spot: pytest, pip, gcc, git, a JSON API, downloads; and what must be left of each.

`real_logs(folder)` runs the commands and needs no network: servers and packages are made in the folder. `must_keep` is
computed from what was planted (the failing tests, the errors, the warnings), never by the rules under test; each is
asserted to be in the raw text. `medium_logs(folder)` are everyday outputs of one to three kilobytes.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS, FAILING = 300, (7, 19, 44, 73, 101, 128, 151, 177, 208, 233, 262, 291)
BROKEN_FIXTURE = 150
C_FILES, C_WARN, C_ERROR = 60, tuple(range(2, 60, 5)), (23, 41)
COMMITS = 45
ISSUES, ODD_ISSUES = 150, (37, 91)
DOWNLOAD_BYTES = 6_000_000
_ENV = {"LC_ALL": "C.UTF-8", "COLUMNS": "100", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_COLOR": "1"}
_GIT = ("git", "-c", "user.name=Kim Doe", "-c", "user.email=kim@example.org", "-c", "commit.gpgsign=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One output, the tool and command that printed it, and the pieces of lines that must survive."""

    text: str
    tool: str
    command: str
    must_keep: tuple[str, ...]


def real_logs(folder: Path | None = None) -> dict[str, Log]:
    """The fixed set of long outputs by name; takes about half a minute. `folder` is filled and left there if given."""
    with _folder(folder) as place:
        made = {
            "pytest -v": _pytest(place / "tests"),
            "pip install -v": _pip(place / "pip"),
            "pip install -v, failing": _pip_failing(place / "pip"),
            "gcc build": _gcc(place / "c"),
            "git log -p": _git(place / "git"),
            "json api": _json_api(place / "api"),
            "download": _download(place / "download"),
        }
    for name, log in made.items():
        lost = [piece for piece in log.must_keep if piece not in log.text]
        assert not lost, f"{name}: the command did not print what was planted: {lost[:3]}\n{log.text[-2000:]}"
    return made


def medium_logs(folder: Path | None = None) -> dict[str, Log]:
    """Everyday outputs of one to three kilobytes."""
    with _folder(folder) as place:
        tree = place / "project"
        _project(tree)
        commands = {
            "find": ("find src tests -name '*.py' | sort", ("store.py", "test_store.py")),
            "ls -la": ("ls -la src/shop", ("store.py", "cart.py")),
            "grep -rn": ("grep -rn 'def ' src | sort", ("def add_to_cart", "def total_of_store")),
            "grep -rn import": ("grep -rn 'import' src tests | sort", ("from shop.errors import ShopError",)),
            "ruff": (f"{sys.executable} -m ruff check --no-cache --isolated src", ("F401", "Found 10 errors")),
            "pytest": (
                f"{sys.executable} -m pytest -v -p no:cacheprovider tests/test_cart.py",
                ("1 failed, 9 passed",),
            ),
            "pytest, green": (f"{sys.executable} -m pytest -v -p no:cacheprovider tests/test_store.py", ("10 passed",)),
            "cat": ("cat src/shop/store.py", ("def total_of_store(",)),
            "cat -n": ("cat -n src/shop/store.py", ("def total_of_store(",)),
            "git diff": ("git diff", ("+    return sum(prices) + 1", "-    return sum(prices)")),
            "git log": ("git log --stat", ("Carts", "Stores")),
            "json": (f"{sys.executable} -m json.tool package.json", ('"left-pad-17"',)),
            "unittest": (
                f"{sys.executable} -m unittest -v unit_checks",
                ("FAILED (failures=1)", "AssertionError: 3 != 4"),
            ),
        }
        return {
            name: Log(text=_run(command, tree, PYTHONPATH="src"), tool="bash", command=command, must_keep=keep)
            for name, (command, keep) in commands.items()
        }


@contextlib.contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made).resolve()


def _run(command: str, folder: Path, **env: str) -> str:
    """What `command` prints, both streams as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON", "GIT_", "PIP_"))}
    done = subprocess.run(  # noqa: S602  the commands are ours
        command, shell=True, cwd=folder, env={**kept, **_ENV, **env}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300,
    )  # fmt: skip
    return done.stdout.decode("utf-8", "replace")


def _pytest(folder: Path) -> Log:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    per_file = 25
    for first in range(0, TESTS, per_file):
        lines = ["import pytest\n\n\ndef price(order):\n    return order * 101\n"]
        for number in range(first, first + per_file):
            wanted = f"{number * 101 + 1}" if number in FAILING else f"price({number})"
            if number == BROKEN_FIXTURE:
                lines.append(
                    "\n\n@pytest.fixture\ndef database():\n"
                    "    raise ConnectionRefusedError('no database at 127.0.0.1:5432')\n"
                )
            argument = "database" if number == BROKEN_FIXTURE else ""
            lines.append(
                f"\n\ndef test_the_price_of_order_{number}({argument}):\n    # an order costs what its items cost\n"
                f"    order = {number}\n    found = price(order)\n"
                f"    assert found == {wanted}, f'order {{order}} costs {{found}}'\n"
            )
        (folder / f"test_orders_{first // per_file:02d}.py").write_text("".join(lines))
    command = f"{sys.executable} -m pytest -v -p no:cacheprovider"
    text = _run(command, folder)
    keep = [f"test_orders_{number // per_file:02d}.py::test_the_price_of_order_{number}" for number in FAILING]
    keep += [f"AssertionError: order {number} costs {number * 101}" for number in FAILING]
    keep += [f"assert {number * 101} == {number * 101 + 1}" for number in FAILING]
    keep += [f"test_orders_{BROKEN_FIXTURE // per_file:02d}.py::test_the_price_of_order_{BROKEN_FIXTURE}"]
    keep += ["ConnectionRefusedError: no database at 127.0.0.1:5432"]
    keep += [f"{len(FAILING)} failed, {TESTS - len(FAILING) - 1} passed, 1 error"]
    return Log(text=text, tool="bash", command=command, must_keep=tuple(keep))


_WITH_BUILD = ", cmdclass={'build_py': Build}"
_PACKAGES = ("ledger", "tariff", "voucher", "escrow", "payout", "refund")


def _pip(folder: Path) -> Log:
    links = folder / "links"
    links.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(_PACKAGES):
        needs = [f"slimlog-{other}>=1.0" for other in _PACKAGES[number + 1 : number + 3]]
        _package(folder / "src" / name, f"slimlog-{name}", needs, modules=25)
        _run(f"tar -czf {links}/slimlog-{name}-1.{number}.tar.gz slimlog-{name}-1.{number}", folder / "src" / name)
    command = (
        f"{sys.executable} -m pip install -v --no-build-isolation --no-index --find-links links "
        f"--target installed --no-cache-dir slimlog-ledger"
    )
    text = _run(command, folder)
    names = sorted(f"slimlog-{name}-1.{number}" for number, name in enumerate(_PACKAGES))
    return Log(text=text, tool="bash", command=command, must_keep=(f"Successfully installed {' '.join(names)}",))


def _pip_failing(folder: Path) -> Log:
    _package(folder / "src" / "native", "slimlog-native", [], modules=25, raises="libledger 2.1 is needed, found 1.9")
    command = (
        f"{sys.executable} -m pip install -v --no-build-isolation --no-index --target t ./src/native/slimlog-native-1.6"
    )
    text = _run(command, folder)
    keep = ("RuntimeError: libledger 2.1 is needed, found 1.9", "error: subprocess-exited-with-error")
    return Log(text=text, tool="bash", command=command, must_keep=keep)


def _package(folder: Path, name: str, needs: list[str], *, modules: int, raises: str = "") -> None:
    """An sdist's folder; with `raises` its wheel cannot be built, once all modules were copied."""
    short = name.removeprefix("slimlog-")
    version = f"1.{_PACKAGES.index(short) if short in _PACKAGES else 6}"
    root = folder / f"{name}-{version}"
    code = root / name.replace("-", "_")
    code.mkdir(parents=True, exist_ok=True)
    for number in range(modules):
        (code / f"part_{number:02d}.py").write_text(f"VALUE = {number}\n")
    (code / "__init__.py").write_text("")
    step = (
        "from setuptools.command.build_py import build_py\n\n\nclass Build(build_py):\n    def run(self):\n"
        f"        super().run()\n        raise RuntimeError({raises!r})\n\n\n"
    )
    (root / "setup.py").write_text(
        f"from setuptools import setup\n\n{step if raises else ''}"
        f"setup(name={name!r}, version={version!r}, packages=[{code.name!r}], install_requires={needs!r}"
        f"{_WITH_BUILD if raises else ''})\n"
    )
    (root / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _gcc(folder: Path) -> Log:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "common.h").write_text(
        "#include <stdio.h>\nstruct order { int number; unsigned cents; };\n"
        "static int spare_helper(int x) { return x + 1; }\n"
    )
    for number in range(C_FILES):
        warn = f"    int spare_{number} = {number};\n" if number in C_WARN else ""
        error = f"    missing_call_{number} = order->number\n" if number in C_ERROR else ""
        (folder / f"part_{number:02d}.c").write_text(
            f'#include "common.h"\n\nint work_{number}(struct order *order)\n{{\n{warn}{error}'
            f'    printf("order %d\\n", order->number);\n    return {number};\n}}\n'
        )
    flags = " ".join(f"-I../vendor/library_{n}/include -DWITH_LIBRARY_{n}=1" for n in range(6))
    (folder / "Makefile").write_text(
        f"FLAGS = -Wall -Wextra -O1 -g -std=c11 -fno-common -fPIC {flags}\n"
        f"OBJECTS = {' '.join(f'part_{number:02d}.o' for number in range(C_FILES))}\n\n"
        "all: $(OBJECTS)\n\n%.o: %.c\n\tgcc $(FLAGS) -c $< -o $@\n"
    )
    text = _run("make -k", folder)
    keep = [line for line in text.splitlines() if any(f"\u2018spare_{n}\u2019" in line for n in C_WARN)]
    assert len(C_WARN) == len(keep)
    keep += [
        line
        for line in text.splitlines()
        if any(f"\u2018missing_call_{n}\u2019" in line for n in C_ERROR) and "error:" in line
    ]
    assert len(C_WARN) + len(C_ERROR) <= len(keep)
    keep += [next(line for line in text.splitlines() if "spare_helper" in line and "warning:" in line)]
    keep += [f"part_{number:02d}.o] Error 1" for number in C_ERROR]
    return Log(text=text, tool="bash", command="make -k", must_keep=tuple(keep))


def _git(folder: Path) -> Log:
    folder.mkdir(parents=True, exist_ok=True)
    _run("git init -q -b main", folder)
    subjects = []
    for number in range(COMMITS):
        path = folder / f"module_{number % 9}.py"
        old = path.read_text() if path.exists() else ""
        block = "".join(
            f"\n\ndef step_{number}_{part}(rows):\n    total = sum(row['cents'] for row in rows)\n"
            f"    return total * {part + 1} // {number + 2}\n"
            for part in range(3)
        )
        path.write_text(old.replace(f"// {number - 7}\n", f"// {number - 6}\n") + block)
        subjects.append(f"Step {number}: rows of module {number % 9} are summed by {number + 2}")
        date = f"2026-02-{number % 28 + 1:02d}T09:{number % 60:02d}:00+0000"
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        _run(f"git add -A && {' '.join(map(_quoted, _GIT))} commit -q -m '{subjects[-1]}'", folder, **dates)
    return Log(text=_run("git --no-pager log -p", folder), tool="bash", command="git log -p", must_keep=tuple(subjects))


def _quoted(word: str) -> str:
    return f"'{word}'"


def _issue(number: int) -> dict[str, object]:
    base = f"https://api.example.org/repos/shop/ledger/issues/{number}"
    user = {"login": f"user{number % 11}", "id": 4000 + number % 11, "node_id": f"MDQ6VXNlcj{number % 11}"}
    user |= {
        key: f"https://api.example.org/users/user{number % 11}/{key}" for key in ("html_url", "repos_url", "events_url")
    }
    odd = {"state": "failed", "error": f"sync of issue {number} stopped: token expired"} if number in ODD_ISSUES else {}
    return {
        "id": 900000 + number, "node_id": f"I_kwDO{number:06d}", "url": base, "html_url": base, "number": number,
        "comments_url": f"{base}/comments", "title": f"Rounding of order {number} is off by one cent", "user": user,
        "labels": [{"id": n, "url": f"{base}/labels/{n}", "name": f"area-{n}", "color": "d73a4a"} for n in range(number % 3)],
        "state": "open", "locked": False, "assignee": None, "milestone": None, "comments": number % 5,
        "created_at": f"2026-01-{number % 28 + 1:02d}T10:00:00Z", "closed_at": None,
        "body": f"Order {number} was billed {number * 101} instead of {number * 101 + 1}. " + "Steps to see it. " * 6,
        **odd,
    }  # fmt: skip


def _json_api(folder: Path) -> Log:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "issues.json").write_text(json.dumps([_issue(number) for number in range(1, ISSUES + 1)], indent=2))
    with _server(folder) as url:
        text = _run(_fetch(f"{url}/issues.json"), folder)
    keep = tuple(f"sync of issue {number} stopped: token expired" for number in ODD_ISSUES)
    return Log(text=text, tool="bash", command="curl -s http://127.0.0.1/issues.json", must_keep=keep)


def _fetch(url: str) -> str:
    if shutil.which("curl"):
        return f"curl -s {url}"
    return f"{sys.executable} -c \"import urllib.request as u; print(u.urlopen('{url}').read().decode())\""


_BAR = (
    "import sys, urllib.request\nurl, total, done = sys.argv[1], {size}, 0\n"
    "with urllib.request.urlopen(url) as data:\n    while piece := data.read(16384):\n        done += len(piece)\n"
    "        share = done / total\n        bar = '#' * int(share * 60)\n"
    "        print(f'\\r{{bar:60}} {{share:6.1%}} {{done}}/{{total}}', end='')\n"
    "print(f'\\nsaved big.bin [{{done}}/{{total}}]')\n"
)


def _download(folder: Path) -> Log:
    """A dotted meter where wget is installed, a bar that draws over itself, a file that is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "big.bin").write_bytes(bytes(DOWNLOAD_BYTES))
    (folder / "bar.py").write_text(_BAR.format(size=DOWNLOAD_BYTES))
    keep = [f"saved big.bin [{DOWNLOAD_BYTES}/{DOWNLOAD_BYTES}]"]
    with _server(folder) as url:
        commands = [f"{sys.executable} bar.py {url}/big.bin"]
        if shutil.which("wget"):
            commands += [f"wget --progress=dot -O copy.bin {url}/big.bin", f"wget -O none.bin {url}/missing.bin"]
            keep += [f"saved [{DOWNLOAD_BYTES}/{DOWNLOAD_BYTES}]", "ERROR 404: File not found."]
        text = "".join(_run(command, folder) for command in commands)
    return Log(text=text, tool="bash", command="sh download.sh", must_keep=tuple(keep))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Nothing: the client's output is what is wanted."""


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_NAMES = ("cart", "store", "order", "price", "stock", "parcel", "coupon", "refund", "ledger", "tax")


def _project(folder: Path) -> None:
    """A small project with a git history, an unused import per module and one failing test."""
    source, tests = folder / "src" / "shop", folder / "tests"
    source.mkdir(parents=True, exist_ok=True)
    tests.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "package.json").write_text(
        json.dumps({"name": "shop", "dependencies": {f"left-pad-{n}": f"^1.{n}.0" for n in range(40)}})
    )
    (folder / "unit_checks.py").write_text(
        "import unittest\n\n\nclass Checks(unittest.TestCase):\n"
        + "".join(f"    def test_sum_{n}(self):\n        self.assertEqual({n}, {n + (n == 3)})\n\n" for n in range(14))
    )
    (source / "errors.py").write_text("class ShopError(Exception):\n    pass\n")
    _run("git init -q -b main", folder)
    for name in _NAMES:
        functions = "".join(
            f'\n\ndef {verb}_{name}(rows, limit={n}):\n    """What {verb} means for a {name}."""\n'
            f"    if len(rows) > limit:\n        raise ShopError('too many rows for {name}')\n"
            f"    prices = [row['cents'] for row in rows]\n    return sum(prices)\n"
            for n, verb in enumerate(("add_to", "take_from", "total_of", "check"), 3)
        )
        (source / f"{name}.py").write_text(f"import os\n\nfrom shop.errors import ShopError\n{functions}")
        cases = "".join(
            f"\n\ndef test_the_total_of_{n}_rows():\n"
            f"    assert {n + (name == 'cart' and n == 4)} == total_of_{name}([{{'cents': 1}}] * {n}, limit=20)\n"
            for n in range(10)
        )
        (tests / f"test_{name}.py").write_text(f"from shop.{name} import total_of_{name}\n{cases}")
        _run(f"git add -A && {' '.join(map(_quoted, _GIT))} commit -q -m '{name.capitalize()}s'", folder)
    stock = source / "stock.py"
    stock.write_text(re.sub(r"return sum\(prices\)\n$", "return sum(prices) + 1\n", stock.read_text()))
