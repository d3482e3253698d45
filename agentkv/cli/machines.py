"""From a command line's words to Costs: a card by name, or this machine as `agentkv calibrate` measured it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.errors import ConfigError
from agentkv.units import parse_bytes

if TYPE_CHECKING:
    from agentkv.sim.costs import Costs

MEASURED = "measured"
"""The value of `--gpu` that means this machine."""


def costs_from_options(
    model: str,
    gpu: str,
    *,
    gpus: int = 1,
    host: str = "256GiB",
    disk: str = "1TiB",
    link: str | None = None,
    device_memory: str | None = None,
) -> Costs:
    """Costs for the sizes and names of a command line; with `gpu` "measured" from the newest calibration of `model`.

    Raises ConfigError on unknown names and sizes, and where nothing was measured or `device_memory` is missing then.
    """
    from agentkv.sim.costs import costs_for

    host_bytes, disk_bytes = parse_bytes(host, option="--host"), parse_bytes(disk, option="--disk")
    room = None if device_memory is None else parse_bytes(device_memory, option="--device-memory")
    if gpu == MEASURED:
        if gpus != 1 or link is not None:
            raise ConfigError(f"--gpu {MEASURED} is one machine as it is: leave --gpus and --link out")
        return _measured(model, device_bytes=room, host_bytes=host_bytes, disk_bytes=disk_bytes)
    return costs_for(
        model,
        gpu,
        gpus=gpus,
        link_bytes_s=None if link is None else parse_bytes(link, option="--link"),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        device_bytes=room,
    )


def _measured(model: str, *, device_bytes: int | None, host_bytes: int, disk_bytes: int) -> Costs:
    from agentkv.runtime.ratefiles import saved_here
    from agentkv.sim.costs import from_rates

    if device_bytes is None:
        raise ConfigError(f'--gpu {MEASURED} needs the room for KV: --device-memory "2GiB"')
    saved = saved_here()
    found = next(((place, rates) for place, rates in saved if place.model == model), None)
    if found is None:
        names = ", ".join(sorted({place.model for place, _ in saved})) or "nothing"
        raise ConfigError(f"model {model!r} was not measured on this machine ({names} was): run `agentkv calibrate`")
    place, rates = found
    return from_rates(
        rates,
        token_bytes=place.token_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes if rates.read_bytes_s is not None else 0,
        context_tokens=place.context_tokens,
        model=place.model,
        gpu=place.cpu if place.device == "cpu" else place.device,
    )
