"""Usage reports in all their spellings: one meaning, no exception, and doubt is said."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CompletionUsage

from agentkv.core.reported import Reported, merged, report_in, reported, told_beside, usage_of
from agentkv.core.usage import Usage


def used(input_tokens, cached=0, output=0, *, thought=0, written=0, long=0):
    return Usage(
        input_tokens=input_tokens,
        cached_tokens=cached,
        output_tokens=output,
        reasoning_tokens=thought,
        cache_write_tokens=written,
        cache_write_long_tokens=long,
        calls=1,
    )


OPENAI = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 30, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 12},
}
KNOWN = {
    "openai": (OPENAI, used(100, 64, 20, thought=12, written=30)),
    "openai-responses": (
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "input_tokens_details": {
                "cached_tokens": 10,
                "cache_write_tokens": 80,
                "cache_write_tokens_details": {"ttl_30m_tokens": 30, "ttl_12h_tokens": 50},
            },
            "output_tokens_details": {"reasoning_tokens": 5},
        },
        used(100, 10, 20, thought=5, written=80, long=50),
    ),
    "deepseek": (
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "prompt_cache_hit_tokens": 64,
            "prompt_cache_miss_tokens": 36,
        },
        used(100, 64, 20),
    ),
    "deepseek-without-the-sum": (
        {"completion_tokens": 20, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36},
        used(100, 64, 20),
    ),
    "moonshot": ({"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 64}, used(100, 64, 20)),
    "anthropic": (
        {
            "input_tokens": 6,
            "output_tokens": 20,
            "cache_read_input_tokens": 64,
            "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
            "service_tier": "standard",
        },
        used(100, 64, 20, written=30, long=20),
    ),
    "anthropic-by-lifetime-only": (
        {
            "input_tokens": 70,
            "output_tokens": 20,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
        },
        used(100, 0, 20, written=30, long=20),
    ),
    "proxy-beside-by-the-total": (
        {
            "prompt_tokens": 70,
            "completion_tokens": 20,
            "total_tokens": 120,
            "cache_read_input_tokens": 20,
            "cache_creation_input_tokens": 10,
        },
        used(100, 20, 20, written=10),
    ),
    "proxy-beside-as-it-cannot-be-inside": (
        {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26, "cache_read_input_tokens": 94},
        used(100, 94, 20),
    ),
    "proxy-inside": (
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 64, "cache_creation_tokens": 30},
            "cache_read_input_tokens": 64,
            "cache_creation_input_tokens": 30,
        },
        used(100, 64, 20, written=30),
    ),
    "bedrock": (
        {"inputTokens": 6, "outputTokens": 20, "totalTokens": 120, "cacheReadInputTokens": 64, "cacheWriteInputTokens": 30},
        used(100, 64, 20, written=30),
    ),
    "gemini": (
        {
            "promptTokenCount": 90,
            "toolUsePromptTokenCount": 10,
            "cachedContentTokenCount": 64,
            "candidatesTokenCount": 8,
            "thoughtsTokenCount": 12,
            "totalTokenCount": 120,
        },
        used(100, 64, 20, thought=12),
    ),
    "gemini-snake": (
        {"prompt_token_count": 100, "cached_content_token_count": 64, "candidates_token_count": 20}, used(100, 64, 20),
    ),
    "xai-thoughts-beside": (
        {
            "prompt_tokens": 100,
            "completion_tokens": 8,
            "total_tokens": 120,
            "completion_tokens_details": {"reasoning_tokens": 12},
        },
        used(100, 0, 20, thought=12),
    ),
    "ollama": ({"prompt_eval_count": 100, "eval_count": 20}, used(100, 0, 20)),
    "vllm": (
        {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 64, "created_cache_tokens": 32},
        },
        used(100, 64, 20, written=32),
    ),
    "vllm-without-details": (
        {"prompt_tokens": 100, "completion_tokens": 20, "prompt_tokens_details": None}, used(100, 0, 20),
    ),
    "llama.cpp-timings": ({"timings": {"cache_n": 64, "prompt_n": 36, "predicted_n": 20}}, used(100, 64, 20)),
    "llama.cpp-both": (
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20}, "timings": {"cache_n": 64, "prompt_n": 36}},
        used(100, 64, 20),
    ),
    "llama.cpp-native": (
        {
            "tokens_evaluated": 100,
            "tokens_predicted": 20,
            "tokens_cached": 119,
            "timings": {"cache_n": 64, "prompt_n": 36, "predicted_n": 20},
        },
        used(100, 64, 20),
    ),
    "total-only": ({"prompt_tokens": 100, "total_tokens": 120}, used(100, 0, 20)),
    "langchain": (
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "total_tokens": 120,
            "input_token_details": {"cache_read": 64, "cache_creation": 30},
            "output_token_details": {"reasoning": 12},
        },
        used(100, 64, 20, thought=12, written=30),
    ),
    "langchain-anthropic-lifetimes": (
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "input_token_details": {
                "cache_read": 64,
                "cache_creation": 0,
                "ephemeral_5m_input_tokens": 10,
                "ephemeral_1h_input_tokens": 20,
            },
        },
        used(100, 64, 20, written=30, long=20),
    ),
    "langchain-tiers": (
        {
            "input_tokens": 100,
            "output_tokens": 20,
            "input_token_details": {"priority_cache_read": 64, "priority": 36},
            "output_token_details": {"priority_reasoning": 12, "priority": 8},
        },
        used(100, 64, 20, thought=12),
    ),
    "langchain-llm-output": ({"token_usage": OPENAI, "model_name": "m"}, used(100, 64, 20, thought=12, written=30)),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_every_spelling_means_the_same(name):
    """The input holds what was cached, the output what was thought, and nothing is doubted."""
    report, usage = KNOWN[name]
    read = reported(report)
    assert usage == read.usage == usage_of(report)
    assert not read.estimated


def test_proxy_that_leaves_it_open_is_read_as_beside_and_doubted():
    """Anthropic's counts under OpenAI's names, and no total that would decide."""
    read = reported({"prompt_tokens": 70, "completion_tokens": 20, "cache_read_input_tokens": 30})
    assert Reported(usage=used(100, 30, 20), estimated=True, cached_by={"provider": 30}) == read


@pytest.mark.parametrize(
    ("report", "usage"),
    [
        ({"prompt_tokens": -5, "completion_tokens": 3}, used(0, 0, 3)),
        ({"prompt_tokens": 5, "completion_tokens": -3}, used(5)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}, used(5, 5)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -9}}, used(5)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 6}},
            used(9, 6, written=3),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 7}},
            used(5, 0, 3, thought=3),
        ),
        ({"prompt_tokens": "5", "completion_tokens": "3"}, used(5, 0, 3)),
        ({"prompt_tokens": 5, "completion_tokens": "three"}, used(5)),
        ({"prompt_tokens": 5.5, "completion_tokens": 3}, used(5, 0, 3)),
        ({"prompt_tokens": 5, "completion_tokens": float("nan")}, used(5)),
        ({"prompt_tokens": 5, "completion_tokens": 10**20}, used(5)),
        ({"prompt_tokens": 5, "completion_tokens": True}, used(5)),
        ({"tokens_evaluated": 100, "tokens_predicted": 20, "tokens_cached": 119}, used(100, 0, 20)),
    ],
)
def test_wrong_numbers_are_bounded_and_marked(report, usage):
    """A server's mistake neither raises nor passes for the truth."""
    read = reported(report)
    assert (usage, True) == (read.usage, read.estimated)


@pytest.mark.parametrize(
    "report",
    [None, {}, "usage", 7, {"usage": None}, {"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": None}],
)
def test_nothing_is_none(report):
    """Zeros are how some servers say that they did not count."""
    assert usage_of(report) is None


def test_objects_are_read_like_mappings():
    """The openai package's own values, with fields that it does not know, and plain attributes."""
    made = CompletionUsage.model_construct(prompt_tokens=9, completion_tokens=2, total_tokens=11, cached_tokens=4)
    assert used(9, 4, 2) == usage_of(made)
    assert used(9, 0, 2) == usage_of(SimpleNamespace(prompt_tokens=9, completion_tokens=2))


@pytest.mark.parametrize(
    ("report", "tier"),
    [
        ({"usage": OPENAI, "service_tier": "flex"}, "flex"),
        ({"usage": OPENAI, "service_tier": "default"}, ""),
        ({"usage": {**OPENAI, "service_tier": "batch"}}, "batch"),
        (KNOWN["anthropic"][0], ""),
        (KNOWN["langchain-tiers"][0], "priority"),
        (OPENAI, ""),
    ],
)
def test_service_tier_is_read_from_where_it_stands(report, tier):
    """Beside the usage, inside it, or in front of LangChain's keys."""
    assert tier == reported(report).service_tier


def test_sglang_tells_the_tiers_of_its_cache():
    """Where it does not say, or its parts are not the sum, the provider stands for all of them."""
    report = {"usage": {**OPENAI}, "sglext": {"cached_tokens_details": {"device": 32, "host": 16, "storage": 16}}}
    assert {"device": 32, "host": 16, "disk": 16} == reported(report).cached_by
    report["sglext"]["cached_tokens_details"]["device"] = 320
    assert {"provider": 64} == reported(report).cached_by
    assert {} == reported({"prompt_tokens": 9}).cached_by


@pytest.mark.parametrize("details", [{"device": True}, {"device": 1.0}, {"device": -1, "host": 2}, {"device": "1"}])
def test_tiers_that_are_no_counts_are_left_out(details):
    """A bill's parts are whole numbers."""
    report = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}}}
    assert {"provider": 1} == reported({**report, "sglext": {"cached_tokens_details": details}}).cached_by


@pytest.mark.parametrize(
    ("cached", "written", "parts", "sum_of_all"),
    [
        (0, 0, {"host": 40, "disk": 60}, 100),
        (0, 0, {"host": 41, "disk": 60}, None),
        (0, 30, {"host": 71}, None),
        (0, 30, {"host": 70}, 70),
        (50, 0, {"host": 50}, 50),
        (50, 0, {"host": 20}, 50),
        (50, 0, {"host": 51}, None),
        (0, 0, {"host": 0}, None),
        (0, 0, {"host": -1, "disk": 5}, None),
        (0, 0, {"host": 1.5}, None),
        (0, 0, {}, None),
    ],
)
def test_tiers_that_are_told_beside_the_answer_fit_into_it(cached, written, parts, sum_of_all):
    """Or nothing is taken over: a part is never more than the whole."""
    usage = Usage(input_tokens=100, cached_tokens=cached, cache_write_tokens=written, calls=1)
    read = told_beside(usage, parts)
    assert sum_of_all == (None if read is None else read[0].cached_tokens)
    if read is not None:
        assert parts == read[1]


def test_usage_is_found_where_servers_put_it_in_a_chunk():
    """Groq beside the chunk's fields, Moonshot in its choice, most in the chunk."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    for chunk in ({"usage": usage}, {"x_groq": {"usage": usage}}, {"choices": [{"usage": usage}]}):
        assert used(9, 0, 2) == usage_of(report_in(chunk))
    assert {} == report_in({"usage": None, "choices": [{"delta": {}}]}) == report_in(None)


def test_later_reports_add_to_the_earlier_and_never_take_back():
    """A final chunk may bring only the output."""
    first = {"usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}}
    last = {"usage": {"prompt_tokens": 0, "completion_tokens": 7, "prompt_tokens_details": None}}
    both = merged(first, last)
    assert used(9, 4, 7) == usage_of(both)
    assert both == merged(both, last) == merged(both, {"usage": {"completion_tokens": -1}})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                sorted({key for report, _ in KNOWN.values() for key in report} | {"usage", "cached_tokens"})
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@given(anything, anything)
def test_no_report_raises(one, two):
    """Whatever a server sends, the answer is a usage that holds its invariants, or none."""
    reported(one)
    report_in(two)
    if isinstance(one, dict) and isinstance(two, dict):
        reported(merged(one, two))


NVEXT = {"worker_id": {"decode_worker_id": 2**63}, "timing": {"kv_hit_rate": 0.75}}


@pytest.mark.parametrize(
    ("usage", "cached", "estimated"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 1}, 75, True),
        ({"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}, 0, False),
        ({"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}, 64, False),
        ({"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": None}, 75, True),
    ],
)
def test_a_routers_belief_counts_where_its_worker_tells_nothing(usage, cached, estimated):
    """What the worker says is what was; what the router expected is an estimate, and both stand beside each other."""
    read = reported({"usage": usage, "nvext": NVEXT})
    assert (cached, estimated) == (read.usage.cached_tokens, read.estimated)
    assert (str(2**63), 0.75) == (read.worker, read.expected_hit_rate)
    assert cached == sum(read.cached_by.values())


@pytest.mark.parametrize("rate", [1.5, -0.1, float("nan"), float("inf"), "0.5", True, None, [0.5], 10**400])
@pytest.mark.parametrize("worker", [-1, 2**64, "7", True, 1.5, None])
def test_lies_of_a_router_are_not_told(rate, worker):
    """Neither a share that is none nor a worker that is no number."""
    nvext = {"worker_id": {"decode_worker_id": worker}, "timing": {"kv_hit_rate": rate}}
    read = reported({"usage": {"prompt_tokens": 10, "completion_tokens": 1}, "nvext": nvext})
    assert ("", None, 0, False) == (read.worker, read.expected_hit_rate, read.usage.cached_tokens, read.estimated)


@pytest.mark.parametrize("nvext", ["x", 7, [], {"worker_id": 7, "timing": "x"}, {"worker_id": [], "timing": []}])
def test_a_routers_word_in_another_shape_is_none(nvext):
    """Nothing raises."""
    read = reported({"usage": {"prompt_tokens": 10, "completion_tokens": 1}, "nvext": nvext})
    assert ("", None) == (read.worker, read.expected_hit_rate)
