"""Which vLLM this plug-in was read against; any other is refused with a sentence instead of a riddle at run time.

0.32 runs whole in our tests. 0.33's classes were read and drive the plug-in without a server: it adds arguments that are
taken here, and a thread that polls tiers which ask for it; ours wake the engine instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable

OLDEST = (0, 32)
NEWEST = (0, 33)
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


class UnsupportedVllm(ImportError):
    """vLLM is missing, or is a version whose offloading classes nobody compared with this plug-in."""


def supported(version: str) -> None:
    """Raise UnsupportedVllm, with what would do, unless `version` (such as "0.32.0+cpu") is one of ours."""
    found = _NUMBERS.match(version)
    numbers = (int(found[1]), int(found[2])) if found else None
    if numbers is not None and OLDEST <= numbers <= NEWEST:
        return
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    raise UnsupportedVllm(
        f"agentkv_vllm works inside vLLM {oldest} to {newest}, this is {version!r}: its offloading classes change "
        "from version to version. Install one of those, or leave the plug-in out: hints then stay advisory"
    )


def require(installed: Callable[[], str] | None = None) -> None:
    """Raise UnsupportedVllm unless a vLLM of ours is installed. `installed` tells its version."""
    try:
        version = (installed or _installed)()
    except ImportError as error:
        raise UnsupportedVllm(
            f"this module of agentkv_vllm is loaded by vLLM, which is not installed here ({error})"
        ) from error
    supported(version)


def _installed() -> str:
    import vllm

    return str(vllm.__version__)
