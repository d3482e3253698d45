"""What is refused is remembered for the route and the model that refused it, and marks only when they are refused again and again."""

from __future__ import annotations

import sys
from pathlib import Path

import anthropic
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))


from agentkv import AgentKV, ScriptedEngine
from agentkv.adapters import probe
from agentkv.adapters.anthropic_hosted import AnthropicHosted, is_marked, marked
from agentkv.adapters.inject import Extra, Injector, injecting_client, model_of
from agentkv.adapters.prewarm import Wait
from agentkv.adapters.probe import Endpoints, Known
from agentkv.adapters.refusals import MARKS_AFTER, MOST_PLACES, Place, Refusals
from agentkv.adapters.strict import StrictServer
from agentkv.clock import ManualClock
from agentkv.core.hint import SessionFacts

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {
    "id": "c", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
}  # fmt: skip
TEXT = {
    "id": "c", "object": "text_completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "text": "ok", "logprobs": None}],
}  # fmt: skip
LONG = "word " * 2000
MARK = {"type": "ephemeral", "ttl": "5m"}


def refusing(when, answer):
    def route(body):
        if "cache_salt" in body and when(body):
            return 400, {"error": {"message": "Unknown parameter: 'cache_salt'.", "param": "cache_salt"}}
        return 200, answer

    return route


def client_of(server, path="", **extra):
    injector = Injector(lambda _: Extra(body={"cache_salt": "s"}, **extra))
    return openai.OpenAI(base_url=server.url + path, api_key="k", max_retries=0, http_client=injecting_client(injector))


def salted(server):
    return ["cache_salt" in one.body for one in server.asked]


def test_one_models_refusal_is_not_another_ones():
    """A gateway has many models behind one address."""
    routes = {"POST /v1/chat/completions": refusing(lambda body: body["model"] == "old", CHAT)}
    with StrictServer(routes=routes) as server, client_of(server) as client:
        for model in ("new", "old", "new", "old"):
            client.chat.completions.create(model=model, messages=MESSAGES)
        assert [True, True, False, True, False] == salted(server)


def test_one_routes_refusal_is_not_another_ones():
    """Nor that of one prefix of a gateway."""
    routes = {
        "POST /v1/chat/completions": refusing(lambda _: False, CHAT),
        "POST /v1/completions": refusing(lambda _: True, TEXT),
    }
    with StrictServer(routes=routes) as server, client_of(server) as client:
        for _ in range(2):
            client.completions.create(model="m", prompt="x")
            client.chat.completions.create(model="m", messages=MESSAGES)
        assert [True, False, True, False, True] == salted(server)


def test_one_gateways_prefix_is_not_another_ones():
    """Different engines stand behind them."""
    routes = {
        "POST /v1/a/chat/completions": refusing(lambda _: True, CHAT),
        "POST /v1/b/chat/completions": refusing(lambda _: False, CHAT),
    }
    injector = Injector(lambda _: Extra(body={"cache_salt": "s"}))
    with StrictServer(routes=routes) as server:
        for prefix in ("a", "b", "a", "b"):
            with openai.OpenAI(
                base_url=f"{server.url}/{prefix}", api_key="k", max_retries=0, http_client=injecting_client(injector)
            ) as client:
                client.chat.completions.create(model="m", messages=MESSAGES)
        assert [True, False, True, False, True] == salted(server)


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (b'{"model":"m","messages":[{"input":{"model":"other"}}]}', "m"),
        (b'{"messages":[{"input":{"model":"other"}}],"model":"m"}', "m"),
        (b'{"messages":[],"model": "m", "tools":[{"parameters":{"model":{"type":"string"}}}]}', "m"),
        (b'{"messages":[{"content":"say \\"model\\":\\"x\\""}],"model":"m"}', "m"),
        (b'{"messages":[]}', ""),
        (b"", ""),
        (b'{"model":7}', ""),
    ],
)
def test_the_model_is_the_requests_own(content, model):
    """Wherever clients put it, and whatever stands in its messages."""

    class Posted:
        def read(self):
            return content

    assert model == model_of(Posted())


def test_what_outlives_the_process_holds_for_its_path_and_model(tmp_path):
    """And is bounded."""
    known = Known(engine="vllm", version="1", models=("m",))
    endpoints = Endpoints(tmp_path)
    endpoints.refused("http://h:1", known, frozenset({"x"}), path="/v1/completions", model="m")
    assert (("/v1/completions", "m", "x"),) == Endpoints(tmp_path).learned("http://h:1", known).refused
    for number in range(200):
        endpoints.refused("http://h:1", known, frozenset({"x"}), path="/v1/completions", model=f"m{number}")
    kept = Endpoints(tmp_path).learned("http://h:1", known).refused
    assert (probe.MOST_REFUSED, "m199") == (len(kept), kept[-1][1])


def test_what_is_remembered_is_bounded():
    """Models may be named at random."""
    refusals = Refusals()
    for number in range(MOST_PLACES + 5):
        place = Place("http://h", "/v1/chat/completions", f"m{number}")
        refusals.learn(place, frozenset("x"), frozenset())
        refusals.learn(place, frozenset("k"), frozenset("k"))
        refusals.take(place, frozenset("y"), frozenset())
    assert frozenset() == refusals.of(Place("http://h", "/v1/chat/completions", "m0"))
    assert not refusals.were_taken(Place("http://h", "/v1/chat/completions", "m0"), frozenset("y"))
    assert frozenset("x") == refusals.of(place)
    assert MOST_PLACES == len(refusals._marks)


# -- providers


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger="memory") as made:
        yield made


def test_openais_old_completions_get_nothing(kv, hosted):
    """They know no cache keys: only chats and responses do."""
    hosted.is_at("openai")
    hosted.routes["POST /v1/completions"] = lambda _: (200, TEXT)
    with (
        kv.task("t"),
        openai.OpenAI(base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client,
    ):
        client.completions.create(model="gpt-3.5-turbo-instruct", prompt="x")
        client.chat.completions.create(model="gpt-5.6", messages=MESSAGES)
        client.responses.create(model="gpt-5.6", input="x")
    assert {"model", "prompt"} == set(hosted.bodies("/v1/completions")[0])
    assert "prompt_cache_key" in hosted.bodies("/v1/chat/completions")[0]
    assert "prompt_cache_key" in hosted.bodies("/v1/responses")[0]


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_message_of_a_thread_is_no_model_call(kv, hosted, name):
    """Its route ends in the same word as Anthropic's."""
    hosted.is_at(name)
    hosted.routes["POST /v1/threads/th_1/messages"] = lambda _: (200, {"id": "msg"})
    with (
        kv.task("t"),
        openai.OpenAI(base_url=hosted.url, api_key="k", max_retries=0, http_client=kv.http_client()) as client,
    ):
        client.post("/threads/th_1/messages", body={"role": "user", "content": LONG}, cast_to=object)
    assert {"role": "user", "content": LONG} == hosted.bodies("/v1/threads/th_1/messages")[0]


def ask(kv, hosted, **body):
    asked = {"model": "claude-haiku-4-5", "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]} | body
    with anthropic.Anthropic(
        base_url=hosted.url[:-3], api_key="k", max_retries=0, http_client=kv.http_client()
    ) as client:
        assert "ok" == client.messages.create(**asked).content[0].text


def test_marks_are_given_up_only_when_they_are_refused_again_and_again(kv, hosted):
    """One is refused for where it stands as well: each such call is answered, and the next has marks again."""
    hosted.is_at("anthropic")
    answer = hosted.routes["POST /v1/messages"]

    def picky(body):
        if is_marked(body) and body.get("system") is not None:
            return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": "cache_control: no"}}
        return answer(body)

    hosted.routes["POST /v1/messages"] = picky
    with kv.task("a", final=False):
        for _ in range(MARKS_AFTER - 1):
            ask(kv, hosted, system="Be kind.")
        ask(kv, hosted)  # taken: the refusals before were not about marks as such
        for _ in range(MARKS_AFTER):
            ask(kv, hosted, system="Be kind.")
        ask(kv, hosted, system="Be kind.")
        ask(kv, hosted, system="Be kind.", model="claude-sonnet-4-6")
    expected = [True, False] * (MARKS_AFTER - 1) + [True] + [True, False] * MARKS_AFTER + [False, True, False]
    assert expected == [is_marked(body) for body in hosted.bodies("/v1/messages")]


def test_a_tool_that_is_loaded_later_gets_no_mark():
    """The provider refuses that: the last one that is part of the prompt has it."""
    now, later = {"name": "now", "input_schema": {}}, {"name": "later", "input_schema": {}, "defer_loading": True}
    made = marked({"tools": [now, later, later], "messages": [{"role": "user", "content": ""}]}, MARK)
    assert [True, False, False] == ["cache_control" in tool for tool in made["tools"]]
    assert marked({"tools": [later], "messages": [{"role": "user", "content": ""}]}, MARK) is None


class Posted:
    def __init__(self, content):
        self._content = content

    def read(self):
        return self._content


@pytest.mark.parametrize(("sent", "kept"), [(b'{"cache_control":1}', True), (b"{}", False)])
def test_what_went_without_marks_is_not_kept_alive(sent, kept):
    """There is nothing to keep."""
    adapter = AnthropicHosted("http://x", clock=ManualClock(1000.0))
    extra = adapter.carries(SessionFacts(session="s", task="s"))
    extra.shape("/v1/messages", {"model": "claude-haiku-4-5", "messages": [{"role": "user", "content": LONG}]})
    extra.saw(Posted(sent))
    plan = adapter.strategy().plan(Wait(about=SessionFacts(session="s", tokens=2500), since_s=1000.0), 1000.0)
    assert kept is (plan is not None)
