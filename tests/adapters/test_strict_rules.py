"""What StrictServer refuses in the manner of Dynamo and vLLM; tests/engines holds it against the real ones."""

from __future__ import annotations

import httpx
import pytest

from agentkv.adapters.found import probe
from agentkv.adapters.strict import StrictServer

MESSAGES = [{"role": "user", "content": "hi"}]


def asked(server, headers=None, **fields):
    body = {"model": "m", "messages": MESSAGES, **fields}
    return httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nvext": {"session_control": {}}}, "unknown field `session_control`"),
        ({"nvext": {"agent_hints": {"ttl": 1}}}, "unknown field `ttl`"),
        ({"nvext": {"agent_hints": {"osl": -1}}}, "expected u32"),
        ({"nvext": {"agent_hints": {"priority": 0.5}}}, "expected i32"),
        ({"nvext": {"agent_hints": {"speculative_prefill": 1}}}, "expected a boolean"),
        ({"nvext": {"extra_fields": "timing"}}, "expected a sequence"),
        ({"nvext": {"cache_salt": 5}}, "expected a string"),
        ({"nvext": []}, "expected struct NvExt"),
        ({"id_slot": 1}, "Unsupported parameter(s): `id_slot`"),
        ({"messages": []}, "cannot be empty"),
    ],
)
def test_dynamo_refuses_what_it_does_not_know_in_its_own_words(fields, words):
    """Without OpenAI's `error` around them."""
    with StrictServer(dialect="dynamo") as server:
        answer = asked(server, **fields)
        assert (400, 1) == (answer.status_code, server.rejected)
    assert words in answer.json()["message"]


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400)])
def test_dynamo_takes_ids_of_256_bytes(length, status):
    """One more is refused."""
    with StrictServer(dialect="dynamo") as server:
        assert status == asked(server, {"X-Dynamo-Session-ID": "a" * length}).status_code


@pytest.mark.parametrize(
    ("fields", "priorities", "status"),
    [
        ({"priority": 0}, False, 200),
        ({"priority": 1}, False, 400),
        ({"priority": 1}, True, 200),
        ({"priority": "high"}, True, 400),
        ({"nvext": {"nonsense": 1}, "id_slot": 1}, False, 200),
        ({"cache_salt": ""}, False, 400),
        ({"cache_salt": "t"}, False, 200),
        ({"kv_transfer_params": "x"}, False, 400),
        ({"kv_transfer_params": {"agentkv": {}}}, False, 200),
    ],
)
def test_vllm_ignores_what_it_does_not_know_and_minds_priorities(fields, priorities, status):
    """Unless it schedules by them."""
    with StrictServer(dialect="vllm", priorities=priorities) as server:
        assert status == asked(server, **fields).status_code


@pytest.mark.parametrize("dialect", ["dynamo", "vllm"])
def test_a_dialect_says_who_it_is(dialect):
    """So that the adapter of that engine is taken."""
    with StrictServer(dialect=dialect) as server:
        assert dialect == probe(server.url)


@pytest.mark.parametrize("fault", ["html", "nonsense", "close"])
def test_a_fault_can_be_at_one_place_only(fault):
    """Metrics without end beside chats that work, for instance."""
    with StrictServer(fault=fault, fault_at="/metrics") as server:
        assert 200 == asked(server).status_code
        try:
            answer = httpx.get(f"{server.url}/metrics", timeout=5)
        except httpx.RemoteProtocolError:
            assert "close" == fault
        else:
            assert {"html": "text/html", "nonsense": "application/json"}[fault] == answer.headers["content-type"]
