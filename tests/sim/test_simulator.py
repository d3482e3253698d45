"""The simulator: conservation, what the engine's rules demand of it, and that better memory is never worse."""

import dataclasses
import functools
import random

import pytest

from agentkv.core.rates import Prefill
from agentkv.core.residency import Tier
from agentkv.errors import ConfigError
from agentkv.policy import OURS, RULES, make_rules
from agentkv.sim.compare import compare
from agentkv.sim.context import Context
from agentkv.sim.costs import Costs
from agentkv.sim.facts import BLOCK_TOKENS
from agentkv.sim.simulator import Simulator
from agentkv.sim.synthetic import synthetic
from agentkv.sim.workload import PERSON, Session, Turn, Workload, workload

PREFILL = Prefill(linear_s=1e-3, quadratic_s=1e-8, constant_s=0.0)


def costs(**changes):
    """1 KB per token, room for 1,000 tokens on the device and 4,000 on host, 1 MB/s links."""
    facts = {
        "token_bytes": 1000, "prefill": PREFILL, "decode_base_s": 0.01, "decode_per_token_s": 0.0, "h2d_bytes_s": 1e6,
        "d2h_bytes_s": 1e6, "device_bytes": 1_008_000, "host_bytes": 4_000_000, "token_budget": 512,
    }  # fmt: skip
    return Costs(**(facts | changes))


def turns(*prompts, wait_s=10.0, output=16, reuse=None):
    """Calls with these prompts, each beginning with the last one (or with `reuse` tokens of it)."""
    made = []
    for number, prompt in enumerate(prompts):
        before = prompts[number - 1] if number else 0
        last = number == len(prompts) - 1
        made.append(
            Turn(
                prompt_tokens=prompt, output_tokens=output, reuse_tokens=min(before if reuse is None else reuse, prompt - 1),
                wait_s=None if last else wait_s, tool="pytest",
            )
        )  # fmt: skip
    return tuple(made)


def sessions(*each):
    return tuple(Session(name=f"s{number}", turns=some) for number, some in enumerate(each))


def run(load, rules="lazy", shared_tokens=0, **changes):
    simulator = Simulator(load, costs(**changes), make_rules(rules), shared_tokens=shared_tokens, checked=True)
    return simulator.run(), simulator


@functools.cache
def made_up():
    """Twelve short sessions."""
    whole = synthetic(seed=3, sessions=12)
    return dataclasses.replace(whole, sessions=tuple(each[:12] for each in whole.sessions))


def crowd(agents=6, seed=0, **options):
    """A small synthetic workload shrunk to what the toy device holds."""
    return workload(made_up(), agents=agents, seed=seed, window_tokens=640, **options)


def test_one_session_alone_takes_computing_and_waiting_and_nothing_else():
    """112 tokens in one step, 15 more steps; a wait; 16 new tokens and their steps."""
    load = Workload(sessions=sessions(turns(112, 128)), agents=1)
    result, _ = run(load)
    first = 0.01 + PREFILL.recompute_s(112) + 15 * 0.01
    second = 0.01 + PREFILL.extend_s(112, 128) + 15 * 0.01
    assert first + 10 + second == pytest.approx(result.task_mean_s)
    assert (0.0, 1.0) == (result.stall_p99_s, result.hit_share)
    assert 0 == result.up_bytes


@pytest.mark.parametrize("name", sorted(RULES))
def test_everything_that_came_in_has_finished_and_no_tier_overflows(name):
    """Every policy on a crowded device: sessions and turns in = out, tiers recounted after every event."""
    load = crowd()
    result, simulator = run(load, name)
    assert len(load.sessions) == result.sessions
    assert sum(len(each.turns) for each in load.sessions) == result.turns
    assert dict.fromkeys(Tier, 0) == simulator.memory.used
    assert 0 <= result.hit_share <= 1
    assert 0 <= result.useful <= 1 - result.device_idle + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_random_tiers_never_deadlock(seed):
    """Sizes drawn at random, with and without host and disk, open and closed loop, two classes."""
    rng = random.Random(seed)
    disk = rng.random() < 0.5
    changes = {
        "device_bytes": rng.choice([660_000, 900_000, 3_000_000]), "host_bytes": rng.choice([0, 100_000, 2_000_000]),
        "disk_bytes": 1_500_000 if disk else 0, "read_bytes_s": 3e5 if disk else None,
        "write_bytes_s": 3e5 if disk else None,
    }  # fmt: skip
    load = crowd(seed=seed, open_loop=seed % 2 == 1, batch_share=0.3, costs=costs())
    for name in (*OURS, "lru", "thunderagent", "belady"):
        result, _ = run(load, name, **changes)
        assert 12 == result.sessions, (name, changes)


def test_a_call_that_fits_nobody_ends_with_an_error():
    """No endless loop: the message names both sizes."""
    load = Workload(sessions=sessions(turns(2000)), agents=1)
    with pytest.raises(ConfigError, match=r"2016 tokens does not fit the device's 1008"):
        run(load)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33])
def test_only_full_blocks_are_hits_and_never_the_last_token(prompt):
    """The same prompt again: the hit is what the engine's rule gives, (prompt - 1) // 16 blocks."""
    load = Workload(sessions=sessions(turns(prompt, prompt, output=1, reuse=prompt)), agents=1)
    _, simulator = run(load)
    assert (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS == simulator.tally.hit_tokens


def test_what_is_behind_a_hole_is_no_hit():
    """Blocks 2 to 7 on host without 0 and 1: nothing can be used."""
    context = Context("s", 0)
    context.total, context.host = 8, ((2, 8),)
    assert 0 == context.leading()
    context.device = 2
    assert 8 == context.leading()


def test_a_context_that_gave_way_comes_back_over_the_link():
    """Two sessions of 640 tokens on a device of 1,008: whoever returns loads what it lost, at 1 MB/s."""
    load = Workload(sessions=sessions(turns(640, 640), turns(640, 640)), agents=2)
    result, _ = run(load, "lru")
    assert result.up_bytes > 0
    assert result.up_bytes % (16 * 1000) == 0
    assert result.hit_share == 1.0
    assert result.stall_p99_s > 0


def test_without_a_host_tier_it_is_computed_again():
    """Keep + LRU drop: no byte moves, and what was lost is counted."""
    load = Workload(sessions=sessions(turns(640, 640), turns(640, 640)), agents=2)
    result, _ = run(load, "drop")
    assert (0.0, 0.0) == (result.up_bytes, result.down_bytes)
    assert result.lost_tokens > 0


def test_a_compaction_gives_its_blocks_back():
    """The second prompt shares 16 tokens with the first: one block is a hit, the rest is room again."""
    load = Workload(sessions=sessions(turns(320, 320, reuse=16)), agents=1)
    _, simulator = run(load)
    assert 16 == simulator.tally.hit_tokens


def test_a_shared_system_prompt_is_computed_once_and_held_once():
    """Two sessions that begin with the same 64 tokens: the second finds them, the pool holds them once."""
    load = Workload(sessions=sessions(turns(128), turns(128)), agents=1)
    alone, _ = run(load)
    together, simulator = run(load, shared_tokens=64)
    assert together.task_mean_s < alone.task_mean_s
    assert simulator.memory.capacity[Tier.DEVICE] == 63 - 4


def test_a_large_prompt_is_computed_in_chunks_beside_those_who_decode():
    """One step a chunk: a decoder goes on while 900 tokens are computed in steps of at most 128."""
    load = Workload(sessions=sessions(turns(32, output=100), turns(900, output=1)), agents=2)
    chunked, _ = run(load, token_budget=128)
    whole, _ = run(load, token_budget=8192)
    assert chunked.makespan_s == pytest.approx(whole.makespan_s, rel=0.1)
    assert chunked.turns == whole.turns == 2


def test_infinite_memory_is_the_floor_for_everybody():
    """No policy is faster than memory for everybody, and the optimum closes all of the gap."""
    rows = {
        row.policy: row for row in compare(["lru", "lazy", "belady", "infinite"], costs(), [crowd()], shared_tokens=0)
    }
    floor = rows["infinite"]["task_mean_s"]
    assert all(row["task_mean_s"] >= floor * 0.999 for row in rows.values())
    assert rows["lru"].closed in (0.0, None)
    assert rows["belady"].closed in (1.0, None)


def test_the_same_seed_gives_the_same_run():
    """Deterministic, whatever ran before."""
    assert run(crowd())[0] == run(crowd())[0]
    assert run(crowd())[0] != run(crowd(seed=1))[0]


def test_waits_on_people_can_be_switched_off():
    """Without people the same sessions end sooner, and their waits are learnt under their own name with them."""
    slow, quick = crowd(), crowd(humans=False)
    assert any(turn.tool == PERSON and turn.wait_s > 0 for each in slow.sessions for turn in each.turns if turn.wait_s)
    assert run(quick)[0].makespan_s < run(slow)[0].makespan_s


def test_sessions_longer_than_the_window_are_shrunk_in_proportion():
    """The largest prompt with its answer fits the window, and no turn reuses more than it has."""
    for session in crowd().sessions:
        for turn in session.turns:
            assert turn.prompt_tokens + turn.output_tokens <= 640
            assert 0 <= turn.reuse_tokens < turn.prompt_tokens


def test_an_open_loop_starts_sessions_by_the_clock():
    """Twice the load: sessions arrive in half the time."""
    calm = crowd(open_loop=True, load=1.0, costs=costs())
    busy = crowd(open_loop=True, load=2.0, costs=costs())
    assert busy.arrivals_s[-1] == pytest.approx(calm.arrivals_s[-1] / 2)
    assert 0.0 == calm.arrivals_s[0]
    assert 12 == run(busy)[0].sessions


def test_batch_work_gives_way_to_people():
    """Three tasks on a device for one: the earliest never waits, unless it is batch work and the latest is not."""
    three = sessions(*[turns(640, 640, 640, wait_s=0.1)] * 3)
    batch = tuple(dataclasses.replace(each, priority=-1) for each in three[:2])
    (_, alike), (_, apart) = (run(Workload(sessions=some, agents=3)) for some in (three, (*batch, three[2])))
    assert sum(alike.tally.stalls_by_session["s0"]) == pytest.approx(0)
    assert sum(apart.tally.stalls_by_session["s0"]) > 1
    assert sum(apart.tally.stalls_by_session["s2"]) == pytest.approx(0)


@pytest.mark.parametrize("bad", [{"agents": 0}, {"agents": 1, "sessions": 0}, {"agents": 1, "batch_share": 2}])
def test_numbers_that_describe_no_workload_are_errors(bad):
    """And so is an open loop without costs, and a trace without tokens."""
    with pytest.raises(ConfigError):
        workload(synthetic(sessions=2), **bad)
    with pytest.raises(ConfigError, match="open loop needs costs"):
        workload(synthetic(sessions=2), agents=1, open_loop=True)
    empty = dataclasses.replace(synthetic(sessions=2), sessions=())
    with pytest.raises(ConfigError, match="nothing to simulate"):
        workload(empty, agents=1)


def test_an_unknown_policy_is_an_error_before_anything_runs():
    """With the names that there are."""
    with pytest.raises(ConfigError, match=r"lasy.*there are.*lazy"):
        compare(["lru", "lasy"], costs(), [crowd()])
