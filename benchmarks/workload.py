"""Real weights, real text, and the handles that a benchmark needs: an engine, prompts of exact length, tier control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentkv.core.residency import Action, Move, Tier
from agentkv.engine.local.engine import LocalEngine
from agentkv.engine.local.loader import LoadedModel, load_model

MIB = 1 << 20
TEXT = (
    "def settle(account, amount):\n    if amount < 0:\n        raise ValueError('negative')\n    account.total += amount\n"
    "FAILED tests/test_account.py::test_settle - AssertionError: expected 12.50, got 12.49 in line {n}\n"
    "The log shows that rounding happens twice, first in parse_amount() and then again in settle(). Retry {n}.\n"
)


def loaded(dtype: str = "auto") -> LoadedModel:
    """SmolLM2-135M-Instruct."""
    return load_model("smollm2-135m", device="cpu", dtype=dtype)


def engine(model: LoadedModel, *, device_mib: int, host_mib: int, disk: Path | None = None) -> LocalEngine:
    """An engine over `model` with these tiers."""
    return LocalEngine(
        model, device_memory=device_mib * MIB, host_memory=host_mib * MIB, disk=disk, disk_memory=1024 * MIB
    )


def text_of(tokenizer: Any, tokens: int, *, seed: int = 0) -> str:
    """A text that encodes to exactly `tokens` tokens."""
    text = "".join(TEXT.format(n=seed * 1000 + n) for n in range(tokens // 40 + 2))
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    for _ in range(8):
        text = tokenizer.decode(ids)
        again = tokenizer.encode(text, add_special_tokens=False)
        if len(again) == tokens:
            return text
        ids = (again + ids)[:tokens] if len(again) < tokens else again[:tokens]
    raise RuntimeError(f"no text of exactly {tokens} tokens was found")


def send_down(kv: LocalEngine, session: str, tier: Tier) -> None:
    """Write the session to `tier` and give up its copies in the dearer ones, whatever the pressure."""
    kv.apply(Move(session=session, action=Action.DEMOTE, to=tier, reason="benchmark"))
    kv.tiers.quiesce(60)
    for dearer in (Tier.DEVICE, Tier.HOST)[: int(tier)]:
        kv.tiers.vacate(session, dearer)
    residency = kv.residency(session)
    assert residency is not None
    counts = {Tier.DEVICE: residency.device_blocks, Tier.HOST: residency.host_blocks, Tier.DISK: residency.disk_blocks}
    assert counts[tier] == residency.total_blocks, f"not all blocks are in {tier.name}: {counts}"
    assert not any(counts[dearer] for dearer in (Tier.DEVICE, Tier.HOST)[: int(tier)]), counts
