"""Page-locking: a mapping registered with CUDA piece by piece, so that copies from and to it are asynchronous.

What cannot be registered stays pageable: everything works, only slower, with one warning. A forked child never
unregisters: the registration is its parent's, and CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from agentkv.kv.limits import page_lock_limit
from agentkv.log import failed, warn_once
from agentkv.units import format_bytes

_PORTABLE = 1
"""Pinned for every device's context, not only for the one that asked."""


class Pins:
    """The first `pinned_bytes` of `size_bytes` at `address`, in pieces of `piece_bytes`."""

    def __init__(self, address: int, size_bytes: int, piece_bytes: int) -> None:
        self._address = address
        self._piece_bytes = piece_bytes
        self._pid = os.getpid()
        self.pinned_bytes = 0
        for at in range(0, size_bytes, piece_bytes):
            size = min(piece_bytes, size_bytes - at)
            code = int(cudart().cudaHostRegister(address + at, size, _PORTABLE))
            if code != 0:
                clear_cuda_error()
                _warn(self.pinned_bytes, size_bytes, code)
                break
            self.pinned_bytes += size

    def close(self) -> None:
        """Unregister every piece. Idempotent."""
        pinned, self.pinned_bytes = self.pinned_bytes, 0
        if os.getpid() != self._pid:
            return
        for at in range(0, pinned, self._piece_bytes):
            try:
                code = int(cudart().cudaHostUnregister(self._address + at))
            except Exception as error:
                failed("host_memory_unpin_failed", error=repr(error))
                continue
            if code != 0:
                clear_cuda_error()
                failed("host_memory_unpin_failed", error=code)


def cudart() -> Any:
    """The CUDA runtime that torch uses."""
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def clear_cuda_error() -> None:
    """A refused call leaves an error behind that the next launch would report as its own: take it here."""
    import torch

    for _ in range(2):  # the first one reports it, the second one shows that it is gone
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
            return


def _warn(pinned: int, asked: int, code: int) -> None:
    warn_once(
        "host_memory_not_pinned",
        pinned=format_bytes(pinned),
        asked=format_bytes(asked),
        limit=f"RLIMIT_MEMLOCK is {page_lock_limit()}",
        advice="copies from and to the rest are slower; raise it (ulimit -l unlimited, docker run --ulimit memlock=-1)"
        " or give less host_memory",
        error=code,
    )
