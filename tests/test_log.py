"""The logger: structlog where it is installed, the standard library elsewhere."""

from __future__ import annotations

import logging
import sys

import pytest

from agentkv import log


def test_without_structlog_a_warning_goes_to_the_standard_logger(monkeypatch, caplog):
    """With its fields, once, and counted."""
    monkeypatch.setitem(sys.modules, "structlog", None)
    monkeypatch.setattr(log, "_warned", set())
    before = log.counters["test_event"]
    with caplog.at_level(logging.INFO, logger="agentkv"):
        log.warn_once("test_event", path="/x", left=3)
        log.warn_once("test_event", path="/x", left=2)
        log.get_logger().info("test_news", n=1)
    assert ["test_event path='/x' left=3", "test_news n=1"] == [record.getMessage() for record in caplog.records]
    assert ["WARNING", "INFO"] == [record.levelname for record in caplog.records]
    assert before + 2 == log.counters["test_event"]


def test_structlog_is_used_where_it_is_installed():
    """As before."""
    pytest.importorskip("structlog")
    assert not isinstance(log.get_logger(), log.StandardLogger)
