"""agentkv inside vLLM: hints of waiting agents move their KV between disk and CPU memory, on public seams of vLLM.

Importing this package needs no vLLM. What vLLM is told to load by name are the modules `spec`, `tier`, `disk` and
`policy`; these import vLLM and say clearly where its version is none that was read. docs/vllm.md has the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv_vllm.config import default_socket, transfer_config
    from agentkv_vllm.versions import UnsupportedVllm, supported

__all__ = ["UnsupportedVllm", "default_socket", "supported", "transfer_config"]

_HOMES = {
    "UnsupportedVllm": "versions",
    "default_socket": "config",
    "supported": "versions",
    "transfer_config": "config",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
