"""Quiet: no progress bars of transformers while we load or unpack; `progress` tells what happens."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

_BARS_OF_THEIR_OWN = ("transformers.modeling_gguf_pytorch_utils",)
"""Modules that take tqdm as it is, whatever transformers' switch says."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it, transformers shows no bars; afterwards they are as they were."""
    from transformers.utils import logging

    with contextlib.ExitStack() as after:
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        for name in _BARS_OF_THEIR_OWN:
            with contextlib.suppress(ImportError):
                module: Any = importlib.import_module(name)
                if hasattr(module, "tqdm"):
                    after.callback(setattr, module, "tqdm", module.tqdm)
                    module.tqdm = _no_bar
        yield


def _no_bar(things: Any, *_args: object, **_kwargs: object) -> Any:
    return things
