"""JSON that stays JSON under a budget: fewer items of arrays, dull fields, less depth, shorter strings.

Of an array the first items, the last one and those that tell of a failure are kept; its last item then says how many
it had. The marker, as the top level's last item or field, says how to read the whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentkv.context.slim.alarm import is_alarm
from agentkv.context.slim.jsontext import Number, looks_like_json, parsed
from agentkv.context.slim.pick import cost

_WIDEST, _LONGEST = 60, 1_500
"""Items of an array or object, and characters of a string, that are looked at."""
_NODES = 6_000
_SEARCHED_ITEMS, _SEARCHED_FIELDS, _SEARCHED_CHARS, _ODD_ITEMS = 20_000, 24, 300, 24
_USUAL_ITEMS = 5
_DULL_KEY = re.compile(r"(?i)(?:^|_)(?:urls?|href|links?|node_id|gravatar_id|etag|avatar|self)$|Urls?$")
_TELLING_KEY = re.compile(r"(?i)(?:error|exception|fail|status|state|result|conclusion|severity|level|message|reason)")
_FAILURE_KEY = re.compile(r"(?i)error|exception|failure")
_FIELD_CHARS = 60
_PLAIN_NAME = re.compile(r"\w{1,24}")
_TOLD_NAMES = 4


@dataclass(frozen=True, slots=True)
class _Items:
    """An array: its first items, those of the rest that tell of a failure, its last one."""

    first: list[Any]
    odd: list[Any]
    total: int


@dataclass(frozen=True, slots=True)
class _Fields:
    """An object: its first fields."""

    first: dict[str, Any]
    total: int


@dataclass(frozen=True, slots=True)
class _Text:
    """A long string: both ends."""

    ends: str
    total: int


@dataclass(frozen=True, slots=True)
class _Level:
    """How much is written: items per array, fields per object, characters per string, depth."""

    items: int
    fields: int
    chars: int
    depth: int


_LEVELS = tuple(
    _Level(*row)
    for row in (
        (40, 60, 600, 12),
        (24, 60, 300, 10),
        (14, 60, 240, 8),
        (9, 50, 200, 7),
        (6, 40, 160, 6),
        (4, 30, 120, 6),
        (3, 24, 100, 5),
        (2, 16, 80, 5),
        (2, 10, 60, 4),
        (1, 8, 40, 3),
        (1, 5, 24, 2),
        (1, 3, 16, 1),
    )
)

_recent: OrderedDict[bytes, tuple[Any] | None] = OrderedDict()
_RECENT = 8
_lock = threading.Lock()


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value (what nests very deep is believed)."""
    return looks_like_json(text) and _pruned(text) is not None


def thin(text: str, budget: int) -> str | None:
    """JSON of at most about `budget` tokens that shows what is in `text`; None if that is not JSON."""
    pruned = _pruned(text)
    if pruned is None:
        return None
    for level in _LEVELS:
        body = _written(pruned[0], level, level.depth)
        if cost(body) <= budget:
            return body
    return empty(text)


def empty(text: str) -> str:
    """Nothing, in the kind of JSON that `text` is; "" if it is none."""
    pruned = _pruned(text) if looks_like_json(text) else None
    if pruned is None:
        return ""
    return "{}" if isinstance(pruned[0], _Fields) else "[]" if isinstance(pruned[0], _Items) else '""'


def left_out(text: str, body: str) -> list[str]:
    """Names of some dull fields that are in `text` and nowhere in `body`, as far as they can stand in a marker."""
    pruned = _pruned(text)
    names: dict[str, None] = {}
    if pruned is not None:
        _gather(pruned[0], names)
    return [name for name in names if f'"{name}":' not in body][:_TOLD_NAMES]


def _gather(value: Any, names: dict[str, None]) -> None:
    if isinstance(value, _Items):
        for item in value.first[:_USUAL_ITEMS]:
            _gather(item, names)
    elif isinstance(value, _Fields):
        for name, inner in value.first.items():
            if _dull(name, inner) and _PLAIN_NAME.fullmatch(name):
                names[name] = None
            _gather(inner, names)


def _pruned(text: str) -> tuple[Any] | None:
    """The value in a size that can be walked through, in a tuple (it may be null); None if `text` is not JSON.

    The last few are remembered by digest: one output is asked about several times in a row.
    """
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    with _lock:
        if key in _recent:
            return _recent[key]
    found = parsed(text)
    pruned = None if found is None else (_prune(found.value, [_NODES]),)
    with _lock:
        _recent[key] = pruned
        if len(_recent) > _RECENT:
            _recent.popitem(last=False)
    return pruned


def _prune(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    wide = _WIDEST if left[0] > 0 else 1
    if isinstance(value, Number):
        return value
    if isinstance(value, str):
        ends = value if len(value) <= _LONGEST else value[: _LONGEST // 2] + value[-_LONGEST // 2 :]
        return _Text(ends, len(value))
    if isinstance(value, list):
        odd = _odd(value)
        return _Items([_prune(item, left) for item in value[:wide]], [_prune(item, left) for item in odd], len(value))
    if isinstance(value, dict):
        names = list(value)
        return _Fields({name: _prune(value[name], left) for name in names[:wide]}, len(names))
    return value


def _odd(values: list[Any]) -> list[Any]:
    """Items that tell of a failure or have fields that others lack, where not all do; and the last."""
    usual = {name for item in values[:_USUAL_ITEMS] if isinstance(item, dict) for name in item}
    told = [
        item
        for item in values[1:_SEARCHED_ITEMS]
        if isinstance(item, dict) and (not item.keys() <= usual or _tells_of_failure(item))
    ]
    if len(told) * 3 > len(values):
        told = []
    odd = told[:_ODD_ITEMS]
    if len(values) > 1 and (not odd or odd[-1] is not values[-1]):
        odd.append(values[-1])
    return odd


def _tells_of_failure(item: dict[str, Any]) -> bool:
    for name, value in list(item.items())[:_SEARCHED_FIELDS]:
        if not value or value is True or not _TELLING_KEY.search(name[-_FIELD_CHARS:]):
            continue
        if isinstance(value, str):
            if _FAILURE_KEY.search(name[-_FIELD_CHARS:]) or is_alarm(value[:_SEARCHED_CHARS]):
                return True
        elif isinstance(value, dict) and _FAILURE_KEY.search(name[-_FIELD_CHARS:]):
            return True
    return False


def _written(value: Any, level: _Level, depth: int) -> str:
    """`value` as JSON under the limits of `level`, `depth` of which are left."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, _Text):
        return _string(value, level.chars)
    if isinstance(value, _Items):
        return _array(value, level, depth)
    if isinstance(value, _Fields):
        return _object(value, level, depth)
    return json.dumps(value)


def _string(text: _Text, chars: int) -> str:
    value = text.ends
    if text.total > max(chars, 4) * 5 // 4 + 16:
        head, tail = chars * 3 // 4, chars // 4
        value = f"{value[:head]} ..{text.total - head - tail} chars.. {value[-tail:]}"
    return json.dumps(value, ensure_ascii=False)


def _array(array: _Items, level: _Level, depth: int) -> str:
    if depth <= 0 and array.total:
        return f'"[{array.total} items]"'
    if array.total <= min(level.items + 1, len(array.first)):
        return _listed(_written(item, level, depth - 1) for item in array.first)
    first = array.first[: max(1, level.items - 1)]
    odd = [item for item in array.odd[-level.items :] if not any(item is known for known in first)]
    told = [_written(item, level, depth - 1) for item in [*first, *odd]]
    if len(told) < array.total:
        told.append(f'"{array.total - len(told)} more of {array.total} items"')
    return _listed(told)


def _listed(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _object(fields: _Fields, level: _Level, depth: int) -> str:
    if depth <= 0 and fields.total:
        return f'"{{{fields.total} fields}}"'
    top = depth == level.depth
    names = [name for name in fields.first if top or not _dull(name, fields.first[name])]
    kept = names if len(names) <= level.fields + 1 else names[: level.fields]
    told = [
        f"{json.dumps(name[:_FIELD_CHARS], ensure_ascii=False)}:{_written(fields.first[name], level, depth - 1)}"
        for name in kept
    ]
    more = fields.total - len(kept) - (0 if top else len(fields.first) - len(names))
    if more > 0:
        told.append(f'"...":"{more} more fields"')
    return f"{{{','.join(told)}}}"


def _dull(name: str, value: Any) -> bool:
    """A field that rarely says anything: links to oneself, ids of another system, nothing at all."""
    if value is None or (isinstance(value, _Text | _Items | _Fields) and not value.total):
        return True
    return isinstance(value, _Text | _Fields) and _DULL_KEY.search(name[-_FIELD_CHARS:]) is not None
