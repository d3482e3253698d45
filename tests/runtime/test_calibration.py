"""Calibration: the cache holds what was measured and nothing else, and no odd run spoils it."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import log
from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError
from agentkv.kv.geometry import Geometry
from agentkv.runtime import ratefiles
from agentkv.runtime.calibration import (
    LARGEST_RATIO,
    LARGEST_WEIGHT,
    Observed,
    RateBook,
    Seen,
    calibrate,
    observed,
    only_borrowed,
    refine,
)
from agentkv.runtime.machine import Place, cpu_name, machine_digest, mount_of, nearest
from agentkv.runtime.ratefiles import load_rates, rates_folder, save_rates, saved_here
from agentkv.units import GIB, MIB

RATES = Rates(
    memcpy_bytes_s=10e9,
    h2d_bytes_s=8e9,
    d2h_bytes_s=7e9,
    read_bytes_s=3e9,
    write_bytes_s=1e9,
    prefill=Prefill(quadratic_s=1e-8, linear_s=1e-3, constant_s=0.01),
    measured_at=1000.0,
)
PLACE = Place(
    machine=machine_digest(),
    cpu="a cpu",
    cores=2,
    device="cpu",
    fingerprint="ab" * 16,
    model="m",
    token_bytes=23_040,
    context_tokens=8192,
    mount="/ (ext4 on x)",
)


# -- the cache


def test_what_was_saved_is_loaded():
    """Every number, in a file that only the user may read, in a folder likewise."""
    path = save_rates(PLACE, RATES)
    assert RATES == load_rates(PLACE)
    assert [path] == list(rates_folder().iterdir())
    assert 0o700 == stat.S_IMODE(rates_folder().stat().st_mode)


def test_without_a_calibration_there_are_no_rates():
    """Nothing is made up, and nothing created."""
    assert load_rates(PLACE) is None
    assert not rates_folder().exists()


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "another"},
        {"cpu": "another"},
        {"cores": 4},
        {"device": "a gpu"},
        {"fingerprint": "cd" * 16},
    ],
)
def test_another_place_has_rates_of_its_own(other):
    """Machine, processor, cores, device and model are all part of the key."""
    save_rates(PLACE, RATES)
    assert load_rates(replace(PLACE, **other)) is None


def test_the_model_is_known_by_its_content_not_its_name():
    """A renamed folder is the same model."""
    save_rates(PLACE, RATES)
    assert RATES == load_rates(replace(PLACE, model="renamed"))


@pytest.mark.parametrize("mount", [None, "/data (xfs on y)"])
def test_another_disk_of_the_same_machine_borrows_all_but_the_disk_rates(mount):
    """The newest calibration gives copies and prefill; a disk that was not measured has no rates."""
    save_rates(replace(PLACE, mount="/old"), replace(RATES, measured_at=1.0, h2d_bytes_s=1.0))
    save_rates(PLACE, RATES)
    assert replace(RATES, read_bytes_s=None, write_bytes_s=None) == load_rates(replace(PLACE, mount=mount))


def spoil(text):
    told = json.loads(text)
    yield "not json", "{"
    yield "empty", ""
    yield "a list", "[]"
    yield "a number", "7"
    yield "deep", "[" * 50_000
    yield "no schema", json.dumps({name: value for name, value in told.items() if name != "schema"})
    yield "newer schema", json.dumps(told | {"schema": "agentkv.rates/2"})
    yield "no place", json.dumps({name: value for name, value in told.items() if name != "place"})
    yield "foreign machine", json.dumps(told | {"place": told["place"] | {"machine": "another"}})
    yield "place of numbers", json.dumps(told | {"place": told["place"] | {"cpu": 7}})
    yield "a context of no tokens", json.dumps(told | {"place": told["place"] | {"context_tokens": 0}})
    yield "unknown rate", json.dumps(told | {"rates": told["rates"] | {"warp_bytes_s": 1.0}})
    yield "rate of zero", json.dumps(told | {"rates": told["rates"] | {"h2d_bytes_s": 0}})
    yield "rate in words", json.dumps(told | {"rates": told["rates"] | {"h2d_bytes_s": "fast"}})
    yield "rate of nan", json.dumps(told | {"rates": told["rates"] | {"h2d_bytes_s": math.nan}})
    yield "no prefill", json.dumps(told | {"rates": told["rates"] | {"prefill": None}})
    yield "negative prefill", json.dumps(told | {"rates": told["rates"] | {"prefill": {"linear_s": -1.0}}})
    yield "too large", text + " " * (1 << 17)
    yield "cut", text[: len(text) // 2]


def test_a_broken_or_foreign_file_is_as_good_as_none():
    """Whatever is wrong with it; saving again mends it."""
    path = save_rates(PLACE, RATES)
    text = path.read_text()
    for name, spoilt in spoil(text):
        path.write_text(spoilt)
        assert load_rates(PLACE) is None, name
        save_rates(PLACE, RATES)
        assert RATES == load_rates(PLACE), name


def test_bytes_that_are_not_text_are_as_good_as_none():
    """Neither is a folder in the file's place."""
    path = save_rates(PLACE, RATES)
    path.write_bytes(bytes(range(256)))
    assert load_rates(PLACE) is None
    path.unlink()
    path.mkdir()
    assert load_rates(PLACE) is None
    assert save_rates(PLACE, RATES) is None


def test_writers_at_once_leave_one_whole_file():
    """Readers meanwhile see one of the versions that were saved, never half of one or none."""
    save_rates(PLACE, RATES)
    allowed = {10e9 + writer for writer in range(4)}
    seen, stop = set(), threading.Event()

    def write(writer):
        for _ in range(40):
            save_rates(PLACE, replace(RATES, memcpy_bytes_s=10e9 + writer))

    def read():
        while not stop.is_set():
            found = load_rates(PLACE)
            seen.add(None if found is None else found.memcpy_bytes_s)

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen <= allowed
    assert 1 == len(list(rates_folder().iterdir()))


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path, monkeypatch):
    """One counted failure, no exception."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path / "file"))
    before = log.counters["calibration_not_saved"]
    assert save_rates(PLACE, RATES) is None
    assert load_rates(PLACE) is None
    assert [] == saved_here()
    assert before + 1 == log.counters["calibration_not_saved"]


def test_an_interrupt_while_saving_leaves_the_old_file(monkeypatch):
    """And no half of the new one."""
    path = save_rates(PLACE, RATES)

    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_rates(PLACE, replace(RATES, memcpy_bytes_s=1.0))
    assert [path] == list(rates_folder().iterdir())
    assert RATES == load_rates(PLACE)


def test_what_a_killed_writer_left_is_swept():
    """An hour later, by the next one that saves."""
    save_rates(PLACE, RATES)
    old, young = rates_folder() / ".x.json.1-a.part", rates_folder() / ".x.json.2-b.part"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 2 * ratefiles._STALE_PART_S,) * 2)
    save_rates(PLACE, RATES)
    assert (False, True) == (old.exists(), young.exists())


def test_this_machines_calibrations_are_listed_newest_first():
    """Those of other machines, in a shared home folder, are not."""
    save_rates(PLACE, RATES)
    save_rates(replace(PLACE, fingerprint="cd" * 16), replace(RATES, measured_at=2000.0))
    save_rates(replace(PLACE, machine="another"), replace(RATES, measured_at=3000.0))
    assert [2000.0, 1000.0] == [rates.measured_at for _, rates in saved_here()]


# -- the place


def test_the_mount_names_file_system_and_device(tmp_path):
    """The same for a folder that is not there yet."""
    assert mount_of(tmp_path) == mount_of(tmp_path / "not" / "yet")
    assert mount_of(tmp_path).endswith(")")
    assert mount_of(Path("/proc")) != mount_of(tmp_path)
    assert tmp_path == nearest(tmp_path / "not" / "yet")


def test_the_machine_is_known_without_its_id():
    """A digest, stable over calls; the processor has a name."""
    assert machine_digest() == machine_digest()
    assert 16 == len(machine_digest())
    assert cpu_name()


# -- refining

factors = st.floats(1e-3, 1e3)
sizes = st.floats(0, 1e12)
seens = st.none() | st.builds(Seen, bytes_s=st.floats(1e3, 1e13), size_bytes=sizes)
observations = st.builds(
    Observed,
    h2d=seens,
    d2h=seens,
    read=seens,
    write=seens,
    prefill_tokens=st.integers(0, 10**7),
    prefill_spent_s=st.floats(0, 1e5),
    prefill_expected_s=st.floats(0, 1e5),
)


@given(observations)
def test_one_run_moves_no_rate_by_more_than_15_percent(seen):
    """However odd it was; memcpy is never seen and never moves."""
    new = refine(RATES, seen, now=2000.0)
    most = LARGEST_RATIO**LARGEST_WEIGHT * (1 + 1e-9)
    for name in ("h2d_bytes_s", "d2h_bytes_s", "read_bytes_s", "write_bytes_s"):
        assert 1 / most <= getattr(new, name) / getattr(RATES, name) <= most
    for tokens in (100, 10_000):
        assert 1 / most <= new.recompute_s(tokens) / RATES.recompute_s(tokens) <= most
    assert RATES.memcpy_bytes_s == new.memcpy_bytes_s
    assert (new is RATES) or (new.samples, new.measured_at) == (2, 2000.0)


@given(factors)
def test_a_run_pulls_towards_what_it_saw_and_never_beyond(factor):
    """The new value lies between the old one and what was seen."""
    seen = Observed(h2d=Seen(bytes_s=RATES.h2d_bytes_s * factor, size_bytes=2 * GIB))
    new = refine(RATES, seen, now=2000.0).h2d_bytes_s
    low, high = sorted([RATES.h2d_bytes_s, RATES.h2d_bytes_s * factor])
    assert low * (1 - 1e-9) <= new <= high * (1 + 1e-9)


def test_many_runs_that_agree_arrive():
    """A machine that became four times slower is known to be so after some runs."""
    rates = RATES
    for run in range(60):
        rates = refine(rates, Observed(read=Seen(bytes_s=0.75e9, size_bytes=GIB)), now=2000.0 + run)
    assert pytest.approx(0.75e9, rel=0.01) == rates.read_bytes_s
    assert 61 == rates.samples


def test_little_evidence_weighs_little_and_very_little_nothing():
    """By bytes, and by prompt tokens."""
    half = RATES.h2d_bytes_s / 2

    def after(size_bytes):
        return refine(RATES, Observed(h2d=Seen(bytes_s=half, size_bytes=size_bytes)), now=2000.0)

    assert after(GIB).h2d_bytes_s < after(100 * MIB).h2d_bytes_s < RATES.h2d_bytes_s
    assert after(MIB) is RATES
    assert refine(RATES, Observed(prefill_tokens=100, prefill_spent_s=9.0, prefill_expected_s=1.0), now=2.0) is RATES


def test_a_slower_prefill_is_slower_at_every_length():
    """The three coefficients are scaled together."""
    seen = Observed(prefill_tokens=16_384, prefill_spent_s=20.0, prefill_expected_s=10.0)
    new = refine(RATES, seen, now=2000.0)
    for tokens in (1, 100, 10_000):
        assert pytest.approx(2**LARGEST_WEIGHT) == new.recompute_s(tokens) / RATES.recompute_s(tokens)


def test_a_disk_that_was_not_calibrated_stays_unknown():
    """A read rate without a write rate says nothing."""
    rates = replace(RATES, read_bytes_s=None, write_bytes_s=None)
    assert refine(rates, Observed(read=Seen(bytes_s=1e9, size_bytes=GIB)), now=2000.0) is rates


@pytest.mark.parametrize(
    "stats", [{}, {"kv": None}, {"kv": {}}, {"kv": {"bytes": {"h2d": 0}, "rates_bytes_s": {"h2d": 1}}}]
)
def test_statistics_without_transfers_are_no_observation(stats):
    """An engine that moved nothing, or tells nothing."""
    assert Observed() == observed(stats)


def test_an_observation_is_read_from_the_engines_statistics():
    """Lanes from `kv`, the meter from `prefill`."""
    stats = {
        "kv": {"bytes": {"h2d": 5, "read": 0}, "rates_bytes_s": {"h2d": 2.0, "read": 1.0, "d2h": 3.0}},
        "prefill": {"tokens": 7, "spent_s": 1.0, "expected_s": 2.0},
    }
    assert (
        Observed(
            h2d=Seen(bytes_s=2.0, size_bytes=5), prefill_tokens=7, prefill_spent_s=1.0, prefill_expected_s=2.0
        )
        == observed(stats)
    )  # fmt: skip


# -- an engine's part


class Loaded:
    """What a place needs to know of a model."""

    def __init__(self, fingerprint=b"f" * 16):
        import torch

        self.name, self.fingerprint, self.device, self.context_tokens = "m", fingerprint, torch.device("cpu"), 8192
        self.geometry = Geometry(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")


SLOW = {"kv": {"bytes": {"h2d": GIB}, "rates_bytes_s": {"h2d": RATES.h2d_bytes_s / 2}}}


def test_a_book_gives_the_cached_rates_and_takes_back_what_a_run_saw(tmp_path):
    """From the next start on the refined rates are used."""
    save_rates(Place.of(Loaded(), tmp_path), RATES)
    book = RateBook(Loaded(), tmp_path)
    assert RATES == book.rates
    book.learn(SLOW)
    again = RateBook(Loaded(), tmp_path).rates
    assert pytest.approx(RATES.h2d_bytes_s * 2**-LARGEST_WEIGHT) == again.h2d_bytes_s
    assert 2 == again.samples


def test_two_engines_that_end_after_each_other_both_count(tmp_path):
    """The second one refines what the first one saved, not what it read at its start."""
    save_rates(Place.of(Loaded(), tmp_path), RATES)
    books = [RateBook(Loaded(), tmp_path) for _ in range(2)]
    for book in books:
        book.learn(SLOW)
    assert 3 == RateBook(Loaded(), tmp_path).rates.samples


def test_without_a_calibration_a_book_learns_nothing(tmp_path):
    """A run sees parts only; the rest would have to be made up."""
    RateBook(Loaded(), tmp_path).learn(SLOW)
    assert not rates_folder().exists()


def test_statistics_that_make_no_sense_never_raise(tmp_path):
    """Closing an engine must not fail for a cache."""
    save_rates(Place.of(Loaded(), None), RATES)
    before = log.counters["calibration_not_refined"]
    RateBook(Loaded(), None).learn({"kv": {"bytes": {"h2d": "many"}, "rates_bytes_s": {"h2d": 1.0}}})
    assert before + 1 == log.counters["calibration_not_refined"]


# -- measuring


def test_folders_that_were_made_for_measuring_are_gone_afterwards(tmp_path):
    """Those that were there stay, and so does a folder in which somebody put something."""
    with only_borrowed(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b").mkdir(parents=True)
    assert [] == list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), only_borrowed(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "a" / "kept").touch()
        raise KeyboardInterrupt
    assert [tmp_path / "a" / "kept"] == list((tmp_path / "a").iterdir())
    with only_borrowed(tmp_path):
        pass
    assert tmp_path.exists()


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_no_time_to_measure_is_refused(seconds):
    """Before the model is loaded."""
    with pytest.raises(ConfigError, match="seconds"):
        calibrate(seconds=seconds)
