"""Ctrl-C in the demo."""

import contextlib
import os
import signal

import pytest
from agentkv_langgraph.demo.interrupts import remembered


def test_an_interrupt_that_python_swallowed_is_raised_at_the_next_check() -> None:
    """An exception inside a finaliser goes nowhere; the wish to stop must survive it."""
    with remembered() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_the_handler_from_before_is_back_afterwards() -> None:
    """The demo leaves the process as it found it."""
    before = signal.getsignal(signal.SIGINT)
    with remembered():
        assert before is not signal.getsignal(signal.SIGINT)
    assert before is signal.getsignal(signal.SIGINT)
