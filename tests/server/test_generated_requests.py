"""Requests made of the server's own OpenAPI document: what it allows and what it does not, none answered with a 5xx.

A short run for each endpoint and kind; ten thousand requests in all are marked slow.
"""

from __future__ import annotations

import itertools
import json

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from agentkv import AgentKV, ScriptedEngine, ToolCall
from agentkv.engine.scripted import Reply
from agentkv.server.openapi import document

SCHEMA = schemathesis.openapi.from_dict(document("scripted"))
ENDPOINTS = [(path, method.upper()) for path, item in document("scripted")["paths"].items() for method in item]
FEW, MANY = 12, 850
ANSWERS = [
    "Hello to you",
    Reply(text="x", tool_calls=(ToolCall(id="c", name="read", arguments="{}"),)),
    "",
    ("a", "b c"),
]


@pytest.fixture
def place(place_of):
    """One server for many requests: what one leaves behind must not harm the next."""
    return place_of(AgentKV.with_engine(ScriptedEngine(itertools.cycle(ANSWERS))))


def run(place, path: str, method: str, mode: GenerationMode, examples: int, *, small: bool = False) -> dict[int, int]:
    """Send so many requests; the statuses that came, with their numbers. `small`: a real model answers, so few tokens."""
    statuses: dict[int, int] = {}
    strategy = SCHEMA[path][method].as_strategy(generation_mode=mode)

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=strategy)
    def send(case) -> None:
        if small and isinstance(case.body, dict):
            case.body = shorter(case.body, path, place.kv.engine.model)
        response = case.call(base_url=place.url, timeout=20)
        status = response.status_code
        statuses[status] = statuses.get(status, 0) + 1
        told = f"{method} {path} {case.body!r:.300} -> {status} {response.text[:300]}"
        assert status < 500, told
        if status >= 400:
            assert {"message", "type", "param", "code"} == json.loads(response.text)["error"].keys(), told
        elif response.headers["content-type"][0].startswith("text/event-stream"):
            assert "data: " in response.text
        else:
            case.validate_response(response, checks=[response_schema_conformance])

    send()
    return statuses


def shorter(body: dict, path: str, model: str) -> dict:
    """The same request for a model that takes its time: its name, few tokens and few choices, wrong values left wrong."""
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {**body, "model": model if body.get("model") == "scripted" else body.get("model")}
    if body.get(limit) is None and body.get("max_completion_tokens") is None:
        body[limit] = 6
    for name, most in ((limit, 6), ("max_completion_tokens", 6), ("n", 3)):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    return body


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_the_engine_answers_generated_requests_without_a_5xx(engine_place, path, mode):
    """Any schema, bias, choice and text that the document allows, on the real engine with a tiny model."""
    run(engine_place(), path, "POST", mode, FEW, small=True)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), ENDPOINTS, ids=str)
def test_no_request_is_answered_with_a_5xx(place, path, method, mode):
    """What the document allows and what it forbids, for every endpoint; answers are as it describes them."""
    if method == "GET" and mode is GenerationMode.NEGATIVE and "{" not in path:
        pytest.skip("there is nothing that could be wrong")
    statuses = run(place, path, method, mode, FEW)
    if (
        mode is GenerationMode.POSITIVE
        and "{" not in path
        and path.startswith(("/v1/chat", "/v1/comp", "/v1/resp", "/health", "/v1/models"))
    ):
        assert statuses.get(200), statuses


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), [one for one in ENDPOINTS if one[1] == "POST"], ids=str)
def test_ten_thousand_requests_are_answered_without_a_5xx(place, path, method, mode):
    """The same with many more; twelve such runs."""
    run(place, path, method, mode, MANY)
