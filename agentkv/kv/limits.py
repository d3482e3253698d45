"""How much memory there is to be had: the machine's, the container's (cgroup v1 and v2), the page-lock limit.

A container's page cache counts as used in its cgroup, but gives way to whoever needs room: it is taken out here.
Everything reads files below `root`, so that another machine's can be shown to it. Decides nothing but `default_...`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from agentkv.units import KIB, format_bytes

_ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages that fits."""


def available_bytes(root: Path = _ROOT) -> int:
    """What a process can still allocate without swapping, or being killed for its cgroup's limit."""
    return max(0, min([_machine(root), *_containers(root)]))


def default_host_bytes(asked: int, *, root: Path = _ROOT) -> int:
    """A default size, cut to half of what is available. For sizes that nobody chose; what a user asks for is refused
    rather than cut.
    """
    return min(asked, available_bytes(root) // 2)


def page_lock_limit() -> str:
    """RLIMIT_MEMLOCK in words. Some drivers ignore it, so it is a reason for a failure and not a bound."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _machine(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _containers(root: Path) -> Iterator[int]:
    """What is left in each cgroup that holds this process; nothing where there are none, or none that we can read."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                    yield from _chain(mount, path, _left_v2)
            elif "memory" in controllers.split(","):
                yield from _chain(root / "sys/fs/cgroup/memory", path, _left_v1)


def _chain(mount: Path, path: str, left: Callable[[Path], int | None]) -> Iterator[int]:
    """`left` of the group at `path` and those above it. Inside a container `path` may be the host's name for what is
    the mount itself here.
    """
    inner = PurePosixPath(path.strip("/"))
    for part in (inner, *inner.parents):
        with contextlib.suppress(OSError, ValueError):
            found = left(mount / part)
            if found is not None:
                yield found


def _left_v2(group: Path) -> int | None:
    limits = [text for name in ("memory.max", "memory.high") if (text := _text(group / name)) not in ("", "max")]
    if not limits:
        return None
    used = int(_text(group / "memory.current") or 0)
    return min(map(int, limits)) - used + _reclaimable(group, ("inactive_file", "active_file"))


def _left_v1(group: Path) -> int | None:
    limit = int(_text(group / "memory.limit_in_bytes") or _NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    used = int(_text(group / "memory.usage_in_bytes") or 0)
    return limit - used + _reclaimable(group, ("total_inactive_file", "total_active_file"))


def _reclaimable(group: Path, names: tuple[str, ...]) -> int:
    """Page cache by its lists; files in memory (tmpfs) are not on them, rightly."""
    facts = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    return sum(int(facts.get(name, 0)) for name in names)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
