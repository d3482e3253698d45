"""In which type a model computes: chosen per device, with the reason in words.

Covers the policy. Half precision on a CPU that does not multiply it is an order of magnitude slower than float32, and
looks like a hang; on CUDA the checkpoint's own type is right, or bfloat16 where that is no type to compute in.
"""

from __future__ import annotations

from typing import Any

import torch

from agentkv.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def name_of(dtype: torch.dtype) -> str:
    """The name of torch.bfloat16 is "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def device_of(device: str) -> torch.device:
    """The device behind a name; "auto" is the first CUDA device, else the CPU. Raises ConfigError."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'device={device!r} is unknown; write "auto", "cpu" or "cuda:0"') from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device={device!r}, but torch {torch.__version__} sees no CUDA device; write "cpu"')
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={device!r} is not supported; write "auto", "cpu" or "cuda:0"')
    return torch.device("cuda:0") if chosen == torch.device("cuda") else chosen


def dtype_of(dtype: str, device: torch.device, config: Any) -> tuple[torch.dtype, str]:
    """(the type to compute in, why). Raises ConfigError for a type that is unknown."""
    stored = getattr(config.get_text_config(), "dtype", None)
    from_file = f"stored as {name_of(stored)}" if isinstance(stored, torch.dtype) else "stored without a type"
    if dtype in DTYPES:
        slow = device.type == "cpu" and DTYPES[dtype] != torch.float32 and cpu_dtype() != DTYPES[dtype]
        warning = "; this CPU does not multiply it in hardware: expect it to be many times slower than float32"
        return DTYPES[dtype], f"as asked, {from_file}{warning if slow else ''}"
    if dtype != "auto":
        raise ConfigError(f'dtype={dtype!r} is unknown; choose "auto" or one of {sorted(DTYPES)}')
    if device.type == "cpu":
        chosen = cpu_dtype()
        can = "multiplies" if chosen == torch.bfloat16 else "does not multiply"
        return chosen, f"{from_file}; this CPU {can} bfloat16 in hardware"
    if isinstance(stored, torch.dtype) and stored in DTYPES.values():
        return stored, from_file
    return torch.bfloat16, f"{from_file}, in which nothing computes"


def cpu_dtype() -> torch.dtype:
    """Half precision only where the CPU multiplies it."""
    can = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")) else torch.float32
