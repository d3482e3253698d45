"""Ports: where the server listens that this engine computes for, so that agents do not take another server for it.

vLLM's engine process does not know its API server's port, but is its child: the TCP ports at which it and its nearest
ancestors listen, from /proc. Some are others' (a shell's terminal server, the engine's own channels), which does no harm.
$AGENTKV_VLLM_PORT says it where agents come by another way. Needs no vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path

PORT_VARIABLE = "AGENTKV_VLLM_PORT"
"""Set for the engine: the port, or ports with commas, of the address that agents use (a proxy's, or a published one)."""
_ANCESTORS = 2
_LISTENS = "0A"
_MOST_PORT = 65_535


def ports() -> list[int]:
    """The ports of this engine's server; [] where nobody can know."""
    given = os.environ.get(PORT_VARIABLE, "")
    named = [int(one) for one in given.replace(",", " ").split() if one.isascii() and one.isdigit()]
    if named:
        return sorted({port for port in named if port <= _MOST_PORT})
    try:
        listened = _listened()
        found = _of(os.getpid(), listened)
        pid = os.getppid()
        found |= _of(pid, listened)  # it must be readable: a part of the ports would be worse than none
    except (OSError, ValueError, IndexError):
        return []
    for _ in range(_ANCESTORS - 1):
        try:
            pid = _parent(pid)
            found |= _of(pid, listened)
        except (OSError, ValueError, IndexError):
            break
    return sorted(found)


def _listened() -> dict[str, int]:
    """The port of each listening socket, by the name that a process's table of files has for it."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text("ascii").splitlines()[1:]
        except FileNotFoundError:  # no IPv6 there
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS:
                found[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    return found


def _of(pid: int, listened: dict[str, int]) -> set[int]:
    """The ports at which this process listens. Raises OSError where it may not be looked at."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(file.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if name in listened:
            found.add(listened[name])
    return found


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return int(stat.rpartition(")")[2].split()[1])
