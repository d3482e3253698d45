"""Outputs of test runners: what failed and why, what sums up; passed tests only as the runner's own count.

Knows pytest in every verbosity, and by their passing lines unittest, jest, mocha, go test, cargo test, TAP, googletest.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from agentkv.context.slim.alarm import SUMMARY, WARNING, is_alarm
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS, fold_repeats, ranked, soft_budget
from agentkv.context.slim.pick import CONTEXT, FILLER, MATTER, MUST, NOISE, render

_STARTS = "test session starts"
_ENDS = re.compile(
    r"\b\d+ (?:passed|failed|errors?|skipped|deselected|warnings?)\b[^\n]* in \d+(?:\.\d+)?s\b|no tests ran in "
)
_SECTION = re.compile(r"^=+ (.+?) =+$")
_TEST = re.compile(r"^_{2,} (.+?) _{2,}$")
_RESULT = re.compile(r"^(\S+::.+?|\S+\.py) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_DOTS = re.compile(r"^(?:\S+\.py )?[.sxXFEp]+(?:\s+\[\s*\d+%\])?$")
_HEADER = re.compile(
    r"^(?:platform |cachedir:|rootdir:|configfile:|plugins:|asyncio:|hypothesis profile|collecting|testpaths:|timeout)"
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S")
_PLACE = re.compile(r"^\S+:\d+:(?: |$)")
_CAPTURED = re.compile(r"^-+ (Captured .+?) -+$")
_PASSED = re.compile(
    r"^\s*(?:[\u2713\u2714\u221a] |ok\s+\d+\b|ok\s+\S+\s+[\d.]+m?s|--- PASS|PASS\b|=== (?:RUN|PAUSE|CONT|NAME)\b|\[\s+OK\s+\]|\[ RUN\s+\])"
    r"|\.\.\. ok$|^PASS$"
)
_PASSED_SHARE = 0.3
_ERROR_LINES = 30
"""Lines of one failure's explanation that matter whatever there is."""


def is_pytest(_tool: str, command: str, text: str) -> bool:
    """Whether pytest wrote this."""
    return _STARTS in text[:4_000] or ("pytest" in command and _ENDS.search(text[-600:]) is not None)


def pytest_run(text: str, budget: int) -> str | None:
    """Failures with their reasons, the short summary, the counts."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    told = list(lines)
    ranks = [NOISE] * len(lines)
    named = {line.split(" ")[1]: at for at, line in enumerate(lines) if _FAILED.match(line)}
    by_name = {name.partition("::")[2].replace("::", "."): name for name in named}
    explained = any(line.startswith("E  ") for line in lines)
    section, errors = _STARTS, 0
    told_above: set[int] = set()
    for at, line in enumerate(lines):
        header = _SECTION.match(line)
        if header is not None:
            section = header[1]
            ranks[at] = MUST if SUMMARY.search(line) or _ENDS.search(line) else NOISE
            told[at] = f"== {section}"
        elif section in {"FAILURES", "ERRORS"}:
            errors = 0 if _TEST.match(line) else errors + line.startswith("E")
            ranks[at], told[at] = _failure(line, errors)
            name = (
                by_name.get(told[at].rpartition(" ")[2]) if ranks[at] == MUST and told[at].startswith("__ ") else None
            )
            if name is not None:
                told[at] = told[named[name]] = lines[named[name]].split(" - ")[0]
                told_above.add(named[name])
        elif at in told_above:
            continue
        elif _FAILED.match(line):
            ranks[at], told[at] = MUST, line.split(" - ")[0] if explained else line
        else:
            ranks[at] = _other(line, section, named)
    return render(told, ranks, budget, soft=soft_budget(text, budget))


def _failure(line: str, errors: int) -> tuple[int, str]:
    """Rank of a line of a failure's report, and what is shown of it."""
    name, captured = _TEST.match(line), _CAPTURED.match(line)
    if name is not None:
        return MUST, f"__ {name[1]}"
    if line.startswith("E"):
        rest = line[1:].strip()
        return (MUST if errors <= _ERROR_LINES else CONTEXT) if rest else NOISE, f"E {rest}"
    if line.startswith(">"):
        return MATTER, f"> {line[1:].strip()}"
    if captured is not None:
        return CONTEXT, f"-- {captured[1]}"
    if not line or line[0].isspace() or line.startswith("self = <") or set(line) <= set("_ -="):
        return NOISE, line
    return MATTER if _PLACE.match(line) or is_alarm(line) else CONTEXT, line


def _other(line: str, section: str, named: Container[str]) -> int:
    """Rank of a line outside of failures' reports."""
    result = _RESULT.match(line)
    if result is not None:
        return MUST if result[2] in ("FAILED", "ERROR") and result[1] not in named else NOISE
    if not line or _HEADER.match(line) or _DOTS.match(line):
        return NOISE
    if line.startswith("collected ") or section == "warnings summary":
        return CONTEXT if line.startswith("collected ") or WARNING.search(line) else NOISE
    if SUMMARY.search(line) or is_alarm(line):
        return MUST
    return FILLER


def has_passing_lines(_tool: str, _command: str, text: str) -> bool:
    """Whether a good part of the lines tell of one passed test each."""
    glance = text[:3_000].split("\n")
    return sum(_PASSED.search(line) is not None for line in glance) >= max(4, len(glance) * _PASSED_SHARE)


def other_run(text: str, budget: int) -> str | None:
    """Any other runner's output without its passing lines."""
    if len(text) > MANY_CHARS:
        return None
    lines = lines_of(text)
    ranks = _without_passed(lines, ranked(lines))
    folded, ranks = fold_repeats(lines, ranks)
    return render(folded, ranks, budget)


def _without_passed(lines: Sequence[str], ranks: list[int]) -> list[int]:
    return [
        NOISE if _PASSED.search(line) and not (rank == MUST and SUMMARY.search(line)) else rank
        for line, rank in zip(lines, ranks, strict=True)
    ]
