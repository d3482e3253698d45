"""Reading JSON objects strictly: every field is asked for by name, and what nobody asked for is refused.

Covers: types, null, paths in messages, leftovers, lone surrogates. What the fields mean is `requests.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

from agentkv.errors import RequestInvalid


class Fields:
    """One JSON object. A field that is null counts as absent. `path` says where it lies, for messages to people."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            refuse(path or "body", f"must be an object, not {kind_of(value)}", code="invalid_type")
        self._left: dict[str, Any] = {name: field for name, field in value.items() if field is not None}
        self._nulls = {name for name, field in value.items() if field is None}
        self._path = path

    def at(self, name: str) -> str:
        """The field's full path."""
        return f"{self._path}.{name}" if self._path else name

    def any(self, name: str, default: Any = None) -> Any:
        """The field as it is."""
        return self._taken(name, default)

    def seen(self, name: str) -> Any:
        """The field as it is; it stays among those that nobody has asked for."""
        return self._left.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A text; required unless there is a default."""
        value = self._taken(name, default)
        if value is None:
            refuse(self.at(name), "is missing", code="missing_required_parameter")
        if not isinstance(value, str):
            refuse(self.at(name), f"must be a text, not {kind_of(value)}", code="invalid_type")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._taken(name, default)
        if not isinstance(value, bool):
            refuse(self.at(name), f"must be true or false, not {kind_of(value)}", code="invalid_type")
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list; None if absent."""
        value = self._taken(name, None)
        if value is not None and not isinstance(value, list):
            refuse(self.at(name), f"must be a list, not {kind_of(value)}", code="invalid_type")
        return value

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """A field of which we can do nothing but `allowed`; anything else is refused, saying `why`."""
        value = self._taken(name, None)
        if value is None or any(type(value) is type(each) and value == each for each in allowed):
            return
        refuse(self.at(name), f"{value!r:.100} is not supported: {why}", code="unsupported_value")

    def passed_on(self, *, known: AbstractSet[str]) -> dict[str, Any]:
        """What nobody asked for, nulls too, taken out; but for `known` names, which are left for `end` to refuse."""
        rest = {name: self._left.pop(name) for name in sorted(self._left.keys() - known)}
        return rest | dict.fromkeys(sorted(self._nulls - known))

    def _taken(self, name: str, default: Any) -> Any:
        self._nulls.discard(name)
        return self._left.pop(name, default)

    def end(self, *, harmless: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
        """Refuse what is left but for `harmless` names; those that were there are returned, sorted."""
        unknown = sorted(self._left.keys() - harmless)
        if unknown:
            refuse(self.at(unknown[0]), "is not a field that this server knows", code="unknown_parameter")
        return tuple(sorted(self._left))


def read_json(body: bytes) -> Any:
    """The JSON value of a request's body; RequestInvalid if it is none, or holds half a character."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RequestInvalid("the body is not UTF-8", param="body", code="invalid_unicode") from error
    except UnicodeEncodeError as error:
        raise RequestInvalid("the body holds half of a surrogate pair", param="body", code="invalid_unicode") from error
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f"the body is not JSON: {error!s:.200}", param="body", code="invalid_json") from error
    return value


def refuse(param: str, what: str, *, code: str = "invalid_value") -> NoReturn:
    """Raise RequestInvalid that names the field."""
    raise RequestInvalid(f"{param} {what}", param=param, code=code)


def kind_of(value: Any) -> str:
    """A JSON type in JSON's own words."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond all numbers that can be told again")
    return value
