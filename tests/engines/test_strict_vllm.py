"""StrictServer's vLLM against the real one: what the one refuses the other refuses, and nothing else."""

from __future__ import annotations

import httpx
import pytest

from agentkv.adapters.strict_rules import CHAT_FIELDS, refusal

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]
BY_VERSION = ("a priority", "a negative priority")
"""Taken by 0.32, which then schedules by nothing; refused by 0.33. The strict server is the stricter one."""
REQUESTS = {
    "plain": {},
    "no priority": {"priority": 0},
    "a priority": {"priority": 1},
    "a negative priority": {"priority": -3},
    "a priority that is text": {"priority": "high"},
    "unknown": {"id_slot": 1, "nvext": {"nonsense": 1}},
    "salt": {"cache_salt": "t"},
    "empty salt": {"cache_salt": ""},
    "salt that is a number": {"cache_salt": 5},
    "parameters": {"kv_transfer_params": {"agentkv": {"session": "s"}}},
    "parameters that are text": {"kv_transfer_params": "x"},
    "session": {"session_id": "s"},
}


def test_the_strict_server_refuses_what_the_real_one_refuses(vllm_server):
    """But for what the next version refuses."""
    with vllm_server() as running:
        model = httpx.get(f"{running.url}/models", timeout=30).json()["data"][0]["id"]
        differs = {}
        for name, fields in REQUESTS.items():
            body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **fields}
            real = httpx.post(f"{running.url}/chat/completions", json=body, timeout=120)
            ours = refusal("vllm", body, {}, accepts=CHAT_FIELDS, priorities=False, names_fields=True)
            if name not in BY_VERSION and (real.status_code == 200) != (ours is None):
                differs[name] = (real.status_code, real.text[:300], ours)
    assert {} == differs
