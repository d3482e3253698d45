"""Budgets of calls that another client makes, ChatOpenAI here: reserved, shared by branches, retries counted."""

from __future__ import annotations

import itertools
import operator
import sys
from decimal import Decimal
from pathlib import Path
from typing import Annotated, TypedDict

import pytest
from agentkv_langgraph import BudgetStop
from agentkv_langgraph.attempts import openai_clients
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, Send

from agentkv import Budget, BudgetExceeded
from agentkv.log import counters

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from usage_server import Reply, Server, whole

openai = pytest.importorskip("langchain_openai")

ANSWER = Reply(body=whole(usage={"prompt_tokens": 20, "completion_tokens": 10}, model="gpt-4.1"))
LOST, REFUSED = Reply(status=0), Reply(status=500)


class Fan(TypedDict):
    done: Annotated[list[str], operator.add]


@pytest.fixture
def server(monkeypatch):
    """A server that answers everything; tests may give it other replies."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server(replies=[ANSWER], again=True) as made:
        yield made


def chat(server, **options):
    options = {"max_retries": 0, **options}
    return openai.ChatOpenAI(model="gpt-4.1", base_url=server.url, api_key="none", **options)


def fan(kv, branch, number=20):
    """So many branches at once; each adds what `branch` says, or "refused"."""

    def guarded(state):
        try:
            return {"done": [branch(state)]}
        except BudgetExceeded:
            return {"done": ["refused"]}

    graph = StateGraph(Fan)
    graph.add_node("branch", guarded)
    graph.add_conditional_edges(START, lambda _: [Send("branch", {"done": []}) for _ in range(number)], ["branch"])
    return kv.attach(graph.compile())


def single(kv, node, **options):
    graph = StateGraph(Fan)
    graph.add_node("node", node, **options)
    graph.add_edge(START, "node")
    return kv.attach(graph.compile())


@pytest.mark.parametrize(
    "budget", [Budget(model_calls=3), Budget(tokens=200), Budget(usd="0.005")], ids=["calls", "tokens", "usd"]
)
def test_branches_at_once_never_overspend(kv, server, budget):
    """Twenty calls pass the check together, and what does not fit is not made. About 60 tokens and $0.0004 a call."""
    model = chat(server, max_tokens=150 if budget.usd else 50)
    with kv.task("t", budget=budget, final=False):
        end = fan(kv, lambda _: model.invoke("say something").text)
        done = end.invoke({"done": []}, {"max_concurrency": 20})["done"]
    bill = kv.report("t")
    assert 20 == len(done)
    assert len(server.bodies) == len(bill.calls) == 20 - done.count("refused") > 0
    assert done.count("refused") > 0
    left = kv.budgets.left("t")
    assert all(amount >= 0 for amount in left.values())
    assert bill.usage.total_tokens <= (budget.tokens or 10**9)
    assert bill.cost_usd <= (budget.usd or 10**9)


async def test_coroutines_at_once_never_overspend(kv, server):
    """The same in an event loop."""
    model = chat(server, max_tokens=50)

    async def branch(_):
        try:
            return {"done": [(await model.ainvoke("say something")).text]}
        except BudgetExceeded:
            return {"done": ["refused"]}

    graph = StateGraph(Fan)
    graph.add_node("branch", branch)
    graph.add_conditional_edges(START, lambda _: [Send("branch", {"done": []}) for _ in range(20)], ["branch"])
    with kv.task("t", budget=Budget(model_calls=3), final=False):
        end = await kv.attach(graph.compile()).ainvoke({"done": []})
    assert (3, 17) == (len(server.bodies), end["done"].count("refused"))
    kv._books.account("t").check()


def test_what_a_call_did_not_use_is_given_back(kv, server):
    """Ten calls one after the other fit, though two at once would not; a failed one holds nothing either."""
    model = chat(server, max_tokens=100)
    with kv.task("t", budget=Budget(tokens=430), final=False):
        single(kv, lambda _: {"done": [model.invoke("hello").text for _ in range(10)]}).invoke({"done": []})
        server.replies[0] = REFUSED
        with pytest.raises(openai.chat_models.base.openai.InternalServerError):
            single(kv, lambda _: {"done": [model.invoke("hello").text]}).invoke({"done": []})
    account = kv._books.account("t")
    assert (300, 0, 0) == (account.used.tokens, account.reserved.tokens, account.reserved.model_calls)


def test_without_a_budget_nothing_is_counted_beforehand(kv, server, monkeypatch):
    """No budget, no check: the prompt is not even tokenised."""
    monkeypatch.setattr("agentkv_langgraph.spent.ModelRun.worst", lambda *_: pytest.fail("counted"))
    single(kv, lambda _: {"done": [chat(server).invoke("hello").text]}).invoke({"done": []})
    assert 1 == len(server.bodies)


def test_an_unpriced_model_does_not_bind_a_money_budget_and_a_warning_says_so(kv, server):
    """Its price is not invented; the bill calls its cost unknown."""
    before = counters.get("budget_without_price", 0)
    model = openai.ChatOpenAI(model="gtp-4.1-typo", base_url=server.url, api_key="none", max_retries=0)
    server.replies[0] = Reply(body=whole(usage={"prompt_tokens": 20, "completion_tokens": 10}, model="gtp-4.1-typo"))
    with kv.task("t", budget=Budget(usd="0.01"), final=False):
        single(kv, lambda _: {"done": [model.invoke("hello").text]}).invoke({"done": []})
    bill = kv.report("t")
    assert [None] == [call.cost_usd for call in bill.calls]
    assert counters.get("budget_without_price", 0) >= before


def test_a_money_budget_of_zero_stops_the_first_call(kv, server):
    """0 is a limit for what costs something."""
    with kv.task("t", budget=Budget(usd=0), final=False), pytest.raises(BudgetExceeded, match="usd"):
        single(kv, lambda _: {"done": [chat(server).invoke("hello").text]}).invoke({"done": []})
    assert [] == server.bodies


@pytest.mark.parametrize("lost", [False, True])
def test_silent_retries_of_the_client_count_against_retries(kv, server, lost):
    """The openai package would try five times; the second retry is refused, and the graph stops as at any limit."""
    server.replies[0] = LOST if lost else REFUSED
    clients = openai_clients(kv)
    model = chat(server, max_retries=4, **clients)
    with kv.task("t", budget=Budget(retries=1), final=False), pytest.raises(BudgetStop, match="retries"):
        single(kv, lambda _: {"done": [model.invoke("hello").text]}, retry_policy=RetryPolicy()).invoke({"done": []})
    clients["http_client"].close()
    assert (2, 1, 2 if lost else 0) == (
        len(server.bodies), kv._books.account("t").used.retries, kv._books.account("t").used.model_calls
    )  # fmt: skip


async def test_silent_retries_in_an_event_loop_count_too(kv, server):
    """The asynchronous client asks as well."""
    server.replies[0] = REFUSED
    clients = openai_clients(kv)
    model = chat(server, max_retries=4, **clients)

    async def node(_):
        return {"done": [(await model.ainvoke("hello")).text]}

    with kv.task("t", budget=Budget(retries=1), final=False), pytest.raises(BudgetStop, match="retries"):
        await single(kv, node).ainvoke({"done": []})
    clients["http_client"].close()
    await clients["http_async_client"].aclose()
    assert 2 == len(server.bodies)


def test_a_try_that_was_lost_needs_room_for_the_next_one(kv, server):
    """A call that the server read may be spent: where only one fits, it is not made again."""
    server.replies[0] = LOST
    clients = openai_clients(kv)
    model = chat(server, max_retries=4, **clients)
    with kv.task("t", budget=Budget(model_calls=1), final=False), pytest.raises(BudgetStop, match="model_calls"):
        single(kv, lambda _: {"done": [model.invoke("hello").text]}).invoke({"done": []})
    clients["http_client"].close()
    assert (1, 1) == (len(server.bodies), kv._books.account("t").used.model_calls)


def test_retried_nodes_and_runnables_count_against_retries(kv, server):
    """What LangGraph's policy or LangChain's `with_retry` makes again is a retry, whoever's client calls."""

    class Broken(BaseCallbackHandler):
        raise_error = True

        def on_llm_end(self, *_, **__):
            raise ConnectionError("lost it")

    def flaky(_):
        chat(server).invoke("hello")
        raise ConnectionError("down")

    policy = RetryPolicy(max_attempts=9, initial_interval=0.0, jitter=False)
    with kv.task("node", budget=Budget(retries=2), final=False), pytest.raises(BudgetExceeded, match="retries"):
        single(kv, flaky, retry_policy=policy).invoke({"done": []})
    assert 3 == len(server.bodies)
    again = chat(server, callbacks=[Broken()]).with_retry(
        retry_if_exception_type=(ConnectionError,), stop_after_attempt=9, wait_exponential_jitter=False
    )
    with kv.task("runnable", budget=Budget(retries=2), final=False), pytest.raises(BudgetExceeded, match="retries"):
        single(kv, lambda _: {"done": [again.invoke("hello").text]}).invoke({"done": []})
    assert 6 == len(server.bodies)


def test_device_seconds_do_not_stop_what_runs_somewhere_else(kv, server):
    """They are those of our own device."""
    with kv.task("t", budget=Budget(device_seconds=0), final=False):
        single(kv, lambda _: {"done": [chat(server).invoke("hello").text]}).invoke({"done": []})
    assert 1 == len(server.bodies)


def test_a_budget_of_all_tasks_of_a_type_holds_for_other_clients_too(kv, server):
    """Two tasks share two calls; a third waits in vain."""
    kv.budgets.limit("work", budget=Budget(model_calls=2, wait_s=0.2))
    run = single(kv, lambda _: {"done": [chat(server).invoke("hello").text]})
    for key in ("a", "b"):
        with kv.task(key, type="work"):
            run.invoke({"done": []})
    with kv.task("c", type="work"), pytest.raises(BudgetExceeded, match="Waited"):
        run.invoke({"done": []})
    assert 2 == len(server.bodies)


def test_money_of_another_clients_call_is_reserved_by_its_own_price(kv, server):
    """1 token in and 1000 out of gpt-4.1 are some $0.008: half a cent is too little for it, a whole one is not."""
    model = chat(server, max_tokens=1000)
    run = single(kv, lambda _: {"done": [model.invoke("hello").text]})
    with kv.task("poor", budget=Budget(usd="0.005"), final=False), pytest.raises(BudgetExceeded):
        run.invoke({"done": []})
    with kv.task("rich", budget=Budget(usd="0.01"), final=False):
        run.invoke({"done": []})
    assert Decimal("0.00012") == kv.report("rich").cost_usd


def agent_of(kv, server, **options):
    """`create_agent` with ChatOpenAI and one tool."""
    agents = pytest.importorskip("langchain.agents")
    from agentkv_langgraph import AgentKVMiddleware
    from langchain_core.tools import tool

    @tool
    def look(place: str) -> str:
        """Look somewhere."""
        return f"nothing in {place}"

    return agents.create_agent(chat(server, max_tokens=50), [look], middleware=[AgentKVMiddleware(kv)], **options)


def calling(number):
    body = whole(usage={"prompt_tokens": 20, "completion_tokens": 10}, model="gpt-4.1")
    message = body["choices"][0]["message"]
    message["content"] = f"step {number}"
    function = {"name": "look", "arguments": '{"place": "here"}'}
    message["tool_calls"] = [{"id": f"c{number}", "type": "function", "function": function}]
    body["choices"][0]["finish_reason"] = "tool_calls"
    return Reply(body=body)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_agent_of_another_client_finishes_too(kv, server, is_async):
    """With the middleware the call that does not fit is a closing turn: partial answer, every tool call has its result."""
    server.replies[:], server.again = [calling(0), calling(1), calling(2)], False
    budget = Budget(model_calls=2, on_exceeded="finish")
    given = {"messages": [("user", "go")]}
    with kv.task("t", budget=budget, final=False):
        agent = agent_of(kv, server)
        end = (await agent.ainvoke(given) if is_async else agent.invoke(given))["messages"]
    assert ["human", "ai", "tool", "ai", "tool", "ai"] == [message.type for message in end]
    assert "used up" in end[-1].text
    assert "step 1" in end[-1].text
    assert ("budget", 2) == (end[-1].response_metadata["agentkv"]["stopped_by"], len(server.bodies))


def test_an_agent_of_another_client_that_raises_raises(kv, server):
    """The middleware hides nothing from a task that is not to finish."""
    with kv.task("t", budget=Budget(model_calls=0), final=False), pytest.raises(BudgetStop):
        agent_of(kv, server).invoke({"messages": [("user", "go")]})
    assert [] == server.bodies


def test_an_agent_of_another_client_is_told_of_the_soft_mark_once_at_the_tail(kv, server):
    """Behind the tool result that was last then; later prompts only add to it, and the state holds nothing of it."""
    server.replies[:], server.again = [*(calling(number) for number in range(4)), ANSWER], False
    with kv.task("t", budget=Budget(model_calls=5, soft=0.6), final=False):
        end = agent_of(kv, server).invoke({"messages": [("user", "go")]})["messages"]
    prompts = [body["messages"] for body in server.bodies]
    told = [[number for number, message in enumerate(prompt) if "[budget]" in str(message)] for prompt in prompts]
    assert [[], [], [], [6], [6]] == told
    assert 7 == len(prompts[3])  # it was the last one
    assert all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(prompts))
    assert "[budget]" not in str(end)


def test_without_a_budget_an_agents_request_is_left_as_it_is(kv, server):
    """Nothing is added, and nothing copied."""
    agent_of(kv, server).invoke({"messages": [("user", "go")]})
    assert "budget" not in str(server.bodies)
