"""Which memory node a device hangs on, and asking for a mapping's pages to come from there.

A preference, not a demand: where that node is full, another one's page is better than none. Silent where anything is
unknown or forbidden (containers often forbid it): then the kernel decides, as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import Any

_ROOT = Path("/")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_MASK_BITS = 64


def node_of_cuda(device: int, *, root: Path = _ROOT) -> int | None:
    """The node of a CUDA device; None if unknown."""
    import torch

    with contextlib.suppress(Exception):
        facts: Any = torch.cuda.get_device_properties(device)
        return node_of_pci(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0", root=root)
    return None


def node_of_pci(address: str, *, root: Path = _ROOT) -> int | None:
    """The node of the device at a PCI address such as "0000:3b:00.0"; None if unknown, or if there is only one."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if node < 0 or not (root / "sys/devices/system/node/node1").exists():
        return None
    return node


def prefer(address: int, size_bytes: int, node: int) -> bool:
    """Let the pages of a mapping come from `node` when they are touched; it must not have been yet. False if the
    kernel will not.
    """
    number = _MBIND.get(platform.machine())
    if number is None or os.name != "posix" or not 0 <= node < _MASK_BITS:
        return False
    mask = ctypes.c_ulong(1 << node)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # the kernel reads one bit fewer than it is told
    answer = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_MASK_BITS + 1),
        ctypes.c_uint(0),
    )
    return bool(answer == 0)
