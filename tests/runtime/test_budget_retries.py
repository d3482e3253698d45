"""Silent retries of our own client for a remote server: they count as retries, and a lost try as spent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Message, Request, Sampling
from agentkv.errors import RemoteError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from usage_server import Reply, Server, chunk

ANSWER = Reply(
    chunks=(
        chunk("hi", finish="stop"),
        chunk(usage={"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}),
    )
)
LOST, REFUSED = Reply(status=0), Reply(status=500)
ASK = Request(messages=(Message(role="user", content="hello there"),), sampling=Sampling(max_tokens=5))


@pytest.fixture
def ask():
    """Asks a server with such replies under a budget; the answer, how often it was asked, and the account."""

    def of(replies, **limits):
        with (
            Server(replies=list(replies), again=len(replies) == 1) as server,
            AgentKV.remote(base_url=server.url, model="m", ledger="memory") as kv,
            kv.task("t", budget=Budget(**limits), final=False),
        ):
            try:
                answer = kv.submit(ASK).result(20).text
            except (BudgetExceeded, RemoteError) as error:
                answer = error
            account = kv._books.account("t")
            account.check()
            return answer, len(server.bodies), account

    return of


def test_retries_within_the_cap_are_made_and_counted(ask):
    """Two tries fail, the third answers: two retries, one call's tokens."""
    answer, asked, account = ask([REFUSED, REFUSED, ANSWER], retries=2)
    assert ("hi", 3) == (answer, asked)
    assert (2, 11, 0) == (account.used.retries, account.used.tokens, account.reserved.tokens)


def test_without_a_cap_retries_are_made_as_ever(ask):
    """No budget, no check; they are counted all the same."""
    answer, asked, account = ask([REFUSED, REFUSED, ANSWER])
    assert ("hi", 3, 2) == (answer, asked, account.used.retries)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_retry_too_many_is_not_sent(ask, allowed):
    """The caller hears of the budget, and why the call had to be repeated."""
    answer, asked, account = ask([REFUSED], retries=allowed)
    assert isinstance(answer, BudgetExceeded)
    assert ("retries", allowed + 1, allowed) == (answer.limit, asked, account.used.retries)
    assert isinstance(answer.__cause__, RemoteError)


def test_a_call_that_may_have_been_paid_for_is_not_made_again_where_only_one_fits(ask):
    """The connection broke after the request was sent: a second try would be a second call."""
    answer, asked, account = ask([LOST], model_calls=1)
    assert isinstance(answer, BudgetExceeded)
    assert (1, 1, 0) == (asked, account.used.model_calls, account.used.retries)


def test_a_lost_try_and_the_answer_are_two_calls(ask):
    """There is room for both, and no more."""
    answer, asked, account = ask([LOST, ANSWER], model_calls=2)
    assert ("hi", 2, 2, 0) == (answer, asked, account.used.model_calls, account.reserved.model_calls)
