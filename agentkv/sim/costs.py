"""Costs: seconds and bytes of one engine on one machine, computed from a model's config and a card's data sheet.

Covers parameters, bytes per token (MHA, GQA, MQA, MLA), prefill, decode, and the room for KV. Facts are `hardware.py`;
measured rates come in through `from_rates`. A roofline with stated efficiencies, no kernel model: trust it to ~30 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentkv.core.rates import OVERLAP, Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.sim.hardware import Gpu, gpu_named
from agentkv.sim.shape import Shape, shape_of
from agentkv.units import GIB

MATMUL_EFFICIENCY = 0.55
"""Share of the data sheet's FLOP/s that prefill matmuls reach in serving engines (0.5-0.65 are reported)."""

ATTENTION_EFFICIENCY = 0.35
"""The same for causal attention over a long context."""

BANDWIDTH_EFFICIENCY = 0.75
"""Share of the memory bandwidth that decode reaches."""

MEMORY_SHARE = 0.9
"""Share of the device's memory that engines take."""

WORKSPACE_BYTES = 1.5e9
"""Activations, graphs and the runtime, per device."""

STEP_S = 0.004
"""What a step costs besides its matmuls: launches, sampling, scheduling."""

NVME_READ_BYTES_S = 6.5e9
NVME_WRITE_BYTES_S = 4.5e9
"""A PCIe 4 x4 NVMe drive's sequential rates, as data sheets give them (about 7 and 5 GB/s), less the file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the simulator and the planner reckon with.

    `token_bytes`: KV of one token in all layers. A decode step takes decode_base_s + decode_per_token_s x (tokens of
    context of all sessions in the step). `device_bytes`: room for KV. `read_bytes_s`, `write_bytes_s`: None without a
    disk. `token_budget`: new tokens in one step (chunked prefill).
    """

    token_bytes: int
    prefill: Prefill
    decode_base_s: float
    decode_per_token_s: float
    h2d_bytes_s: float
    d2h_bytes_s: float
    read_bytes_s: float | None = None
    write_bytes_s: float | None = None
    device_bytes: float
    host_bytes: float
    disk_bytes: float = 0.0
    token_budget: int = 8192
    context_tokens: int = 131_072
    model: str = ""
    gpu: str = ""

    def __post_init__(self) -> None:
        if self.token_bytes < 1 or self.device_bytes < self.token_bytes:
            raise ConfigError(f"device_bytes={self.device_bytes:.0f} holds no token of {self.token_bytes} bytes")
        if min(self.h2d_bytes_s, self.d2h_bytes_s) <= 0 or min(self.host_bytes, self.disk_bytes) < 0:
            raise ConfigError("links need rates > 0 and tiers sizes >= 0")

    @property
    def device_tokens(self) -> int:
        """Tokens of KV that the device holds."""
        return int(self.device_bytes // self.token_bytes)

    def load_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` from host memory to the device on an idle link."""
        return tokens * self.token_bytes / self.h2d_bytes_s

    def read_s(self, tokens: int) -> float | None:
        """Seconds to bring the KV of `tokens` from disk to the device; None without a disk."""
        if self.read_bytes_s is None:
            return None
        return tokens * self.token_bytes / self.read_bytes_s + OVERLAP * self.load_s(tokens)

    def decode_s(self, context_tokens: int) -> float:
        """Seconds of one step that decodes one token each for sessions with `context_tokens` in all."""
        return self.decode_base_s + self.decode_per_token_s * context_tokens

    def rates(self) -> Rates:
        """The same as `agentkv calibrate` would have found it, for policies and crossovers."""
        return Rates(
            memcpy_bytes_s=max(self.h2d_bytes_s, self.d2h_bytes_s),
            h2d_bytes_s=self.h2d_bytes_s,
            d2h_bytes_s=self.d2h_bytes_s,
            read_bytes_s=self.read_bytes_s,
            write_bytes_s=self.write_bytes_s,
            prefill=self.prefill,
        )


def costs_for(
    model: str | Path,
    gpu: str,
    *,
    gpus: int = 1,
    link_bytes_s: float | None = None,
    host_bytes: float = 256 * GIB,
    disk_bytes: float = 0.0,
    read_bytes_s: float = NVME_READ_BYTES_S,
    write_bytes_s: float = NVME_WRITE_BYTES_S,
    device_bytes: float | None = None,
    token_budget: int = 8192,
) -> Costs:
    """Costs of `model` (a known name, a config.json or its folder) on `gpus` cards of the type `gpu`.

    Several cards are one tensor-parallel engine with a link each. `link_bytes_s` replaces one card's host link,
    `device_bytes` the computed room for KV. `disk_bytes` 0: no disk. Raises ConfigError on an unknown model or card
    (naming the nearest known) and where the weights leave no room.
    """
    if gpus < 1 or (link_bytes_s is not None and link_bytes_s <= 0):
        raise ConfigError(f"gpus={gpus}, link_bytes_s={link_bytes_s}: both must be above 0")
    shape = shape_of(model)
    card = gpu_named(gpu)
    card = card.times(card.count * gpus) if gpus > 1 else card
    link = (link_bytes_s or card.link_bytes_s) * card.count
    room = device_room(shape, card) if device_bytes is None else device_bytes
    matmul_s = 2 * shape.active_parameters / (card.flops_s * card.count * MATMUL_EFFICIENCY)
    memory_s = card.memory_bytes_s * card.count * BANDWIDTH_EFFICIENCY
    # causal attention: QK^T and PV over half of C^2 pairs, 2 FLOP each per head and dimension
    pair_flop = shape.layers * shape.heads * (shape.score_dim + shape.value_dim)
    return Costs(
        token_bytes=shape.token_bytes,
        prefill=Prefill(
            quadratic_s=pair_flop / (card.flops_s * card.count * ATTENTION_EFFICIENCY),
            linear_s=matmul_s,
            constant_s=STEP_S,
        ),
        decode_base_s=STEP_S + shape.active_parameters * shape.weight_item_bytes / memory_s,
        decode_per_token_s=shape.token_bytes / memory_s,
        h2d_bytes_s=link,
        d2h_bytes_s=link,
        read_bytes_s=read_bytes_s if disk_bytes else None,
        write_bytes_s=write_bytes_s if disk_bytes else None,
        device_bytes=room,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        token_budget=token_budget,
        context_tokens=shape.context_tokens,
        model=shape.name,
        gpu=card.name,
    )


def from_rates(
    rates: Rates,
    *,
    token_bytes: int,
    device_bytes: float,
    host_bytes: float,
    disk_bytes: float = 0.0,
    decode_base_s: float | None = None,
    decode_per_token_s: float = 0.0,
    token_budget: int = 512,
    context_tokens: int = 8192,
    model: str = "",
    gpu: str = "",
) -> Costs:
    """Costs from measured rates (`agentkv calibrate`). Without `decode_base_s` a step costs what one token's prefill does."""
    prefill = rates.prefill
    return Costs(
        token_bytes=token_bytes,
        prefill=prefill,
        decode_base_s=prefill.constant_s + prefill.linear_s if decode_base_s is None else decode_base_s,
        decode_per_token_s=decode_per_token_s,
        h2d_bytes_s=rates.h2d_bytes_s,
        d2h_bytes_s=rates.d2h_bytes_s,
        read_bytes_s=rates.read_bytes_s if disk_bytes else None,
        write_bytes_s=rates.write_bytes_s if disk_bytes else None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        token_budget=token_budget,
        context_tokens=context_tokens,
        model=model,
        gpu=gpu,
    )


def device_room(shape: Shape, card: Gpu) -> float:
    """Bytes for KV on all cards: share x memory - weights - workspace. Raises ConfigError if nothing is left."""
    room = card.count * (MEMORY_SHARE * card.memory_bytes - WORKSPACE_BYTES) - shape.weight_bytes
    if room < shape.token_bytes:
        raise ConfigError(
            f"{shape.name}: weights of {shape.weight_bytes / 1e9:.1f} GB leave no room for KV on {card.name} "
            f"({card.count * card.memory_bytes / 1e9:.0f} GB); use more or larger cards"
        )
    return room
