"""The configuration: what a user writes, and what vLLM reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from agentkv_vllm.config import completed, default_socket, private_folder, transfer_config

from agentkv.errors import ConfigError


def test_one_line_brings_tiers_order_and_recompute(tmp_path):
    """What is not said is filled in inside vLLM, from the line that the command prints."""
    command = [sys.executable, "-m", "agentkv_vllm", "--cpu-gib", "0.5", "--disk", str(tmp_path), "--disk-gib", "2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    assert " " not in printed.replace(str(tmp_path), "")
    config = json.loads(printed)
    assert config == transfer_config(cpu_bytes=2**29, disk=tmp_path, disk_bytes=2**31)
    assert ("recompute", "kv_both") == (config["kv_load_failure_policy"], config["kv_role"])
    full = completed(config["kv_connector_extra_config"])
    assert ("AgentKVPolicy", "agentkv_vllm.policy") == (full["eviction_policy"], full["cache_policy_module_path"])
    assert ["AgentKVDisk", "AgentKVTier"] == [tier["type"] for tier in full["secondary_tiers"]]
    assert full["offload_prompt_only"] is False
    assert completed(full)["secondary_tiers"] == full["secondary_tiers"]


def test_what_the_user_set_stays():
    """Their order, their disk, their socket."""
    given = {
        "eviction_policy": "lru",
        "offload_prompt_only": True,
        "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}],
        "agentkv": {"socket": "/run/x/v.sock", "margin_s": 1},
    }
    full = completed(given)
    assert "lru" == full["eviction_policy"]
    assert full["offload_prompt_only"] is True
    assert ["fs", "AgentKVTier"] == [tier["type"] for tier in full["secondary_tiers"]]
    assert {"socket": "/run/x/v.sock", "margin_s": 1}.items() <= full["secondary_tiers"][1].items()
    assert 1 == len(given["secondary_tiers"])


@pytest.mark.parametrize("ours", [{"sockets": "x"}, {"disc": "/kv"}, "x", 3])
def test_an_unknown_name_of_ours_is_an_error(ours):
    """A typo raises."""
    with pytest.raises(ConfigError):
        completed({"agentkv": ours})


@pytest.mark.parametrize("sizes", [{"cpu_bytes": 0}, {"cpu_bytes": 1, "disk_bytes": -1}])
def test_a_tier_without_room_is_an_error(sizes):
    """Before a server starts with it."""
    with pytest.raises(ConfigError):
        transfer_config(**sizes)


def test_the_socket_is_where_the_variable_says_or_in_a_folder_of_ones_own(monkeypatch, tmp_path):
    """The same for both sides."""
    monkeypatch.setenv("AGENTKV_VLLM_SOCKET", str(tmp_path / "here.sock"))
    assert tmp_path / "here.sock" == default_socket()
    monkeypatch.delenv("AGENTKV_VLLM_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert tmp_path / "agentkv" / "vllm.sock" == default_socket()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert "vllm.sock" == default_socket().name


def test_a_folder_that_others_may_write_to_holds_no_socket(tmp_path):
    """Nor one that is no folder; a missing one is made for this user alone."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (shared, link):
        with pytest.raises(ConfigError):
            private_folder(folder)
    private_folder(tmp_path / "new")
    assert 0o700 == (tmp_path / "new").stat().st_mode & 0o777
