"""Checkpoints with quantised weights: which kinds transformers loads for us, and the package that each needs.

Covers naming what is missing before a weight is read. The loading is transformers' own; KV stays in the compute type.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from agentkv.errors import ExtraMissing, UnsupportedModel

_PACKAGES = {
    "awq": ("gptqmodel",),
    "gptq": ("gptqmodel", "optimum"),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "compressed-tensors": ("compressed_tensors",),
    "mxfp4": (),
}
"""Method -> modules that transformers imports for it. mxfp4 (GPT-OSS) is unpacked to bfloat16 where no kernel is."""


def method_of(config: Any) -> str | None:
    """How the checkpoint's weights are quantised; None if they are plain numbers."""
    for owner in (config, config.get_text_config()):
        given = getattr(owner, "quantization_config", None)
        if given is not None:
            field = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", None)
            return str(getattr(field, "value", field))
    return None


def require(method: str, name: str) -> None:
    """Raise ExtraMissing with the pip command, or UnsupportedModel for a method that nobody has tried here."""
    if method not in _PACKAGES:
        raise UnsupportedModel(
            f"{name} is quantised with {method}, which is not known here; known are {', '.join(sorted(_PACKAGES))}"
        )
    missing = [package for package in _PACKAGES[method] if importlib.util.find_spec(package) is None]
    if missing:
        wanted = " ".join(package.replace("_", "-") for package in missing)
        raise ExtraMissing(
            f"{name} is quantised with {method}, and transformers needs a package for it: pip install {wanted}"
        )
