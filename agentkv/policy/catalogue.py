"""Every policy by name, for the runtime, the command line and the benchmarks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from agentkv.errors import ConfigError
from agentkv.policy import baselines
from agentkv.policy.bounds import belady, lazy_oracle
from agentkv.policy.evict import next_use
from agentkv.policy.hazard import hazard
from agentkv.policy.lazy import lazy
from agentkv.policy.moves import nothing
from agentkv.policy.rules import Rules
from agentkv.policy.wait import ladder

Make = Callable[..., Rules]


def ladder_rules(
    *,
    keep_s: float = 5.0,
    host_s: float = 120.0,
    drop_tokens: int = 8192,
    margin_s: float = 0.3,
    sight: Literal["learned", "elapsed", "oracle"] = "learned",
) -> Rules:
    """The fixed ladder (`wait.ladder`), with eviction by next use as the data plane has it."""
    return Rules(
        name="ladder" if sight == "learned" else f"ladder-{sight}",
        decide=ladder(keep_s=keep_s, host_s=host_s, drop_tokens=drop_tokens, margin_s=margin_s),
        evict_key=next_use, elsewhere_first=True, prefetch_evicts=True, sight=sight,
    )  # fmt: skip


def keep_rules() -> Rules:
    """Nothing moves by plan; under pressure whoever is back last is written and gives way."""
    return replace(lazy(), name="keep", decide=nothing)


OURS: Mapping[str, Make] = MappingProxyType(
    {"lazy": lazy, "hazard": hazard, "ladder": ladder_rules, "keep": keep_rules}
)
"""What the runtime can run. The first is the default."""

BASELINES: Mapping[str, Make] = MappingProxyType(
    {
        "lru": baselines.lru,
        "drop": baselines.keep_lru,
        "infercept": baselines.infercept,
        "continuum": baselines.continuum,
        "continuum-2s": baselines.continuum_preview,
        "tokencake": baselines.tokencake,
        "mori": baselines.mori,
        "thunderagent": baselines.thunderagent,
        "pause-prefetch": baselines.pause_prefetch,
        "ladder-elapsed": partial(ladder_rules, sight="elapsed"),
    }
)
"""Other people's, and simple rules. `lru` is the one to beat."""

BOUNDS: Mapping[str, Make] = MappingProxyType(
    {
        "lazy-oracle": lazy_oracle,
        "ladder-oracle": partial(ladder_rules, sight="oracle"),
        "infercept-oracle": partial(baselines.infercept, sight="oracle"),
        "belady": belady,
    }
)
"""With true durations: nobody can run these."""

RULES: Mapping[str, Make] = MappingProxyType({**OURS, **BASELINES, **BOUNDS})


def make_rules(name: str, **options: float) -> Rules:
    """The rules called `name` with `options`; ConfigError says what is allowed."""
    make = RULES.get(name)
    if make is None:
        raise ConfigError(f"policy={name!r} is unknown; there are {', '.join(sorted(RULES))}")
    allowed = [option for option in inspect.signature(make).parameters if option != "sight"]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(
            f"policy {name!r} has no option {', '.join(unknown)}; it has {', '.join(allowed) or 'no options'}"
        )
    return make(**options)
