"""OpenAI and Anthropic against servers that check every request by the provider's own published schema."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import anthropic
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosted_servers import MESSAGES, problem

from agentkv import AgentKV, Budget, ScriptedEngine
from agentkv.adapters import keepalive, openai_hosted
from agentkv.adapters.anthropic_hosted import AnthropicHosted, is_marked, marked
from agentkv.adapters.hosted_waits import HostedWaits
from agentkv.adapters.keepalive import KeepingAlive
from agentkv.adapters.openai_hosted import OpenAIHosted, PreparesResponses, broken, generation_of, key_of
from agentkv.adapters.prewarm import Wait
from agentkv.adapters.refusals import MARKS_AFTER
from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts
from agentkv.policy.hosted import CachePrices

LONG = "word " * 2000
TOOLS = [{"name": "ls", "description": "list", "input_schema": {"type": "object", "properties": {}}}]
PRICES = CachePrices(input=3.0, read=0.3, write_short=3.75, write_long=6.0)


def until(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def ask_anthropic(kv, hosted, **body):
    asked = {"model": "claude-haiku-4-5", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]} | body
    with anthropic.Anthropic(
        base_url=hosted.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client()
    ) as client:
        return client.messages.create(**asked)


def ask_openai(kv, hosted, **body):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    asked = {"model": "gpt-5.6", "messages": messages} | body
    with openai.OpenAI(base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client:
        return client.chat.completions.create(**asked)


# -- Anthropic


def test_a_messages_body_gets_marks_that_its_schema_takes(kv, hosted):
    """Behind what is stable and at the end, and where the call before ended: never more than four."""
    hosted.is_at("anthropic")
    turns = [{"role": "user", "content": LONG}]
    with kv.task("a", final=False):
        for number in range(3):
            ask_anthropic(kv, hosted, messages=turns, system="You are kind.", tools=TOOLS)
            turns = [
                *turns, {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{number}", "name": "ls", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "a.py"}]},
            ]  # fmt: skip
    assert [] == hosted.refusals
    bodies = hosted.bodies("/v1/messages")
    counts = [str(body).count("cache_control") for body in bodies]
    assert [2, 3, 3] == counts
    assert "cache_control" in bodies[2]["messages"][-1]["content"][-1]
    assert "cache_control" in bodies[2]["messages"][2]["content"][-1]
    assert {"type": "ephemeral", "ttl": "5m"} == bodies[0]["system"][-1]["cache_control"]


def test_the_users_own_marks_are_the_users_affair(kv, hosted):
    """Wherever they stand: ours would be one too many."""
    hosted.is_at("anthropic")
    own = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    with kv.task("a", final=False):
        ask_anthropic(kv, hosted, messages=[{"role": "user", "content": own}])
        ask_anthropic(kv, hosted, cache_control={"type": "ephemeral"})
        ask_anthropic(kv, hosted, tools=[TOOLS[0] | {"cache_control": {"type": "ephemeral"}}])
    assert [1, 1, 1] == [str(body).count("cache_control") for body in hosted.bodies("/v1/messages")]


def test_a_short_prompt_and_a_caller_that_nobody_knows_get_none(kv, hosted):
    """The provider caches nothing below a thousand tokens."""
    hosted.is_at("anthropic")
    ask_anthropic(kv, hosted)
    with kv.task("a", final=False):
        ask_anthropic(kv, hosted, messages=[{"role": "user", "content": "hello"}])
    assert "cache_control" not in str(hosted.bodies("/v1/messages"))


def test_the_openai_compatible_route_gets_nothing(kv, hosted):
    """It has no marks."""
    hosted.is_at("anthropic")
    with kv.task("a", final=False):
        ask_openai(kv, hosted, model="claude-haiku-4-5")
    assert {"model", "messages", "stream"} >= set(hosted.bodies("/v1/chat/completions")[0])


def test_a_server_that_refuses_marks_is_asked_once_more_without(kv, hosted, monkeypatch):
    """And, once that is no accident, never again with them."""
    hosted.is_at("anthropic")
    answer = hosted.routes["POST /v1/messages"]

    def strict(body):
        if is_marked(body):
            return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": "cache_control: no"}}
        return answer(body)

    monkeypatch.setitem(hosted.routes, "POST /v1/messages", strict)
    with kv.task("a", final=False):
        for _ in range(MARKS_AFTER + 1):
            assert "ok" == ask_anthropic(kv, hosted).content[0].text
    assert [True, False] * MARKS_AFTER + [False] == [is_marked(body) for body in hosted.bodies("/v1/messages")]


@pytest.mark.parametrize(
    "content",
    [
        "", " ", [], [{"type": "thinking", "thinking": "x", "signature": "s"}], [{"type": "text", "text": ""}], None, 7,
        ["x"], [{"type": ["text"]}],
    ],
)  # fmt: skip
def test_what_cannot_hold_a_mark_gets_none(content):
    """An empty text and a thought would be refused with one."""
    body = {"messages": [{"role": "user", "content": content}]}
    assert marked(body, {"type": "ephemeral", "ttl": "5m"}) is None


def test_marking_does_not_touch_the_users_body():
    """It is a copy where it differs."""
    body = {"model": "m", "max_tokens": 1, "tools": TOOLS, "messages": [{"role": "user", "content": "hello"}]}
    made = marked(body, {"type": "ephemeral", "ttl": "1h"})
    assert "cache_control" not in str(body)
    assert 2 == str(made).count("cache_control")
    assert "" == problem(made, *MESSAGES)


def test_the_ttl_follows_the_waits():
    """Seconds between calls: five minutes. Half an hour, again and again: an hour. Days: no mark at all."""
    for kind, gap_s, mark in (("tool", 20.0, "short"), ("person", 1900.0, "long"), ("person", 200_000.0, "none")):
        waits, now_s = HostedWaits(PRICES), 1000.0
        for number in range(400):
            choice = waits.call("s", kind, tokens=50_000 + 200 * number, now_s=now_s)
            now_s += gap_s
        assert mark == choice.mark


def carried(adapter, body):
    extra = adapter.carries(SessionFacts(session="s", task="s"))
    return extra.shape("/v1/messages", body)


def test_a_keep_alive_is_made_where_it_pays_and_not_where_it_does_not():
    """By the tool's own forecast; beyond what pays, writing again is cheaper."""
    adapter = AnthropicHosted("http://x", clock=ManualClock(1000.0))
    carried(adapter, {"model": "claude-haiku-4-5", "messages": [{"role": "user", "content": LONG}]})
    strategy = adapter.strategy()
    wait = Wait(about=SessionFacts(session="s", task="s", tokens=2500), since_s=1000.0)
    plan = strategy.plan(wait, 1000.0)
    assert ("keep-alive", 1000.0 + 300.0 - keepalive.MARGIN_S) == (plan.purpose, plan.due_s)
    wait.calls["c"] = (1000.0, Forecast(remaining_s=(400.0, 450.0), n=9, source="history"))
    assert "" == strategy.ready(wait, plan.due_s)
    strategy.sent(wait, plan.due_s, 0.5)
    assert plan.due_s + 300.0 - keepalive.MARGIN_S == strategy.plan(wait, plan.due_s).due_s
    wait.calls["c"] = (1000.0, Forecast(remaining_s=(80_000.0,), n=9, source="history"))
    assert "cheaper" in strategy.ready(wait, plan.due_s)


def test_a_session_without_a_mark_is_not_kept_alive():
    """Nothing was written."""
    strategy = KeepingAlive(waits=lambda _: None)
    wait = Wait(about=SessionFacts(session="s"), since_s=0.0)
    assert strategy.plan(wait, 0.0) is None
    assert strategy.ready(wait, 0.0)


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_keep_alive_is_sent_and_billed_where_it_was_allowed(hosted, monkeypatch, keep_alive):
    """The same body with nothing to write, by the schema; a fact of the ledger; and off unless it was asked for."""
    hosted.is_at("anthropic")
    monkeypatch.setattr(keepalive, "MARGIN_S", 299.9)
    hosted.cached = 2500
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        facts = []
        kv.on_fact(facts.append)
        client = anthropic.Anthropic(
            base_url=hosted.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client(keep_alive=keep_alive)
        )
        with client, kv.task("a", final=False), kv.tool("sleep", expect_s=400):
            client.messages.create(model="claude-haiku-4-5", max_tokens=5, messages=[{"role": "user", "content": LONG}])
            if keep_alive:
                until(lambda: len(hosted.bodies("/v1/messages")) > 1)
            else:
                time.sleep(0.3)
        bodies = hosted.bodies("/v1/messages")
    assert [] == hosted.refusals
    paid = [fact.purpose for fact in facts if getattr(fact, "purpose", "") == "keep-alive"]
    assert bool(paid) is keep_alive
    assert keep_alive is (len(bodies) > 1)
    if keep_alive:
        assert (0, bodies[0]["messages"]) == (bodies[1]["max_tokens"], bodies[1]["messages"])


def test_a_keep_alive_never_goes_over_the_tasks_budget(hosted, monkeypatch):
    """The task's own calls have the first claim."""
    hosted.is_at("anthropic")
    monkeypatch.setattr(keepalive, "MARGIN_S", 299.9)
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        client = anthropic.Anthropic(
            base_url=hosted.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client(keep_alive=True)
        )
        with client, kv.task("a", final=False, budget=Budget(tokens=100)), kv.tool("sleep", expect_s=400):
            client.messages.create(model="claude-haiku-4-5", max_tokens=5, messages=[{"role": "user", "content": LONG}])
            until(lambda: "budget" in str(kv.stats()["reach"]))
    assert 1 == len(hosted.bodies("/v1/messages"))


# -- OpenAI


@pytest.mark.parametrize("model", ["gpt-5.6", "gpt-5.6-sol", "gpt-5.5", "gpt-4.1", "o3", "some-model"])
def test_a_chat_gets_what_its_generation_takes(kv, hosted, model):
    """By the schema, and the same key for a task's calls."""
    hosted.is_at("openai")
    with kv.task("a", final=False):
        for _ in range(2):
            ask_openai(kv, hosted, model=model)
    with kv.task("b", final=False):
        ask_openai(kv, hosted, model=model)
    assert [] == hosted.refusals
    first, second, other = hosted.bodies("/v1/chat/completions")
    assert first["prompt_cache_key"] == second["prompt_cache_key"] != other["prompt_cache_key"]
    assert model.startswith("gpt-5.6") is ("prompt_cache_options" in first)
    assert model.startswith("gpt-5.6") is ("prompt_cache_breakpoint" in str(first))
    assert "prompt_cache_retention" not in first


def test_responses_have_fields_of_their_own(kv, hosted):
    """The same adapter, another route."""
    hosted.is_at("openai")
    with (
        kv.task("a", final=False),
        openai.OpenAI(base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client,
    ):
        client.responses.create(
            model="gpt-5.6", input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}]
        )
    assert [] == hosted.refusals
    (body,) = hosted.bodies("/v1/responses")
    assert body["prompt_cache_key"].startswith("akv-")
    assert "prompt_cache_breakpoint" in body["input"][0]["content"][0]


def test_waits_of_hours_ask_for_the_longer_lifetime(monkeypatch):
    """Only of Responses, which have it, and only where the price list knows what it costs and the waits are worth it."""
    clock = ManualClock(0.0)
    adapter = OpenAIHosted("http://x", clock=clock)
    about = SessionFacts(session="s", task="s", model="gpt-5.6", tokens=50_000, osl=100)
    for _ in range(60):
        adapter.deliver(hint("turn_start", about), 1.0)
        adapter.deliver(hint("turn_end", about), 1.0)
        clock.advance(9000.0)
    adapter.deliver(hint("turn_start", about), 1.0)
    assert {} == adapter.carries(about).paths
    monkeypatch.setattr(openai_hosted, "has_long", lambda _: True)
    assert {"ttl": "12h"} == adapter.carries(about).paths["/responses"]["prompt_cache_options"]


def hint(kind, about):
    return Hint(id="h", kind=HintKind(kind), at_s=0, ts_ms=0, task=about.task, session=about.session, about=about)


def test_batch_work_goes_in_the_cheaper_tier_and_nothing_goes_in_a_dearer_one_unasked():
    """Where the price list knows the tier; a user's money is not ours to spend."""
    batch = SessionFacts(session="s", task="s", model="gpt-5", priority=-50)
    person = SessionFacts(session="s", task="s", model="gpt-5", priority=50)
    assert "flex" == OpenAIHosted("x").carries(batch).body["service_tier"]
    assert "service_tier" not in OpenAIHosted("x").carries(person).body
    assert "priority" == OpenAIHosted("x", pays_priority=True).carries(person).body["service_tier"]
    unknown = SessionFacts(session="s", task="s", model="nobody-knows", priority=-50)
    assert "service_tier" not in OpenAIHosted("x").carries(unknown).body


def test_older_models_keep_prompts_for_a_day_only_where_it_was_asked_for():
    """It is a matter of data, not of cost."""
    about = SessionFacts(session="s", task="s", model="gpt-5.1")
    assert "prompt_cache_retention" not in OpenAIHosted("x").carries(about).body
    assert "24h" == OpenAIHosted("x", long_retention=True).carries(about).body["prompt_cache_retention"]


def test_the_users_own_options_and_breakpoints_stay():
    """Ours would change what theirs mean."""
    own = {"messages": [{"role": "system", "content": "a"}], "prompt_cache_options": {"mode": "explicit"}}
    assert broken("/v1/chat/completions", own) is None
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert broken("/v1/chat/completions", {"messages": [{"role": "system", "content": [part]}]}) is None
    assert broken("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}) is None


def test_a_key_says_nothing_of_its_task():
    """A digest: tasks may have people's names."""
    assert "alice" not in key_of(SessionFacts(session="alice:x", task="alice"))


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("gpt-5.6", (5, 6)),
        ("openai/gpt-5.6-sol", (5, 6)),
        ("gpt-6", (6, 0)),
        ("gpt-4o", (0, 0)),
        ("claude-4", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_generations_are_read_from_names(name, generation):
    """What is no such name has none."""
    assert generation == generation_of(name)


def test_responses_are_prepared_only_where_their_cache_has_expired_meanwhile():
    """Half an hour is kept anyway."""
    wait = Wait(about=SessionFacts(session="s", model="gpt-5.6", tokens=9), since_s=0.0)
    wait.calls["c"] = (0.0, Forecast(remaining_s=(600.0,), n=9, source="history"))
    strategy = PreparesResponses(responds=lambda _: True)
    assert strategy.plan(wait, 0.0) is None
    wait.calls["c"] = (0.0, Forecast(remaining_s=(7200.0,), n=9, source="history"))
    assert 7195.0 == strategy.plan(wait, 0.0).due_s
