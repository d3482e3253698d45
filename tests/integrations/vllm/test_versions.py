"""What is imported where: the package anywhere, the classes only inside a vLLM that somebody read."""

from __future__ import annotations

import importlib
import subprocess
import sys

import fake_vllm
import pytest
from agentkv_vllm.versions import UnsupportedVllm, require, supported


def test_the_package_needs_no_vllm():
    """All that is not handed to vLLM is imported in a bare interpreter, which loads neither vLLM nor torch."""
    code = (
        "import sys, agentkv_vllm\n"
        "from agentkv_vllm import config, copier, door, order, sessions, shelf, side, versions, wake\n"
        "assert agentkv_vllm.transfer_config(cpu_bytes=1)\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.parametrize("module", fake_vllm.OURS)
def test_without_vllm_its_classes_say_what_is_missing(module):
    """A sentence with a reason, which is an ImportError."""
    sys.modules.pop(f"agentkv_vllm.{module}", None)
    with pytest.raises(UnsupportedVllm, match="loaded by vLLM, which is not installed"):
        importlib.import_module(f"agentkv_vllm.{module}")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0rc1", "0.33.2.dev5+g12"])
def test_versions_that_were_read_are_taken(version):
    """With their suffixes."""
    supported(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "", "main", "0.3", "0.320.1"])
def test_any_other_is_refused_with_what_would_do(version):
    """The sentence names the version, and the range."""
    with pytest.raises(UnsupportedVllm, match=r"0\.32 to 0\.33.*hints then stay advisory"):
        supported(version)


def test_the_version_is_asked_of_vllm_itself(monkeypatch):
    """Before any of its classes is imported."""
    with pytest.raises(UnsupportedVllm, match=r"0\.11"):
        fake_vllm.install(monkeypatch, version="0.11.2")
    require(lambda: "0.32.1")


def test_names_are_found_where_they_live():
    """Lazily, and nothing else."""
    import agentkv_vllm

    for name in agentkv_vllm.__all__:
        assert getattr(agentkv_vllm, name) is not None
    with pytest.raises(AttributeError):
        _ = agentkv_vllm.nothing
