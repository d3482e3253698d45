r"""The one thing that is kept of a tool's arguments: the first command word, such as "pytest" or "git".

Covers argument shapes (mapping, argv list, command line, JSON text) and the prefixes that say nothing about the
duration: `sudo`, `env`, `VAR=1`, `time`, `timeout 30`, `cd somewhere &&`, `bash -c "..."`. Arguments are neither
stored nor logged.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COMMAND_LENGTH = 512
"""Characters of a command line that are looked at."""
_KEYS = ("cmd", "command")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,31}")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_WRAPPERS = {"sudo", "doas", "env", "time", "nohup", "nice", "timeout", "stdbuf", "exec", "command", "xvfb-run"}
_VALUE_OPTIONS = {"-u", "-g", "-n", "-s", "-k", "-C", "-o", "-e", "-i"}
_SHELLS = {"bash", "sh", "zsh", "dash"}
_PREPARATIONS = {"cd", "pushd", "export", "set", "source", ".", "mkdir", "umask"}


def command_word(args: Any) -> str:
    """The first command word of a tool's arguments, "" where there is none that looks like a command.

    Never raises: what cannot be read has no command word.
    """
    try:
        return _word_of(args)
    except Exception:
        return ""


def _word_of(args: Any) -> str:
    if isinstance(args, Mapping):
        return next((_word_of(args[key]) for key in _KEYS if args.get(key)), "")
    if isinstance(args, str):
        text = args[:MAX_COMMAND_LENGTH].strip()
        if not text.startswith("{"):
            return _line_word(text)
        parsed = json.loads(args)
        return _word_of(parsed) if isinstance(parsed, Mapping) else ""
    if isinstance(args, Sequence) and not isinstance(args, bytes | bytearray):
        return _argv_word([part for part in args if isinstance(part, str)])
    return ""


def _line_word(line: str) -> str:
    """The command word of a shell line: preparations such as `cd x &&` are skipped if something follows them."""
    word = ""
    for argv in _commands(line):
        word = _argv_word(argv)
        if word and word not in _PREPARATIONS:
            return word
    return word


def _commands(line: str) -> list[list[str]]:
    """The words of each command of a shell line, split at `&&`, `||`, `;`, `|` and line ends."""
    rows = (row.strip() for row in line.replace("\\\n", " ").splitlines())
    joined = " ; ".join(row for row in rows if row and not row.startswith("#"))
    try:
        lexer = shlex.shlex(joined, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split = True
        lexer.commenters = ""
        words = list(lexer)
    except ValueError:  # an open quote: the model's own, or cut off by our limit
        words = joined.split()
    commands: list[list[str]] = [[]]
    for word in words:
        if word and not word.strip(";|&()"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def _argv_word(argv: Sequence[str]) -> str:
    words = [word for word in argv if word]
    while words:
        name = re.split(r"[\\/]", words[0])[-1]
        if _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif name in _WRAPPERS:
            words = _after_wrapper(name, words[1:])
        elif name in _SHELLS and words[2:] and re.fullmatch(r"-[a-z]*c", words[1]):
            return _line_word(words[2][:MAX_COMMAND_LENGTH])
        else:
            return name if _WORD.fullmatch(name) else ""
    return ""


def _after_wrapper(name: str, words: list[str]) -> list[str]:
    """What a wrapper such as `sudo -u root` runs: its options, their values and its number are skipped."""
    while words and words[0].startswith("-"):
        takes_value = words[0] in _VALUE_OPTIONS and not (name in ("env", "sudo") and words[0] in ("-i", "-s", "-n"))
        words = words[2:] if takes_value else words[1:]
    if name == "timeout":
        words = words[1:]
    return words
