"""Random schedules on streams that do everything CUDA may do: no order of copies and compute changes a token."""

import random
import threading
import time

import pytest

from agentkv.core.residency import Action, Move, Tier
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

WORDS = ["the", "tool", "found", "seven", "errors", "in", "four", "files", "and", "stopped", "after", "a", "test"]
MOVES = [
    (Action.WRITE, Tier.HOST), (Action.DEMOTE, Tier.HOST), (Action.DEMOTE, Tier.DISK), (Action.PREFETCH, Tier.DEVICE),
    (Action.PREFETCH, Tier.HOST), (Action.DROP, None),
]  # fmt: skip


def _streams(kind, seed):
    return AdversarialStreams(seed) if kind == "adversarial" else CpuStreams()


@pytest.mark.parametrize("kind", ["cpu", "adversarial"])
@pytest.mark.parametrize("seed", range(4))
def test_agents_whose_blocks_move_all_the_time_write_the_same_tokens(  # noqa: PLR0917  fixtures
    tiny, start, ask, tmp_path, seed, kind
):
    """Six agents of four turns over a pool for two, with moves at any moment and some calls cancelled."""
    dice = random.Random(seed)
    engine = start(
        blocks=26, host=40, disk=tmp_path, disk_memory=32 << 20, chunk_tokens=dice.choice([16, 48, 512]),
        streams=_streams(kind, seed),
    )  # fmt: skip
    wrong = []

    def agent(number):
        dice = random.Random(100 * seed + number)
        text = "You are an agent. " * 4
        for _turn in range(4):
            text += f"{number} " + " ".join(dice.choices(WORDS, k=dice.randrange(1, 12)))
            request = ask(text, 8, task=f"agent-{number}")
            if dice.random() < 0.3:
                with engine.submit(request) as stream:
                    time.sleep(dice.random() * 0.02)
                    stream.cancel()
            generation = engine.submit(request).result(60)
            if tiny.greedy(text, 8) != list(generation.token_ids):
                wrong.append((number, _turn))
            text += generation.text
            for action, to in dice.choices(MOVES, k=dice.randrange(4)):
                engine.apply(Move(session=generation.session, action=action, to=to, reason="test"))
                time.sleep(dice.random() * 0.01)

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(6)]
    for thread in agents:
        thread.start()
    for thread in agents:
        thread.join()
    assert [] == wrong
    stats = engine.stats()["kv"]
    assert stats["bytes"]["d2h"] > 0
    assert stats["hits"]["host"] + stats["hits"]["disk"] > 0
    engine.tiers.quiesce(30)
