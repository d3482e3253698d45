"""Requests and their sampling options refuse what no engine could work with."""

from __future__ import annotations

import pytest

from agentkv.core.message import Message
from agentkv.engine.base import Request, Sampling
from agentkv.errors import RequestInvalid

BAD_SAMPLING = [
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"max_tokens": 2**63},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": 10**400},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.01},
    {"stop": ("",)},
    {"stop": "text"},
    {"stop": (1,)},
    {"seed": 2**63},
    {"seed": 1.0},
]


@pytest.mark.parametrize("options", BAD_SAMPLING, ids=str)
def test_sampling_that_no_engine_can_use_never_reaches_one(options):
    """A bad value is refused where the value is made, naming the field."""
    with pytest.raises(RequestInvalid) as caught:
        Sampling(**options)
    assert next(iter(options)) == caught.value.param
    assert len(str(caught.value)) < 300


def test_request_holds_messages_or_a_prompt():
    """Both, neither and an empty list are refused."""
    with pytest.raises(RequestInvalid):
        Request()
    with pytest.raises(RequestInvalid):
        Request(prompt="a", messages=(Message(role="user", content="a"),))
    with pytest.raises(RequestInvalid):
        Request(messages=())


def test_how_tokens_are_chosen_is_told_in_json_values():
    """Temperature and top_p always; the rest where it was asked for, a seed of 0 too."""
    assert {"temperature": 0.0, "top_p": 1.0} == Sampling(max_tokens=3, stop=("x",)).told()
    asked = Sampling(temperature=0.5, seed=0, presence_penalty=1.0, logit_bias=((1, 2.0), (3, 4.0)))
    assert {"temperature": 0.5, "top_p": 1.0, "seed": 0, "presence_penalty": 1.0, "logit_bias": 2} == asked.told()
