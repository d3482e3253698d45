"""Which web pages' scripts may call: their origins, checked, and the headers that tell a browser so (CORS).

Nothing is allowed unless an origin is named. Does not cover who may call: that is `keys.py`'s, and a preflight, which
a browser sends without a key, tells nobody more than that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from agentkv.errors import ConfigError

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Origins as browsers send them, or "*" for all. Raises ConfigError for what could never match."""
    checked = tuple(dict.fromkeys(origins))
    for origin in checked:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{origin!r:.120} is no origin: it is a scheme, a host in lower case and perhaps a port, without a path or "
                'a slash at the end, such as "https://app.example.com" or "http://localhost:3000"; "*" stands for all'
            )
    return checked


def cors(origins: Sequence[str], *, told: Sequence[str]) -> list[Middleware]:
    """The middleware, if there is anything to allow. `told`: headers of ours that scripts may read."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=checked_origins(origins),
            allow_methods=["GET", "POST"],
            allow_headers=[ANY],
            expose_headers=list(told),
        )
    ]
