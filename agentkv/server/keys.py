"""API keys: who may call, under which name, with which salt and which budget.

Covers reading keys from a TOML file or the environment, and finding the key of a request. A key is kept as its SHA-256
only, and is never logged. What a budget does is the runtime's.

    [keys.alice]
    key = "sk-..."            # or key_sha256 = "<64 hex digits>", or key_env = "ALICE_KEY"
    salt = "a secret"         # default: her name; keys with one salt share KV
    tokens = 1000000          # and usd = "5.00", model_calls = 500, tool_calls, seconds, device_seconds
    per = "day"               # or "month"; default "ever"
    zone = "Europe/Berlin"    # whose days; default: this machine's
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any

from agentkv.budget.days import Period, zone_of
from agentkv.budget.limits import LIMITS, Budget
from agentkv.errors import ConfigError
from agentkv.log import warn_once

ONE_KEY, MANY_KEYS = "AGENTKV_API_KEY", "AGENTKV_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SHORTEST = 8
_LIMITS = tuple(limit for limit in LIMITS if limit != "retries")
"""A caller's retries are calls like any other."""
_FIELDS = frozenset({"key", "key_sha256", "key_env", "salt", "per", "zone", *_LIMITS})
_PERIODS = ("ever", "day", "month")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Whoever holds it is the tenant `name`: tasks and sessions carry the name, KV is found under `salt` only.

    `budget` is for all its tasks together, anew each day or month of `zone` (None: this machine's) if `per` says so.
    """

    name: str
    digest: bytes
    salt: str
    budget: Budget | None = None
    per: Period = "ever"
    zone: tzinfo | None = None

    def task(self, task: str) -> str:
        """A tenant's own task; no other tenant's has that name."""
        return f"{self.name}/{task}"


class Keys:
    """The keys of one server. Immutable."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self.all = tuple(keys)
        by_digest = {key.digest: key for key in self.all}
        if len(by_digest) < len(self.all):
            raise ConfigError("two API keys are the same: whose calls would they be?")

    def find(self, authorization: str) -> Key | None:
        """The key behind an Authorization header; every key is compared, so that time tells nothing."""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = _digest(secret.strip())
        matches = [key for key in self.all if hmac.compare_digest(key.digest, digest)]
        return matches[0] if matches else None

    @classmethod
    def read(cls, path: Path | None, environment: Mapping[str, str]) -> Keys | None:
        """The keys of a file and of the environment together; None where there are none.

        AGENTKV_API_KEY is one key, named "default"; AGENTKV_API_KEYS is "alice=sk-...,bob=sk-...". Raises ConfigError
        naming the key at fault, never its secret.
        """
        keys = [] if path is None else _of_file(path, environment)
        if environment.get(ONE_KEY):
            keys.append(_key("default", {"key": environment[ONE_KEY]}, environment))
        for number, entry in enumerate(filter(None, environment.get(MANY_KEYS, "").split(","))):
            name, separator, secret = entry.strip().partition("=")
            if not separator:
                raise ConfigError(f"{MANY_KEYS}: entry {number + 1} is no name=key")
            keys.append(_key(name, {"key": secret}, environment))
        names = [key.name for key in keys]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"there are {names.count(name)} API keys named {name!r}")
        return cls(keys) if keys else None


def _of_file(path: Path, environment: Mapping[str, str]) -> list[Key]:
    try:
        body = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    if path.stat().st_mode & 0o077:
        warn_once("key_file_readable", path=str(path), advice="others on this machine can read it: chmod 600")
    entries = body.pop("keys", None)
    if body or not isinstance(entries, dict) or not entries:
        raise ConfigError(f"the key file {path} holds tables such as [keys.alice], and nothing else")
    return [_key(name, entry, environment) for name, entry in entries.items()]


def _key(name: str, entry: Any, environment: Mapping[str, str]) -> Key:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is no name for an API key: letters, digits and _.- are allowed, 64 at most")
    if not isinstance(entry, dict) or entry.keys() - _FIELDS:
        unknown = sorted(entry.keys() - _FIELDS) if isinstance(entry, dict) else [type(entry).__name__]
        raise ConfigError(f"API key {name!r}: {', '.join(unknown)} is not known; give {', '.join(sorted(_FIELDS))}")
    limits = {limit: entry[limit] for limit in _LIMITS if limit in entry}
    try:
        budget = Budget(**limits) if limits else None
    except ConfigError as error:
        raise ConfigError(f"API key {name!r}: {error}") from error
    salt = entry.get("salt", f"key:{name}")
    if not isinstance(salt, str) or not salt:
        raise ConfigError(f"API key {name!r}: salt must be a text that is not empty")
    per, zone = _period(name, entry, budget)
    return Key(name=name, digest=_secret(name, entry, environment), salt=salt, budget=budget, per=per, zone=zone)


def _period(name: str, entry: Mapping[str, Any], budget: Budget | None) -> tuple[Period, tzinfo | None]:
    per, zone = entry.get("per", "ever"), entry.get("zone")
    if per not in _PERIODS:
        raise ConfigError(f"API key {name!r}: per={per!r:.40} is none of {', '.join(_PERIODS)}")
    if "per" in entry and budget is None:
        raise ConfigError(f"API key {name!r}: per={per!r} without a limit; give one of {', '.join(_LIMITS)}")
    if zone is None:
        return per, None
    if per == "ever" or not isinstance(zone, str):
        raise ConfigError(f'API key {name!r}: zone={zone!r:.40} says whose day or month; give per = "day" or "month"')
    return per, zone_of(zone, what=f"API key {name!r}: zone")


def _secret(name: str, entry: Mapping[str, Any], environment: Mapping[str, str]) -> bytes:
    given = [field for field in ("key", "key_sha256", "key_env") if field in entry]
    if len(given) != 1 or not isinstance(entry[given[0]], str):
        raise ConfigError(f"API key {name!r}: give one text, either key, key_sha256 or key_env")
    value = entry[given[0]]
    if given[0] == "key_sha256":
        if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
            raise ConfigError(f"API key {name!r}: key_sha256 is not 64 hex digits")
        return bytes.fromhex(value)
    if given[0] == "key_env":
        value = environment.get(value, "")
        if not value:
            raise ConfigError(f"API key {name!r}: the environment has no {entry['key_env']}")
    if len(value) < _SHORTEST:
        raise ConfigError(f"API key {name!r} has {len(value)} characters; at least {_SHORTEST} are needed")
    return _digest(value)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
