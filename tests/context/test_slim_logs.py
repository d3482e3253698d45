"""Real logs, made on the spot: a fifth of the tokens at most, and everything that was planted is still there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from agentkv.context.outputs import Outputs
from agentkv.context.slim import MAX_TOKENS, Slimmer
from agentkv.context.tokens import count_text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "context_logs.py"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("context_logs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["context_logs"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["context_logs"]


def _slimmed(logs):
    slimmer = Slimmer(outputs=Outputs(), count=count_text)
    return {name: (log, slimmer.slim(log.text, tool=log.tool, command=log.command)) for name, log in logs.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_logs_shrink_to_a_fifth_and_keep_what_matters(made):
    """Every failing test, error, warning, summary and commit; each log by itself."""
    for name, (log, once) in _slimmed(made.real_logs()).items():
        assert [] == [piece for piece in log.must_keep if piece not in once.text], name
        assert once.raw_tokens >= 5 * once.kept_tokens, (name, once.raw_tokens, once.kept_tokens)
        assert once.kept_tokens <= MAX_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everyday_outputs_shrink_by_a_third(made):
    """All together, and nothing that was planted is lost."""
    done = _slimmed(made.medium_logs())
    for name, (log, once) in done.items():
        assert [] == [piece for piece in log.must_keep if piece not in once.text], name
        assert once.kept_tokens <= once.raw_tokens, name
    assert sum(once.raw_tokens for _, once in done.values()) >= 1.5 * sum(once.kept_tokens for _, once in done.values())
