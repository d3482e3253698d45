"""Users' reports about moving and reusing KV, through the whole engine: never another token than a cold run has.

Covers read-back while written, borders and holes, tenants, precision, hostile names. Each test shows that blocks
really moved. Identity of models is `test_kv_cases_identity.py`, disks are `..._disk.py`, ends of calls `..._ends.py`.
"""

from __future__ import annotations

import random

import pytest
import torch

from agentkv.core.residency import Action, Move, Tier
from agentkv.core.task import Caller
from agentkv.engine.base import Request
from agentkv.errors import RequestInvalid
from agentkv.kv.streams.adversarial import AdversarialStreams
from agentkv.kv.streams.cpu import CpuStreams

TEXT = "The tool ran for a while. Its output follows: line one, line two, and so on until the end of the file. "


def _prompt(number, length=120):
    return (f"{number}: " + TEXT * 8)[:length]


def _move(session, action, to=None):
    return Move(session=session, action=action, to=to, reason="test")


# -- read back while written


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_a_turn_that_starts_while_the_last_one_is_written_out_reads_no_half_block(tiny, start, ask, tmp_path, seed):
    """Demoted in the moment it ends and asked again at once, turn after turn, by two agents (K1)."""
    streams = CpuStreams() if seed is None else AdversarialStreams(seed)
    engine = start(blocks=20, host=60, disk=tmp_path, disk_memory=32 << 20, streams=streams)
    texts = {"a": _prompt(1, 150), "b": _prompt(2, 170)}
    for turn in range(4):
        for name, text in texts.items():
            generation = engine.submit(ask(text, 8, task=name)).result(60)
            assert tiny.greedy(text, 8) == list(generation.token_ids)
            assert (turn > 0) == (generation.usage.cached_tokens > 0)
            engine.apply(_move(generation.session, Action.DEMOTE, Tier.DISK if turn % 2 else Tier.HOST))
            texts[name] = text + generation.text + f" Turn {turn}."
    engine.tiers.quiesce(20)
    moved = engine.stats()["kv"]["bytes"]
    assert min(moved["d2h"], moved["h2d"]) > 0


@pytest.mark.parametrize("streams", [CpuStreams, AdversarialStreams])
def test_a_context_that_leaves_and_comes_back_at_every_step_writes_the_same_tokens(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, streams
):
    """One token a call, and between any two the whole context goes down a tier and the device is poisoned (K1)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 << 20, streams=streams())
    prompt = _prompt(0, 150)
    expected = tiny.greedy(prompt, 12)
    text, restored = prompt, 0
    for step, token in enumerate(expected):
        generation = engine.submit(ask(text, 1, task="t")).result(60)
        assert [token] == list(generation.token_ids)
        restored += generation.restored_blocks
        text += generation.text
        park(engine, generation.session, Tier.DISK if step % 2 else Tier.HOST)
    assert restored >= 11 * 9
    kv = engine.stats()["kv"]
    assert min(kv["hits"]["host"], kv["hits"]["disk"]) >= 5 * 9


# -- borders and holes


@pytest.mark.parametrize("length", [1, 31, 32, 33, 79, 80, 81])
@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_at_block_borders_a_restored_prompt_reuses_all_but_its_last_token(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, length, to
):
    """The same prompt three times, parked between: reuse is every full block but never the last token (K18)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 << 20)
    prompt = _prompt(0, length)
    expected = tiny.greedy(prompt, 4)
    for turn in range(3):
        generation = engine.submit(ask(prompt, 4, task="t")).result(60)
        assert expected == list(generation.token_ids)
        full = (length - 1) // 16 * 16 if turn else 0
        assert full <= generation.usage.cached_tokens <= (length - 1 if turn else 0)
        assert full // 16 <= generation.restored_blocks
        park(engine, generation.session, to)


def test_a_hole_at_the_beginning_ends_every_hit(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, flip, slots_on_disk, tmp_path
):
    """Block 0 is lost, the later ones are still there: nothing is reused, and the answer is that of a cold run (K18)."""
    engine = start(host=60, disk=tmp_path, disk_memory=32 << 20)
    prompt = _prompt(0, 150)
    first = engine.submit(ask(prompt, 1, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    path, at = slots_on_disk(engine, tmp_path)[0]
    flip(path, at + 33)
    # the first call finds the rot, the second finds a hole already; other tasks, hence no memory of the session
    for task in ("other", "third"):
        generation = engine.submit(ask(prompt, 6, task=task)).result(60)
        assert tiny.greedy(prompt, 6) == list(generation.token_ids)
        assert (0 if task == "other" else 144) == generation.usage.cached_tokens
    assert 1 == engine.stats()["kv"]["lost_on_disk"]


# -- tenants


@pytest.mark.parametrize("to", [None, Tier.HOST, Tier.DISK])
def test_a_tenant_finds_its_own_blocks_in_every_tier_and_no_others(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, to
):
    """Two salts over one folder and one model, with salts that are alike: only the same salt reuses (K5)."""
    engines = {
        salt: start(host=60, disk=tmp_path, disk_memory=32 << 20, salt=salt) for salt in ("ab", "abc", "", "\0", "a/b")
    }
    prompt = _prompt(0, 200)
    mine = engines.pop("ab")
    first = mine.submit(ask(prompt, 4, task="t")).result(60)
    if to is not None:
        park(mine, first.session, to)
    for engine in engines.values():
        theirs = engine.submit(ask(prompt, 4, task="t", session=first.session)).result(60)
        assert (0, 0) == (theirs.usage.cached_tokens, theirs.restored_blocks)
        assert first.token_ids == theirs.token_ids
    again = mine.submit(ask(prompt, 4, task="other")).result(60)
    assert 192 == again.usage.cached_tokens
    assert (12 if to is not None else 0) == again.restored_blocks
    assert first.token_ids == again.token_ids


def test_a_caller_has_no_way_to_name_a_salt():
    """A Request's salt is that of whoever let the caller in (`server/keys.py`); who calls names none (K5)."""
    for field in ("salt", "cache_salt"):
        with pytest.raises(TypeError, match=field):
            Caller(task="t", **{field: "b"})
    with pytest.raises(TypeError, match="cache_salt"):
        Request(prompt="x", cache_salt="b")


def test_a_requests_salt_separates_it_in_every_tier(tiny, start, ask, park):
    """Two tenants on one engine, the same prompt: nothing is shared; the same tenant finds its own (K5)."""
    engine = start(host=60)
    prompt = _prompt(0, 100)
    first = engine.submit(ask(prompt, 4, task="a", salt="one")).result(60)
    park(engine, first.session)
    for salt in ("two", "", "one1", "o"):
        other = engine.submit(ask(prompt, 4, task=f"b{salt}", salt=salt)).result(60)
        assert (0, first.token_ids) == (other.usage.cached_tokens, other.token_ids)
    again = engine.submit(ask(prompt, 4, task="c", salt="one")).result(60)
    assert again.usage.cached_tokens > 0


# -- names


HOSTILE = ["../..", "/etc/passwd", "a\0b", "\ud800", "%s%n{}", "-" * 4096, "é" * 2048, "a\nb\r", " ", ".", "CON"]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_of_tasks_sessions_and_branches_are_only_names(  # noqa: PLR0917  fixtures
    tiny, start, ask, park, tmp_path, name
):
    """They reach no path: the disk folder has the files it always has, the tokens are right, the end frees all."""
    engine = start(host=60, disk=tmp_path / "kv", disk_memory=32 << 20)
    names = {path.name.split("-")[0] for path in tmp_path.rglob("*")}
    prompt = _prompt(0, 100)
    first = engine.submit(ask(prompt, 4, task=name, branch=name, session=name)).result(60)
    assert name == first.session
    park(engine, name, Tier.DISK)
    again = engine.submit(ask(prompt, 4, task=name, branch=name)).result(60)
    assert (first.token_ids, 6) == (again.token_ids, again.restored_blocks)
    assert name == engine.last_session(Caller(task=name, branch=name))
    assert names == {path.name.split("-")[0] for path in tmp_path.rglob("*")}
    engine.finish_task(name)
    assert 0 == engine.stats()["sessions"]


@pytest.mark.parametrize("salt", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_salts_are_only_salts(start, ask, park, tmp_path, salt):
    """Any text separates tenants, and reaches no path."""
    engine = start(host=60, disk=tmp_path / "kv", disk_memory=32 << 20, salt=salt)
    first = engine.submit(ask(_prompt(0, 100), 4, task="t")).result(60)
    park(engine, first.session, Tier.DISK)
    again = engine.submit(ask(_prompt(0, 100), 4, task="t")).result(60)
    assert (first.token_ids, 6) == (again.token_ids, again.restored_blocks)
    assert {"kv"} == {path.name for path in tmp_path.iterdir() if path.name != "agentkv-data"}


@pytest.mark.parametrize("session", ["", "\0"])
def test_an_empty_session_is_a_new_one_or_refused(start, ask, session):
    """Whatever it is, it is never another task's."""
    engine = start()
    keys = set()
    for task in ("a", "b"):
        try:
            keys.add(engine.submit(ask(_prompt(0, 40), 2, task=task, session=session)).result(60).session)
        except RequestInvalid:
            keys.add(f"refused {task}")
    assert 2 == len(keys)


# -- precision


@pytest.fixture(scope="module")
def half(tiny):
    """The tiny model in bfloat16."""
    from agentkv.engine.local.loader import load_model

    return load_model(str(tiny.folder), device="cpu", dtype="bfloat16")


NEAR = 0.15
"""Logits of the tiny model spread over some 10; in bfloat16 two choices closer than this may change places."""


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_bfloat16_answers_differ_after_a_restore_only_where_two_tokens_were_as_good(  # noqa: PLR0917  fixtures
    tiny, half, start, ask, park, tmp_path, to
):
    """Cold against cold is equal to the last token; cold against warm may flip a near tie, and nothing else (K20)."""
    sizes = {"device_memory": 80 * half.geometry.block_bytes, "host_memory": 80 * half.geometry.slot_bytes}

    class Half:
        loaded = half
        block_bytes = tiny.block_bytes

    def engine():
        return start(model=Half, disk=tmp_path, disk_memory=32 << 20, **sizes)

    flips = 0
    for number in range(4):
        prompt = _prompt(number, 150 + 7 * number)
        cold = [list(engine().submit(ask(prompt, 24)).result(60).token_ids) for _ in range(2)]
        assert cold[0] == cold[1]
        warm = engine()
        parked = warm.submit(ask(prompt[:-20], 1, task="t")).result(60)
        park(warm, parked.session, to)
        restored = warm.submit(ask(prompt, 24, task="t")).result(60)
        assert restored.restored_blocks >= 8
        tokens = list(restored.token_ids)
        if tokens == cold[0]:
            continue
        flips += 1
        at = next(i for i, (a, b) in enumerate(zip(cold[0], tokens, strict=False)) if a != b)
        best = tiny.logits(tiny.ids(prompt) + cold[0][:at])[-1]
        assert abs(float(best[cold[0][at]] - best[tokens[at]])) < NEAR
    assert flips <= 2


def test_float32_answers_are_those_of_a_cold_run_from_every_tier(tiny, start, ask, park, tmp_path):
    """Random agents whose contexts come from device, host and disk by turns: every token is transformers' own (K20)."""
    engine = start(blocks=80, host=120, disk=tmp_path, disk_memory=32 << 20)
    dice = random.Random(4)
    texts = {name: _prompt(i, 60 + 37 * i) for i, name in enumerate("abcd")}
    for _turn in range(5):
        for name in dice.sample(sorted(texts), 4):
            generation = engine.submit(ask(texts[name], 10, task=name)).result(60)
            assert tiny.greedy(texts[name], 10) == list(generation.token_ids)
            texts[name] += generation.text + dice.choice([" And?", " More, please.", " Go on with the next one."])
            to = dice.choice([None, Tier.HOST, Tier.DISK])
            if to is not None:
                park(engine, generation.session, to)
    hits = engine.stats()["kv"]["hits"]
    assert min(hits["device"], hits["host"], hits["disk"]) > 0
    assert torch.isfinite(engine.tiers.pool[0]).all()
