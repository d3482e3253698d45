"""Places: which endpoint an address or a request means, and whether it can be one of the user's own.

Covers the one form of an endpoint's address by which everything of it is kept. Several engines may stand behind one
host, each under a path of its own, so the path counts; the route of a call, a query, a password, a scheme's own port and
a last `/v1` (servers answer with and without it) do not. Does not cover what answers there (`probe.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/v1/messages")
"""Routes of model calls, as their paths end: not everything that ends in "messages", such as a thread's. Azure's differ in what
stands before: `/openai/deployments/NAME`."""
OWN_NAMES = ("localhost", "local", "internal", "home.arpa")
"""Ends of names that no public host has."""
_PORTS = {"http": 80, "https": 443}
_AS_IT_IS = "/%:@!$&'()*+,;=~-._"


@lru_cache(maxsize=1024)
def place(base_url: str) -> str:
    """The endpoint at this address, which is an address too. Never raises: what is none is its own place."""
    try:
        parts = urlsplit(base_url)
        return _written(parts, parts.path)
    except ValueError:
        return base_url


def place_of(request: Any) -> str:
    """The endpoint that an HTTP library's request goes to."""
    return _called(str(request.url))


@lru_cache(maxsize=1024)
def _called(url: str) -> str:
    try:
        parts = urlsplit(url)
        route = next((route for route in MODEL_CALLS if parts.path.endswith(route)), "")
        return _written(parts, parts.path.removesuffix(route))
    except ValueError:
        return url


@lru_cache(maxsize=1024)
def is_own(base_url: str) -> bool:
    """Whether the address is one that only the user's own machines have: by what is written there, nobody is asked.

    Loopback, private and link-local addresses, `localhost`, names of one label, and those that end in OWN_NAMES.
    """
    try:
        host = (urlsplit(base_url).hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        single = len(labels) == 1 and any(letter.isalpha() for letter in host) and not host.startswith("0x")
        return single or any(host == end or host.endswith(f".{end}") for end in OWN_NAMES)
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_global and not address.is_multicast


def _written(parts: SplitResult, path: str) -> str:
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    with contextlib.suppress(UnicodeError):
        host = host if host.isascii() else host.encode("idna").decode()
    port = "" if parts.port in (None, _PORTS.get(parts.scheme)) else f":{parts.port}"
    path = quote(path, safe=_AS_IT_IS).rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{port}{path}"
