"""Two objects with one state: an object of another class that keeps nothing for itself.

A subclass with hooks around some methods (`nodes.py`, `tools.py`, `hinted.py`) gets an instance that reads and writes
what the user's own object holds, so that a counter in it counts on, whoever is run. Does not cover the hooks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any


def twin(one: Any, cls: type) -> Any:
    """An object of `cls`, a class of the same layout as `one`'s, with the state of `one`; no constructor runs."""
    try:
        made: Any = object.__new__(cls)
    except TypeError:  # a class over a dict, a list and the like: they are made by their own `__new__`
        made = copy.copy(one)
        object.__setattr__(made, "__class__", cls)
    share(one, made)
    return made


def share(one: Any, other: Any) -> None:
    """From here on `other` keeps what it keeps where `one` does, and has what stands in the slots of `one`.

    A slot that is bound anew, on either side, is seen after the next call.
    """
    state = getattr(one, "__dict__", None)
    if state is not None and state is not other.__dict__:
        object.__setattr__(other, "__dict__", state)
    for name in _slots(type(one)):
        if not hasattr(type(other), name):  # a slot of a subclass's own
            continue
        try:
            value = object.__getattribute__(one, name)
        except AttributeError:
            with contextlib.suppress(AttributeError):
                object.__delattr__(other, name)
        else:
            object.__setattr__(other, name, value)


def _slots(cls: type) -> Iterator[str]:
    """Names of slots as they are stored."""
    for one in cls.__mro__:
        declared = one.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{one.__name__.lstrip('_')}{name}"
            elif name not in {"__dict__", "__weakref__"}:
                yield name
