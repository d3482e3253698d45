"""AgentKVMiddleware: hints, slimming and the bill for `langchain.agents.create_agent`.

Covers model calls (billed from what their callbacks show, whoever retries or falls back inside; hints to the endpoints
that were named) and tool calls (`tools.py`). It wraps only: a before- or after-hook would be a node of the graph, and
one more checkpoint in each step. Does not cover model calls that other middleware makes beside the agent's own (a
summary, for instance): `kv.attach(agent)` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Token
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config

from agentkv import log
from agentkv.errors import BudgetExceeded, ExtraMissing
from agentkv_langgraph.budget import Notices, closed
from agentkv_langgraph.callback import callback_of
from agentkv_langgraph.endpoints import Endpoints, Kind, chosen
from agentkv_langgraph.hinted import with_hint
from agentkv_langgraph.outputs import read_output_tool
from agentkv_langgraph.tools import tool_wrappers

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest
except ImportError as missing:
    raise ExtraMissing("AgentKVMiddleware needs langchain: pip install 'agentkv-sdk[agents]'") from missing

_numbers = itertools.count(1)


class AgentKVMiddleware(AgentMiddleware):
    """`create_agent(model, tools, middleware=[AgentKVMiddleware(kv)])`.

    `slim`: tool outputs are shortened before they enter the state; `read_output` gives the agent the tool that reads
    the whole again. `hints` names the endpoints that take hints in a call, `{"http://gpu:8000/v1": "agentkv"}`; a kind
    is "agentkv", "neutral", or a function from the caller to `{"extra_body": ..., "extra_headers": ...}`. What the
    user set there stands above it, and an endpoint that refuses it is called once more without, and then always.
    `name` need only be given to find this middleware in traces: several may live in one agent.

    Raises ConfigError for a kind that does not exist.
    """

    def __init__(
        self,
        kv: Any,
        *,
        slim: bool = True,
        read_output: bool = False,
        hints: Mapping[str, Kind] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._kv = kv
        self._callback = callback_of(kv)
        self._endpoints = Endpoints(hints or {})
        self._wrappers = tool_wrappers(kv, slim=slim)
        self._notices = Notices(kv)
        number = next(_numbers)
        self._name = name or (type(self).__name__ if number == 1 else f"{type(self).__name__}-{number}")
        self.tools = [read_output_tool(kv)] if read_output else []

    @property
    def name(self) -> str:
        return self._name

    # -- model calls

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        token = self._listen()
        try:
            return handler(self._told(self._noticed(request)))
        except BudgetExceeded as refused:
            return closed(self._kv, request.messages, refused)
        finally:
            _let_go(token)

    async def awrap_model_call(
        self,
        request: ModelRequest,
        handler: Callable[[ModelRequest], Awaitable[Any]],
    ) -> Any:
        token = self._listen()
        try:
            return await handler(self._told(self._noticed(request)))
        except BudgetExceeded as refused:
            return closed(self._kv, request.messages, refused)
        finally:
            _let_go(token)

    def _noticed(self, request: Any) -> Any:
        """The request with the notice of its budget's soft mark, if it is to have one. Never an error."""
        if getattr(request.model, "_llm_type", "") == "agentkv":  # its prompts get it on their way
            return request
        try:
            shown = self._notices.shown(request.messages)
            return request if shown is request.messages else request.override(messages=list(shown))
        except Exception as error:
            log.failed("middleware_notice_failed", error=repr(error))
            return request

    def _told(self, request: Any) -> Any:
        """The request with a model that sends hints; the same where there are none. Never an error."""
        if not self._endpoints:
            return request
        try:
            model = chosen(request.model)
            extra = self._endpoints.hint_for(model, self._kv.caller())
            if extra is None:
                return request

            def hint() -> Any:
                return None if self._endpoints.has_refused(model) else extra

            def took_back() -> None:
                self._endpoints.refused(model)
                log.count("endpoint_refused_hints")

            return request.override(model=with_hint(model, hint, took_back))
        except Exception as error:
            log.failed("middleware_hint_failed", error=repr(error))
            return request

    def _listen(self) -> Token[Any] | None:
        """From here on model calls are heard by this AgentKV's callback; None where it hears them already."""
        config = var_child_runnable_config.get()
        ours = self._callback
        known = (config or {}).get("callbacks")
        heard = known.handlers if isinstance(known, BaseCallbackManager) else known or ()
        if any(one is ours for one in heard):
            return None
        callbacks: Any = [*heard, ours]
        if isinstance(known, BaseCallbackManager):
            callbacks = known.copy()
            callbacks.add_handler(ours, inherit=True)
        changed: Any = {**(config or {}), "callbacks": callbacks}
        return var_child_runnable_config.set(changed)

    # -- tool calls

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return self._wrappers["wrap_tool_call"](request, handler)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self._wrappers["awrap_tool_call"](request, handler)


def _let_go(token: Token[Any] | None) -> None:
    if token is not None:
        var_child_runnable_config.reset(token)
