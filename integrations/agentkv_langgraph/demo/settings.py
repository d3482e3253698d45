"""What the command line asks for: the work, the policy, and the sizes of the tiers. Loads no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentkv import AgentKV, Context
from agentkv.core.residency import Policy
from agentkv.errors import ConfigError
from agentkv.policy import make_policy
from agentkv.units import format_bytes, parse_bytes

OFF = ("none", "off", "0")
DEFAULT_POLICY = "lazy"
CONTEXT = Context(slim_tokens=768, soft_mark=2800, low_share=0.5, summarise="extract")
"""Small enough for a few turns to reach the mark. A model of this size cannot write a summary: it is extracted."""
MakeKV = Callable[..., Any]
"""Makes the AgentKV of a run: `make(tiers=True, policy=..., saved=True)`; `saved`: its bills go to the ledger file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    tasks: int
    turns: int
    repo: Path | None
    budget_tokens: int
    seed: int
    keep_s: float
    host_s: float
    drop_tokens: int
    tool_timeout_s: float
    policy_name: str = DEFAULT_POLICY

    @property
    def policy(self) -> str | Policy:
        """What the run's AgentKV gets: a policy by name, or the ladder scaled to a small model and short tools."""
        return make_policy(**self.policy_named) if self.policy_name == "ladder" else self.policy_name

    @property
    def policy_named(self) -> dict[str, Any]:
        """The policy as `agentkv.policy.make_rules` takes it: its name and its numbers."""
        if self.policy_name != "ladder":
            return {"name": self.policy_name}
        return {"name": "ladder", "keep_s": self.keep_s, "host_s": self.host_s, "drop_tokens": self.drop_tokens}

    @property
    def policy_words(self) -> str:
        """For people: what moves when."""
        if self.policy_name != "ladder":
            return f"Policy: {self.policy_name}."
        return (
            f"The ladder of this demo is scaled to a small model and short tools: waits below {self.keep_s:g} s stay on "
            f"the device, up to {self.host_s:g} s go to host, longer ones to disk; contexts below "
            f"{self.drop_tokens} tokens are dropped."
        )


class Memory:
    """The sizes of the three tiers; host and disk may be off. Raises ConfigError for what is no size."""

    def __init__(self, device: str, host: str, disk: str | None) -> None:
        self.device_bytes = parse_bytes(device, option="--device-memory")
        self.host_bytes = None if host.lower() in OFF else parse_bytes(host, option="--host-memory")
        self.has_disk = self.host_bytes is not None and not (disk is not None and disk.lower() in OFF)
        self.disk = Path(disk) if disk is not None and self.has_disk else None
        if disk is not None and self.disk is None and disk.lower() not in OFF:
            raise ConfigError(
                "--disk needs the host tier, through which its blocks travel; leave out --host-memory none"
            )

    def __str__(self) -> str:
        host = "off" if self.host_bytes is None else format_bytes(self.host_bytes)
        disk = "off" if not self.has_disk else str(self.disk or "a temporary folder")
        return f"device {format_bytes(self.device_bytes)}, host {host}, disk {disk}"

    def maker(self, model: str, folder: Path, console: Console) -> MakeKV:
        """Makes the AgentKV of each run; without tiers the device alone is as large as before."""
        disk = (self.disk or folder / "disk") if self.has_disk else None

        def make(*, tiers: bool, policy: str | Policy, saved: bool = True) -> Any:
            return AgentKV.local(
                model,
                device_memory=self.device_bytes,
                host_memory=self.host_bytes if tiers else None,
                disk=disk if tiers else None,
                policy=policy,
                context=CONTEXT,
                ledger=None if saved else "memory",
                progress=lambda sentence: console.print(sentence, style="dim"),
            )

        return make
