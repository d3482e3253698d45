"""The two loops that every contestant is driven through: 40 steps of mending a project, and 120 with huge outputs.

A step is an assistant turn (a sentence or two and one tool call) and the recorded output of that call. `needs` are the
places in earlier outputs that the turn relies on: where they are not in the prompt any more (or never were), the fake
model looks them up with one more call, as an agent would. Facts are what must still be known at the end.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from context_project import Defect, Project

TOOL_NAME = "bash"
TOOL_DESCRIPTION = "Run a command in the project's folder and return what it prints, both streams together."
REPLAY_LINES, EXPORT_ACCOUNTS = 1750, 170

SYSTEM = """You are a careful software engineer who works in a checkout of a customer's repository, through one tool.

# How you work
- Understand before you change. Read the failing test first, then the code that it calls, then whoever else calls that code.
- One defect at a time. For each one: run its test and see it fail, find the line, change as little as possible, run the test again, and look at the diff before you go on to the next one.
- Never change a test to make it pass. Where a test is wrong, say so, say why, and leave it alone until you are told otherwise.
- Never touch files outside src/ and tests/ without saying it first. Data files, lock files and anything below deploy/ are not yours.
- Say in a sentence or two what you have learnt and what you do next, then call the tool. No plans of ten points, no apologies, no praise.

# The tool
- bash runs one command in the project's folder. Every call starts in a fresh shell: changes of directory and variables do not survive it. Commands are ended after 120 seconds.
- Prefer commands that print little: name the test file, name the lines, ask grep for line numbers. Do not page through whole directories.
- Output may be long. Do not ask for the same output twice if you can ask for the part of it that you need.
- Do not install anything, do not open network connections, do not push. Commits are made by a person after review.

# The code base
- Amounts are integers in cents. A float anywhere in an amount is a defect, even where the tests do not see it.
- Each subject has one module in src/ledgerly and one test file in tests. They share nothing but ledgerly.errors.
- Limits are module constants in capitals. Whoever changes one changes the test that names it in the same commit.
- Lines are at most 100 characters, imports are sorted, and ruff has the last word on both. It is run by hand, not by the tests.
- Public functions have one line of documentation that says what they return and what they raise.

- Data for the tests is made in the tests. Nothing under data/ is read by them, and nothing in data/ is a fixture, however handy it looks.

# How you report
- When everything is green, answer without a tool call: for each defect the file, the line, what was wrong, and how you know that it is right now. Name what you noticed and left alone.
- Numbers, paths and identifiers are given exactly as they stand in the output, never from memory and never rounded.
- Open items that somebody gave you at the start are part of the report: each one is done, or it is listed with the reason why it is not.
- If you are stuck, say what you tried and what you would need. Three attempts at the same thing that fail in the same way are enough.

- Times, hashes and names of people are left out of the report unless they were asked for.

# When something is unclear
- Read the history of the line before you guess what it was meant to do; the ticket in the commit says who asked for it.
- Where the code and its documentation differ, the test decides; where there is no test, ask.

# What matters most
Correctness first, then a small diff, then speed. Money is moved by what you write: if you are not sure, look again. A wrong
amount that goes out is worse than a report that comes an hour later, and a test that was made to pass is worse than one that fails.
"""

REQUEST = """The import of March is wrong and the tests of the subjects fail, one test in each file under tests/. Please mend them one after the other and report.
What you must keep in mind all the way through:
- The clearing account is 4471-0092-118 and its cap is 8500000 cents; the figure in docs/clearing.md is out of date.
- The entry point that operations use is src/ledgerly/replay.py:17, do not rename it.
- Open: tell Ines whether FIN-437 can be closed. Open: the retry limit of the lock (now 3) may have to go to 5, say so if you see why."""

FIRST_TURN = (
    "I will go through the subjects in the order of SUBJECTS and keep each diff to one line. Decision: late means at "
    "least after_days, so the boundary day counts. Decision: I leave the unused `import os` lines alone and list them. "
    "Open: check afterwards whether deploy/limits.toml repeats the constants. First the test that fails first."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A place in the output of an earlier step, and how an agent would look it up again."""

    key: str
    command: str
    output: str
    recent: bool = True
    """It must stand in one of the newest outputs; else anywhere in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One assistant turn with one call, and what the call prints."""

    text: str
    command: str
    output: str
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something planted: `text` must be in the prompt at the end; a summariser that sees `text` writes `sentence`."""

    kind: str  # path | number | decision | open item | finding
    text: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is played: the same system prompt, request and tool for everybody."""

    name: str
    steps: tuple[Step, ...]
    facts: tuple[Fact, ...]
    system: str = SYSTEM
    request: str = REQUEST
    last: str = "Everything is green. I have listed each defect with its file and line, and the open items below."
    mean_output_chars: int = field(default=0)


EARLY_FACTS = (
    Fact(kind="number", text="4471-0092-118", sentence="The clearing account is 4471-0092-118."),
    Fact(kind="number", text="8500000", sentence="The clearing cap is 8500000 cents; docs/clearing.md is out of date."),
    Fact(kind="path", text="src/ledgerly/replay.py:17", sentence="Do not rename src/ledgerly/replay.py:17."),
    Fact(kind="open item", text="FIN-437", sentence="Open: tell Ines whether FIN-437 can be closed."),
    Fact(kind="open item", text="may have to go to 5", sentence="Open: the retry limit may have to go to 5 (now 3)."),
    Fact(kind="decision", text="the boundary day counts", sentence="Late means at least so many days, the boundary day counts."),
    Fact(kind="decision", text="the unused `import os` lines", sentence="Decided: leave the unused `import os` lines alone."),
    Fact(kind="open item", text="deploy/limits.toml", sentence="Open: does deploy/limits.toml repeat the constants?"),
)  # fmt: skip


def loops() -> tuple[Loop, Loop]:
    """The 40-step and the 120-step loop. Takes about 20 s: the commands really run."""
    return _recorded("40 steps", subjects=7, steps=40, huge=False), _recorded("120 steps", 20, 120, huge=True)


def _recorded(name: str, subjects: int, steps: int, *, huge: bool) -> Loop:
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder).resolve() / "ledgerly", subjects)
        if huge:
            note = "Decision of the board: amounts are rounded half-even, see FIN-389."
            project.run("echo >> src/ledgerly/errors.py")
            project.commit("Rounding is settled", note)
        played = _play(project, huge=huge)[:steps]
    facts = EARLY_FACTS + tuple(_mended(defect) for defect in project.defects[:3]) + (_HUGE_FACTS if huge else ())
    sizes = [len(step.output) for step in played if len(step.output) < 8000]
    return Loop(name=name, steps=tuple(played), facts=facts, mean_output_chars=sum(sizes) // len(sizes))


_HUGE_FACTS = (
    Fact(kind="number", text="row 48213", sentence="ERROR in the replay: row 48213 of data/march.csv, amount 9144031."),
    Fact(kind="number", text="9144031", sentence="The amount above the cap is 9144031."),
    Fact(kind="decision", text="half-even", sentence="The board decided (FIN-389): amounts are rounded half-even."),
    Fact(kind="finding", text="sanctions hold until 2026-09-30", sentence="One account is frozen: sanctions hold until 2026-09-30."),
)  # fmt: skip


def _mended(defect: Defect) -> Fact:
    text = f"{defect.path}:{defect.line}"
    return Fact(kind="path", text=text, sentence=f"Mended {text}: it is `{defect.right}` now.")


def _play(project: Project, *, huge: bool) -> list[Step]:
    names = project.subjects
    first = [["-v", f"tests/test_{name}.py"] for name in names]
    failing = project.pytests(first)
    rest = [_mend(project, number) for number in range(len(names))]
    again = [["-v", *(f"tests/test_{n}.py" for n in names[max(0, i - 3) : i + 1])] for i in range(len(names))]
    passing = project.pytests(again)
    steps: list[Step] = []
    for number, defect in enumerate(project.defects):
        looked, read, mended, extra = rest[number]
        other = project.defects[number - 2] if number >= 2 and number % 3 == 2 else None
        before = steps[-1] if steps else None
        name, path = defect.subject, f"{defect.path}:{defect.line}"
        fails, passes = _pytest(first[number]), _pytest(again[number])
        key = next(line for line in failing[number].splitlines() if line.startswith("E  "))[1:].strip()
        text = (
            FIRST_TURN
            if before is None
            else f"That settles it for now; next is {name}, whose test I run before I read anything."
        )
        steps += [
            Step(text=text, command=fails, output=failing[number], needs=_needs(before)),
            Step(
                text=f"It says `{key[:70]}`, so the {name} module does not do what its one line of documentation says. "
                "I look at who uses its functions before I read it.",
                command=looked[0], output=looked[1], needs=(_need(key, fails, failing[number]),),
            ),
            Step(
                text=f"Only its own test calls it, so a change stays local. I read src/ledgerly/{name}.py with line numbers.",
                command=read[0], output=read[1], needs=(_need("def test_", *looked),),
            ),
            Step(
                text=f"The defect is at {path}: `{defect.wrong}` should be `{defect.right}`"
                + (f", much as in {other.path}, where it is `{other.right}` now" if other else "")
                + ". I change that and nothing else, and look at the diff.",
                command=mended[0], output=mended[1],
                needs=(_need(defect.wrong, *read), *((_need(other.right, *rest[number - 2][2], recent=False),) if other else ())),
            ),
            Step(
                text=f"The diff is one line. Now the test of {name} again, with those that I mended before it.",
                command=passes, output=passing[number], needs=(_need(defect.right, *mended),),
            ),
            Step(
                text=f"All of them pass, {path} is done. {_REASONS[number % len(_REASONS)]}",
                command=extra[0], output=extra[1], needs=(_need(f"{4 * len(again[number]) - 4} passed", passes, passing[number]),),
            ),
        ]  # fmt: skip
        if huge and number in _HUGE:
            command, why, key = _HUGE[number]
            output = project.run(command)
            steps[-1] = Step(text=f"All of them pass, {path} is done. {why}", command=command, output=output,
                             needs=steps[-1].needs)  # fmt: skip
            _KEYS[command] = key
    return steps


_KEYS: dict[str, str] = {}
_HUGE = {
    2: (f"python -m ledgerly.replay {REPLAY_LINES}", "I replay the import of March to see where it stops.", "ERROR import"),
    8: ("git log -p", "Before I go on I want to know what was decided about rounding, so I read the history.", "half-even"),
    14: (f"python -m ledgerly.export {EXPORT_ACCOUNTS}", "I dump the accounts to see which one is not active.", "sanctions"),
}  # fmt: skip
_REASONS = (
    "I let ruff look at the module, because lines may have become too long.",
    "I look at the history, to see who asked for this behaviour.",
    "I look at what else lies in the package, in case a module has no test.",
    "I look at what I have changed so far.",
)


def _mend(project: Project, number: int) -> tuple[tuple[str, str], ...]:
    """Look, read, mend, and one thing more: (command, output) of each."""
    defect = project.defects[number]
    name = defect.subject
    sed = f"sed -i {shlex.quote(f'{defect.line}s/{_escaped(defect.wrong)}/{_escaped(defect.right)}/')} {defect.path}"
    extras = (
        f"ruff check {defect.path}",
        "git log --stat -n 4",
        "ls -go --time-style=+ src/ledgerly tests",
        "git status --short; git diff --stat; git diff -U1 | tail -n 24",
    )
    commands = (
        f"grep -nE 'def |{name}_total|_LIMIT_|import' src/ledgerly/{name}.py tests/test_{name}.py",
        f"cat -n {defect.path}",
        f"{sed} && git diff -U6 {defect.path}",
        extras[number % len(extras)],
    )
    return tuple((command, project.run(command)) for command in commands)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[").replace("*", r"\*").replace("/", r"\/").replace(".", r"\.")


def _pytest(arguments: list[str]) -> str:
    return f"python -m pytest {shlex.join(arguments)}"


def _needs(before: Step | None) -> tuple[Need, ...]:
    """What the turn after an extra look relies on: the one line of a huge output, nothing of the others."""
    if before is None or before.command not in _KEYS:
        return ()
    return (_need(_KEYS[before.command], before.command, before.output),)


def _need(key: str, command: str, output: str, *, recent: bool = True) -> Need:
    """`key` in `output`; looking it up prints the lines that hold it, with one line around each."""
    lines = output.splitlines()
    hits = [index for index, line in enumerate(lines) if key in line]
    assert hits, f"{key!r} is not in the output of {command}"
    shown = sorted({index for hit in hits[:3] for index in range(max(0, hit - 1), min(len(lines), hit + 2))})
    found = "\n".join(f"{index + 1}:{lines[index]}" for index in shown)
    return Need(
        key=key, command=f"{command} | grep -n -C1 -F -- {shlex.quote(key)}", output=found + "\n", recent=recent
    )


def arguments_of(command: str) -> str:
    """The call's arguments, as the model writes them."""
    return json.dumps({"command": command})
