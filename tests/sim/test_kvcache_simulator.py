"""Hit rates by budget against counters that are not ours: the package kvcache-simulator, and forty plain lines here.

All three see the same requests: sessions whose prompts only grow, each prompt's blocks known by session and place. What
they model alike is LRU. Their OPTIMAL is a cache that may refuse what was just computed (a *bypass*); an engine cannot:
a running call has its whole context on the device. The plain counter does it both ways, so that the difference between
the package and the simulator is that rule and nothing else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from agentkv.core.rates import Prefill
from agentkv.policy import make_policy
from agentkv.policy.evict import EvictKey, least_recently_used, next_use
from agentkv.policy.rules import Rules, Sight
from agentkv.policy.schedule import first_come
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call
from agentkv.sim.simulator import Simulator, Task
from agentkv.sim.workload import Session, Turn, Workload

BUDGETS = (200, 400, 800, 1200, 1600)
BYPASS_FROM = 800
"""From this budget on, about 15 contexts, a bypass hardly matters."""
FAR_S = 1e7
"""Nobody ends within the run: an end frees blocks, which a counter of hits cannot know."""
Seen = tuple[str, int]
"""A request: its session, and how many blocks its prompt has."""


def workload(seed: int, sessions: int = 40, turns: int = 20) -> Workload:
    """Sessions whose prompts grow by 1 to 8 blocks, with lognormal waits (median 20 s)."""
    rng = random.Random(seed)
    made, arrivals, at_s = [], [], 0.0
    for number in range(sessions):
        blocks, reuse, each = rng.randint(4, 30), 0, []
        for turn in range(turns + 1):
            wait_s = None if turn == turns else FAR_S if turn == turns - 1 else rng.lognormvariate(3, 1.5)
            prompt = 16 * blocks - 1  # with the one token of its answer the last block is full
            each.append(Turn(prompt_tokens=prompt, output_tokens=1, reuse_tokens=reuse, wait_s=wait_s, tool="t"))
            reuse = 16 * blocks
            blocks += rng.randint(1, 8)
        made.append(Session(name=f"s{number}", turns=tuple(each)))
        arrivals.append(at_s)
        at_s += rng.expovariate(1 / 20)
    return Workload(sessions=tuple(made), agents=sessions, arrivals_s=tuple(arrivals))


def requests(load: Workload) -> list[Seen]:
    """In the order of time, as if computing took none."""
    timed = []
    for session, arrival_s in zip(load.sessions, load.arrivals_s, strict=True):
        at_s = arrival_s
        for turn in session.turns:
            timed.append((at_s, session.name, (turn.prompt_tokens + 1) // 16))
            at_s += turn.wait_s or 0.0
    return [(name, blocks) for at_s, name, blocks in sorted(timed) if at_s < FAR_S]


LOAD = workload(1)
REQUESTS = requests(LOAD)


def rate(hits: Iterable[int]) -> float:
    """Of the second half's blocks, as the package counts."""
    half = len(REQUESTS) // 2
    return sum(list(hits)[half:]) / sum(blocks for _, blocks in REQUESTS[half:])


class Watched(Simulator):
    """Keeps how many blocks each call found."""

    def __init__(self, budget: int, key: EvictKey, sight: Sight) -> None:
        costs = Costs(
            token_bytes=1000,
            prefill=Prefill(linear_s=1e-12),
            decode_base_s=1e-9,
            decode_per_token_s=0.0,
            h2d_bytes_s=1e18,
            d2h_bytes_s=1e18,
            device_bytes=16_000 * budget,
            host_bytes=0,
            token_budget=1 << 20,
        )
        rules = Rules(
            name="counted", decide=make_policy("keep"), evict_key=key, turn_key=first_come, sight=sight, offloads=False
        )
        super().__init__(LOAD, costs, rules, shared_tokens=0)
        self.found: list[Seen] = []

    def _call_ended(self, call: Call) -> None:
        assert isinstance(call.owner, Task)
        self.found.append((call.owner.context.name, call.owner.hit))
        super()._call_ended(call)


def simulated(budget: int, key: EvictKey, sight: Sight) -> float:
    """Our simulator's hit rate."""
    run = Watched(budget, key, sight)
    run.run()
    found = run.found[: len(REQUESTS)]
    assert [name for name, _ in REQUESTS] == [name for name, _ in found]
    return rate(hit for _, hit in found)


def counted(budget: int, *, optimal: bool, bypass: bool) -> float:
    """The plain counter: no time, no engine, one block after the other."""
    later: dict[str, int] = {}
    next_of = []
    for i in reversed(range(len(REQUESTS))):
        next_of.append(later.get(REQUESTS[i][0], len(REQUESTS)))
        later[REQUESTS[i][0]] = i
    next_of.reverse()
    have: dict[str, int] = {}
    key: dict[str, int] = {}
    hits = []
    for i, (name, blocks) in enumerate(REQUESTS):
        hits.append(have.setdefault(name, 0))
        key[name] = next_of[i] if optimal else -i  # the largest goes first
        while have[name] < blocks:
            if sum(have.values()) >= budget:
                victim = max((one for one in have if one != name and have[one]), key=key.__getitem__, default=None)
                if victim is None or (bypass and key[victim] <= key[name]):
                    break
                have[victim] -= 1
            have[name] += 1
    return rate(hits)


def packaged(budget: int, policy: str) -> float:
    """What the package says of the same requests."""
    plan, policies, traces = (
        pytest.importorskip(f"kvcache_sim.{name}", reason="pip install kvcache-simulator")
        for name in ("plan", "policies", "trace")
    )
    told = (
        json.dumps({"block_size": 16, "hash_ids": [f"{name}:{i}" for i in range(blocks)], "input_length": 16 * blocks})
        for name, blocks in REQUESTS
    )
    found = policies.simulate_policy(plan.build_execution_plan(traces.parse_trace_lines(told)), policy, budget)
    assert "fixed_window" == found.measurementMode
    return float(found.hitRate)


@pytest.mark.parametrize("budget", BUDGETS)
def test_lru_hits_what_the_package_says(budget: int) -> None:
    """Within 0.1 points at every budget: both evict a context from its end, the longest unused first."""
    assert simulated(budget, least_recently_used, "elapsed") == pytest.approx(packaged(budget, "lru"), abs=0.001)


@pytest.mark.parametrize("budget", [budget for budget in BUDGETS if budget >= BYPASS_FROM])
def test_belady_hits_what_the_package_calls_optimal(budget: int) -> None:
    """Within a point where the device holds more than a few contexts."""
    assert simulated(budget, next_use, "oracle") == pytest.approx(packaged(budget, "optimal"), abs=0.01)


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_left_is_the_bypass(budget: int) -> None:
    """The plain counter agrees with the package when it may refuse blocks."""
    assert counted(budget, optimal=True, bypass=True) == pytest.approx(packaged(budget, "optimal"), abs=0.01)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("key", "sight"), [(least_recently_used, "elapsed"), (next_use, "oracle")])
def test_the_simulator_hits_what_plain_counting_says(budget: int, key: EvictKey, sight: Sight) -> None:
    """LRU and Belady without a bypass, within half a point; this needs no package."""
    plain = counted(budget, optimal=sight == "oracle", bypass=False)
    assert simulated(budget, key, sight) == pytest.approx(plain, abs=0.005)
