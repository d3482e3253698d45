r"""What is kept of a tool's arguments: the first command word ("pytest"), a sub-command ("git diff"), and the size.

Covers argument shapes (mapping, argv list, command line, JSON text) and the prefixes that say nothing about the
duration: `sudo`, `env`, `VAR=1`, `time`, `timeout 30`, `cd somewhere &&`, `bash -c "..."`. A sub-command is kept only
of programs that are known to have them. Arguments are neither stored nor logged.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COMMAND_LENGTH = 512
"""Characters of a command line that are looked at."""
_DEEPEST = 3
_PLAIN = re.compile(r"[;|&()]+|[^\s;|&()]+")
"""The words of a line without quotes and escapes, as `shlex` would have them."""
_NOT_PLAIN = re.compile(r"""['"\\]|[^\S \t]""")
"""Quotes, escapes, and blanks that are neither a space nor a tab (line ends, and what `shlex` takes for letters)."""
_MOST_PARTS = 64
_KEYS = ("cmd", "command")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,31}")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_WRAPPERS = {"sudo", "doas", "env", "time", "nohup", "nice", "timeout", "stdbuf", "exec", "command", "xvfb-run"}
_VALUE_OPTIONS = {"-u", "-g", "-n", "-s", "-k", "-C", "-o", "-e", "-i"}
_A_DAY_S = 86_400
_TIMEOUTS = {"timeout": 1.0, "timeout_s": 1.0, "timeout_seconds": 1.0, "timeout_sec": 1.0, "timeout_ms": 1e-3}
_TIMEOUT_LINE = re.compile(r"\s*(?:sudo\s+)?timeout\s+(?:-[ks]\s+\S+\s+|-\S+\s+)*(\d+(?:\.\d+)?)([smhd]?)\s")
_SEVERAL = re.compile(r"[;|&\n]")
_TIMEOUT_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_SUB_COMMAND = re.compile(r"[a-z][a-z0-9-]{0,19}")
_HAVE_SUB_COMMANDS = {
    "git", "pip", "pip3", "uv", "poetry", "conda", "npm", "pnpm", "yarn", "npx", "cargo", "go", "docker", "podman",
    "kubectl", "helm", "terraform", "apt", "apt-get", "brew", "dotnet", "gradle", "mvn", "make", "gh", "systemctl",
}  # fmt: skip
_SUB_VALUE_OPTIONS = {"-C", "-c", "-f", "-n"}
_PYTHONS = re.compile(r"python[0-9.]*(\.exe)?")
_PREPARATIONS = {"cd", "pushd", "export", "set", "source", ".", "mkdir", "umask"}


_MORE_TO_READ = re.compile(
    "(?:python|(?:" + "|".join(map(re.escape, sorted(_WRAPPERS | _SHELLS | _HAVE_SUB_COMMANDS | _PREPARATIONS))) + ")$)"
)
"""First words after which the rest of a line has its say."""


def command_word(args: Any) -> str:
    """The first command word of a tool's arguments, "" where there is none that looks like a command.

    Never raises: what cannot be read has no command word.
    """
    return command_words(args).partition(" ")[0]


def command_words(args: Any) -> str:
    """The first command word and, of a program that has them, the sub-command: "git diff", "pip install", "pytest".

    `python -m pytest` counts as "pytest". Never raises: what cannot be read has no command word.
    """
    try:
        return _words_of(args)
    except Exception:
        return ""


def size_bytes(args: Any) -> int:
    """About how many bytes the arguments have, 0 where that cannot be told; looks at no more than a few levels."""
    try:
        return _size_of(args, _DEEPEST)
    except Exception:
        return 0


def declared_timeout_s(args: Any) -> float | None:
    """When the arguments say that the call is ended at the latest, seconds; None where they say nothing.

    Read from `timeout`, `timeout_s`, `timeout_seconds`, `timeout_sec`, `timeout_ms` of a mapping, and from a command
    line that begins with `timeout 30`. A plain `timeout` of more than a day is taken for milliseconds. Never raises.
    """
    try:
        return _timeout_of(args)
    except Exception:
        return None


def _timeout_of(args: Any) -> float | None:
    if isinstance(args, str):
        return _line_timeout(args[:MAX_COMMAND_LENGTH])
    if not _is_mapping(args):
        return None
    line = ""
    for key, value in args.items():
        if key in _TIMEOUTS:
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return value * (1e-3 if key == "timeout" and value > _A_DAY_S else _TIMEOUTS[key])
        elif key in _KEYS and isinstance(value, str):
            line = value
    return _line_timeout(line) if line else None


def _line_timeout(line: str) -> float | None:
    found = _TIMEOUT_LINE.match(line) if "timeout" in line and not _SEVERAL.search(line) else None
    return None if found is None else float(found[1]) * _TIMEOUT_UNITS[found[2]]


def _size_of(args: Any, depth: int) -> int:
    if type(args) is str or isinstance(args, str | bytes | bytearray):
        return len(args)
    if depth == 0 or args is None:
        return 0
    if _is_mapping(args):
        size = 0
        for key, value in itertools.islice(args.items(), _MOST_PARTS // 2):
            size += len(key) if type(key) is str else _size_of(key, depth - 1)
            size += len(value) if type(value) is str else _size_of(value, depth - 1)
        return size
    if type(args) is list or isinstance(args, Sequence):
        return sum(_size_of(part, depth - 1) for part in args[:_MOST_PARTS])
    return 8


def _is_mapping(args: Any) -> bool:
    return type(args) is dict or isinstance(args, Mapping)  # asking an abstract class takes a third of a microsecond


def _words_of(args: Any) -> str:
    if _is_mapping(args):
        for key in _KEYS:
            if args.get(key):
                return _words_of(args[key])
        return ""
    if isinstance(args, str):
        text = args[:MAX_COMMAND_LENGTH].strip()
        if not text.startswith("{"):
            return _line_words(text)
        parsed = json.loads(args)
        return _words_of(parsed) if isinstance(parsed, Mapping) else ""
    if isinstance(args, Sequence) and not isinstance(args, bytes | bytearray):
        return _argv_words([part for part in args if isinstance(part, str)])
    return ""


def _line_words(line: str) -> str:
    """The command words of a shell line; where its first word alone says them, the rest is not read."""
    first = line.split(None, 1)[:1]
    if first and _WORD.fullmatch(first[0]) and not _MORE_TO_READ.match(first[0]):
        return first[0]
    return _read_line(line)


def _read_line(line: str) -> str:
    """The command words of a shell line: preparations such as `cd x &&` are skipped if something follows them."""
    words = ""
    for argv in _commands(line):
        words = _argv_words(argv)
        if words and words not in _PREPARATIONS:
            return words
    return words


def _commands(line: str) -> list[list[str]]:
    """The words of each command of a shell line, split at `&&`, `||`, `;`, `|` and line ends."""
    words = _PLAIN.findall(line) if _is_plain(line) else _shell_words(line)
    commands: list[list[str]] = [[]]
    for word in words:
        if word and not word.strip(";|&()"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def _is_plain(line: str) -> bool:
    """Whether the line can be read without the rules of a shell, which take ten times as long."""
    return _NOT_PLAIN.search(line) is None and not line.lstrip().startswith("#")


def _shell_words(line: str) -> list[str]:
    """The words of a shell line with its quotes and escapes resolved, punctuation as words of its own."""
    rows = (row.strip() for row in line.replace("\\\n", " ").splitlines())
    joined = " ; ".join(row for row in rows if row and not row.startswith("#"))
    try:
        lexer = shlex.shlex(joined, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split = True
        lexer.commenters = ""
        return list(lexer)
    except ValueError:  # an open quote: the model's own, or cut off by our limit
        return joined.split()


def _argv_words(argv: Sequence[str]) -> str:
    words = [word for word in argv if word]
    while words:
        name = words[0].replace("\\", "/").rpartition("/")[2]
        if "=" in words[0] and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif name in _WRAPPERS:
            words = _after_wrapper(name, words[1:])
        elif name in _SHELLS and words[2:] and re.fullmatch(r"-[a-z]*c", words[1]):
            return _line_words(words[2][:MAX_COMMAND_LENGTH])
        else:
            return _with_sub_command(name, words[1:]) if _WORD.fullmatch(name) else ""
    return ""


def _with_sub_command(name: str, words: list[str]) -> str:
    if _PYTHONS.fullmatch(name) and words[1:] and words[0] == "-m" and _WORD.fullmatch(words[1]):
        return _with_sub_command(words[1], words[2:])
    if name not in _HAVE_SUB_COMMANDS:
        return name
    while words and words[0].startswith("-"):  # `git -C folder log`, `docker --debug ps`
        words = words[2:] if words[0] in _SUB_VALUE_OPTIONS else words[1:]
    return f"{name} {words[0]}" if words and _SUB_COMMAND.fullmatch(words[0]) else name


def _after_wrapper(name: str, words: list[str]) -> list[str]:
    """What a wrapper such as `sudo -u root` runs: its options, their values and its number are skipped."""
    while words and words[0].startswith("-"):
        takes_value = words[0] in _VALUE_OPTIONS and not (name in ("env", "sudo") and words[0] in ("-i", "-s", "-n"))
        words = words[2:] if takes_value else words[1:]
    if name == "timeout":
        words = words[1:]
    return words
