"""Configuration: what `--kv-transfer-config` says, and the defaults that it may leave out.

Covers the JSON for the command line, the completion of its extra part inside vLLM, and the socket's folder. Unknown names
in our own part are an error; vLLM's are left to vLLM.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentkv.adapters.vllm_door import default_socket
from agentkv.errors import ConfigError

__all__ = ["DISK", "OURS", "TIER", "completed", "default_socket", "private_folder", "transfer_config"]

OURS = "agentkv"
"""The name of our part, in the connector's configuration and in a request's kv_transfer_params."""
_OPTIONS = ("disk", "disk_bytes", "socket", "margin_s", "wake")
_DISK_BYTES = 16 * 2**30
TIER = {"type": "AgentKVTier", "module_path": "agentkv_vllm.tier"}
DISK = {"type": "AgentKVDisk", "module_path": "agentkv_vllm.disk"}


def transfer_config(
    *,
    cpu_bytes: int,
    disk: str | Path | None = None,
    disk_bytes: int = _DISK_BYTES,
    socket: str | Path | None = None,
) -> dict[str, Any]:
    """The value of `--kv-transfer-config`: a CPU tier of `cpu_bytes`, a disk tier below the folder `disk`, our socket.

    A block that cannot be loaded is computed again. Nothing is pinned in device memory.
    """
    if cpu_bytes <= 0 or disk_bytes <= 0:
        raise ConfigError(f"{cpu_bytes=}, {disk_bytes=}: a tier needs room")
    ours: dict[str, Any] = {}
    if disk is not None:
        ours |= {"disk": str(disk), "disk_bytes": disk_bytes}
    if socket is not None:
        ours["socket"] = str(socket)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "AgentKVSpec",
            "spec_module_path": "agentkv_vllm.spec",
            "cpu_bytes_to_use": cpu_bytes,
            **({OURS: ours} if ours else {}),
        },
    }


def completed(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_connector_extra_config` with our tiers and order in it; what is set there already stays. Raises ConfigError."""
    ours = extra.get(OURS, {})
    if not isinstance(ours, Mapping):
        raise ConfigError(f"kv_connector_extra_config[{OURS!r}] must be an object, not {ours!r}")
    unknown = sorted(set(ours) - set(_OPTIONS))
    if unknown:
        raise ConfigError(f"unknown in {OURS!r}: {', '.join(unknown)}; there are {', '.join(_OPTIONS)}")
    full = dict(extra)
    if "eviction_policy" not in full:
        full |= {"eviction_policy": "AgentKVPolicy", "cache_policy_module_path": "agentkv_vllm.policy"}
    full.setdefault("offload_prompt_only", False)  # an agent's answer comes back as prompt
    tiers = [dict(tier) for tier in full.get("secondary_tiers", [])]
    kinds = [tier.get("type") for tier in tiers]
    if "disk" in ours and DISK["type"] not in kinds:
        tiers.append(DISK | {"root_dir": ours["disk"], "capacity_bytes": ours.get("disk_bytes", _DISK_BYTES)})
    if TIER["type"] not in kinds:
        tiers.append(TIER | {name: ours[name] for name in ("socket", "margin_s", "wake") if name in ours})
    full["secondary_tiers"] = tiers
    return full


def private_folder(folder: Path) -> None:
    """Make `folder` for this user alone. Raises ConfigError where somebody else owns it or may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(f"{folder} is no folder that only this user may write to; name another socket")
