"""What is never sent again on a task's account: bodies that a provider's own schema has no short form for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import anthropic
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))


from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters import keepalive, openai_hosted
from agentkv.adapters.anthropic_hosted import AnthropicHosted
from agentkv.adapters.hosted_waits import HostedWaits
from agentkv.adapters.openai_hosted import OpenAIHosted
from agentkv.adapters.prewarm import Wait
from agentkv.adapters.replay import Kept, shortened
from agentkv.clock import ManualClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import SessionFacts
from agentkv.policy.hosted import CachePrices

LONG = "word " * 2000
BUDGET = {"type": "enabled", "budget_tokens": 2048}
PRICES = CachePrices(input=3.0, read=0.3, write_short=3.75, write_long=6.0)


class Posted:
    def __init__(self, url, body):
        self.url, self._body, self.headers = url, body, {}

    def read(self):
        return json.dumps(self._body).encode()


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def until(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


def planned(adapter, body):
    adapter.carries(SessionFacts(session="s", task="s")).shape(
        "/v1/messages", {"model": "claude-haiku-4-5", "messages": [{"role": "user", "content": LONG}]} | body
    )
    wait = Wait(about=SessionFacts(session="s", task="s", tokens=2500), since_s=1000.0)
    return adapter.strategy().plan(wait, 1000.0)


@pytest.mark.parametrize(
    ("thinking", "keeps"), [(BUDGET, False), ({"type": "disabled"}, True), ({"type": "adaptive"}, True), (None, True)]
)
def test_a_body_that_thinks_with_a_budget_is_not_kept_alive(thinking, keeps):
    """The budget must be less than the longest answer, which has no room for it. The next call may be without."""
    adapter = AnthropicHosted("http://x", clock=ManualClock(1000.0))
    assert keeps is (planned(adapter, {"thinking": thinking}) is not None)
    assert planned(adapter, {}) is not None
    kept = Kept.of(Posted("http://x/v1/messages", {"max_tokens": 4096, "thinking": thinking, "messages": []}))
    if keeps:
        assert 0 == json.loads(shortened(kept, fields={"max_tokens": 0}))["max_tokens"]
    else:
        with pytest.raises(ValueError, match="budget"):
            shortened(kept)


def test_the_mark_is_chosen_without_counting_on_keep_alives_that_cannot_be():
    """What counts on them is cheaper than what must do without, and the longer mark pays sooner."""

    def chosen(**how):
        waits, now_s = HostedWaits(PRICES, keeps=True), 1000.0
        for number in range(400):
            choice = waits.call("s", "person", tokens=50_000 + 200 * number, now_s=now_s, **how)
            now_s += 500.0
        return choice

    without = HostedWaits(PRICES)
    now_s = 1000.0
    for number in range(400):
        expected = without.call("s", "person", tokens=50_000 + 200 * number, now_s=now_s)
        now_s += 500.0
    assert expected == chosen(keepable=False) != chosen()


def test_a_keep_alive_that_was_refused_is_the_sessions_last(hosted, monkeypatch):
    """Whatever the reason: the provider would not take the next one either."""
    hosted.is_at("anthropic")
    monkeypatch.setattr(keepalive, "MARGIN_S", 3600.0)  # at once, whatever the mark
    answer = hosted.routes["POST /v1/messages"]

    def picky(body):
        if body["max_tokens"] == 0:
            return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: no"}}
        return answer(body)

    hosted.routes["POST /v1/messages"] = picky
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as kv:
        facts = []
        kv.on_fact(facts.append)

        def shorts():
            return sum(body["max_tokens"] == 0 for body in hosted.bodies("/v1/messages"))

        with (
            anthropic.Anthropic(
                base_url=hosted.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client(keep_alive=True)
            ) as client,
            kv.task("a", final=False),
        ):
            for _ in range(2):
                client.messages.create(
                    model="claude-haiku-4-5", max_tokens=5, messages=[{"role": "user", "content": LONG}]
                )
                with kv.tool("sleep", expect_s=400):
                    until(lambda: "keep-alive a: failed" in str(kv.stats()["reach"]))
                    time.sleep(0.5)
        assert 1 == shorts()
        assert [] == [fact for fact in facts if getattr(fact, "purpose", "") == "keep-alive"]


@pytest.mark.parametrize(("route", "prepares"), [("responses", True), ("chats", False), ("chats at last", False)])
def test_only_responses_are_prepared(kv, hosted, monkeypatch, route, prepares):
    """A chat has no such option: what would go out is a call that is paid for."""
    hosted.is_at("openai")
    made = []
    plain = OpenAIHosted.strategy
    monkeypatch.setattr(OpenAIHosted, "strategy", lambda self: made.append(plain(self)) or made[-1])
    with (
        kv.task("a", final=False),
        openai.OpenAI(
            base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client(keep_alive=True)
        ) as client,
    ):
        if route != "chats":
            client.responses.create(model="gpt-5.6", input="x")
        if route != "responses":
            client.chat.completions.create(model="gpt-5.6", messages=[{"role": "user", "content": "x"}])
    wait = Wait(about=SessionFacts(session="a", task="a", model="gpt-5.6", tokens=60_000), since_s=0.0)
    wait.calls["c"] = (0.0, Forecast(remaining_s=(4000.0,), n=9, source="history"))
    plan = made[0].plan(wait, 0.0)
    assert prepares is (plan is not None)
    if plan is not None:
        assert {"prompt_cache_options": {"prewarm": True}} == plan.fields


def test_sessions_whose_last_call_was_a_response_are_bounded():
    """What is forgotten is not prepared."""
    adapter = OpenAIHosted("http://x")

    class Sent:
        class url:  # noqa: N801  as an HTTP library has it
            path = "/v1/responses"

    for number in range(openai_hosted._MOST_SESSIONS + 1):
        adapter.carries(SessionFacts(session=f"s{number}", task="t", model="gpt-5.6")).saw(Sent)
    assert openai_hosted._MOST_SESSIONS == len(adapter._responses)
