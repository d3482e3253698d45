"""HTTP clients for ChatOpenAI whose silent retries are on the bill.

The openai package repeats a call that failed (`max_retries`) without telling anybody. A try that the server refused
cost nothing; one that was lost after it was sent was read by the server, and is billed with its input, estimated.
"""

from __future__ import annotations

from typing import Any

from agentkv.engine.attempts import noting_async_client, noting_client
from agentkv_langgraph.callback import callback_of


def openai_clients(kv: Any) -> dict[str, Any]:
    """`ChatOpenAI(..., **openai_clients(kv))`: both HTTP clients, each failed try a fact of whoever is calling.

    Use it together with `kv.attach(graph)`, or with this AgentKV's callback. Close the clients when you are done.
    """
    callback = callback_of(kv)
    return {
        "http_client": noting_client(callback.http_failed, callback.http_refuses),
        "http_async_client": noting_async_client(callback.http_failed, callback.http_refuses),
    }
