"""Where a measurement holds: this machine, its processor and device, one model, one disk.

Covers `Place` and how its parts are found. Values only: nothing is opened for writing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from agentkv.engine.local.loader import LoadedModel

_MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_KEY_CHARS = 16
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a space


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`machine` is a digest of the machine's id, `fingerprint` the model's content with its geometry, `cores` how many
    the process may use, `mount` the disk tier's file system, None without one. `model` is for people only.
    `token_bytes` and `context_tokens` follow from the model: a crossover can be computed without loading it.
    """

    machine: str
    cpu: str
    cores: int
    device: str
    fingerprint: str
    model: str
    token_bytes: int
    context_tokens: int
    mount: str | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, disk: Path | None) -> Self:
        """The place of a loaded model on this machine, with the disk tier at `disk` if there is one."""
        from agentkv.engine.local.gauge import device_name

        return cls(
            machine=machine_digest(),
            cpu=cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            device=device_name(loaded),
            fingerprint=loaded.fingerprint.hex(),
            model=loaded.name,
            token_bytes=loaded.geometry.token_bytes,
            context_tokens=loaded.context_tokens,
            mount=None if disk is None else mount_of(disk),
        )

    @property
    def base_key(self) -> str:
        """The same for every disk of the machine."""
        return _digest(
            *(f"{name}={value}" for name, value in sorted(asdict(replace(self, model="", mount=None)).items()))
        )

    @property
    def mount_key(self) -> str:
        """Tells the disks of one base key apart."""
        return "no-disk" if self.mount is None else _digest(self.mount)

    def same(self, other: Place) -> bool:
        """Whatever the model is called."""
        return replace(self, model="") == replace(other, model="")


def machine_digest() -> str:
    """A digest of the machine's id (the id itself is private), or of its name where it has none."""
    for name in _MACHINE_ID_FILES:
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return _digest("agentkv", text)
    return _digest("agentkv", platform.node())


def cpu_name() -> str:
    """As the kernel says it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def mount_of(path: Path) -> str:
    """The file system that `path` is on or would be made on: "/data (ext4 on /dev/sda1)"."""
    there = nearest(path).resolve()
    best: tuple[int, str] | None = None
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 2:  # noqa: PLR2004  proc(5): mount point is the fifth field
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if there.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), f"{point} ({kind[0]} on {kind[1]})")
    return best[1] if best is not None else f"device {there.stat().st_dev}"


def nearest(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    path = path.absolute()
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_KEY_CHARS]
