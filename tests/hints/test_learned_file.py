"""The forecaster's file: it survives restarts, is shared by processes, and is never an agent's problem."""

import json
import multiprocessing
import stat

import pytest

from agentkv import log
from agentkv.hints.forecaster import Forecaster
from agentkv.runtime.learned import SAVE_EVERY_S, Learned, default_path


def calls(learned, tool="frob"):
    forecast = learned.forecaster.forecast(tool)
    return forecast.n if forecast.source == "history" else 0


def told(path, times=3, tool="frob"):
    learned = Learned(path)
    for _ in range(times):
        learned.forecaster.learn(tool, "", 5.0)
    return learned


def aside(path):
    return sorted(path.parent.glob(f"{path.name}.aside-*"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "forecasts.json"


def test_what_was_learnt_is_there_after_a_restart(path):
    """Close and open again."""
    told(path).close()
    again = Learned(path)
    assert 3 == calls(again)
    again.close()
    assert 3 == calls(Learned(path))


def test_the_file_is_the_users_alone_and_nothing_is_left_beside_it(path):
    """It holds names of commands; half-written files are gone."""
    told(path).close()
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert {path.name, f".{path.name}.lock"} == {p.name for p in path.parent.iterdir()}


def test_two_that_were_open_at_the_same_time_add_up(path):
    """Each adds only its own calls to what is there, and goes on with the sum."""
    told(path, 2).close()
    one, other = told(path, 3), told(path, 4)
    one.save()
    other.save()
    assert 9 == calls(other)
    one.forecaster.learn("frob", "", 5.0)
    one.save()
    assert 10 == calls(one)
    one.close()
    other.close()
    assert 10 == calls(Learned(path))


def _one_process(path):
    learned = Learned(path)
    for _ in range(20):
        learned.forecaster.learn("frob", "", 5.0)
        learned.save()
    learned.close()


def test_processes_that_save_all_the_time_lose_nothing(path):
    """Three processes, twenty saves each."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_one_process, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert 0 == process.exitcode
    assert 60 == calls(Learned(path))


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b'{"v": "agentkv.forecaster/2", "keys": [', b"\xff\xfe\x00", b"[]", b"7", b"[" * 100_000,
     b'{"v": "agentkv.forecaster/1", "calls": []}', b'{"v": "agentkv.forecaster/3", "keys": []}'],
)  # fmt: skip
def test_a_damaged_file_or_one_of_another_version_is_kept_aside(path, damage):
    """Learning starts afresh, the old bytes are still there, and it is counted."""
    told(path).close()
    path.write_bytes(damage)
    before = log.counters["forecasts_unreadable"]
    learned = Learned(path)
    assert 0 == calls(learned)
    assert before + 1 == log.counters["forecasts_unreadable"]
    assert [damage] == [p.read_bytes() for p in aside(path)]
    learned.forecaster.learn("frob", "", 5.0)
    learned.close()
    assert 1 == calls(Learned(path))


def test_a_file_that_is_damaged_meanwhile_costs_nothing_of_what_is_in_memory(path):
    """The next save writes all that this process knows."""
    learned = told(path, 3)
    learned.save()
    path.write_bytes(b"garbage")
    learned.forecaster.learn("frob", "", 5.0)
    assert learned.save()
    assert 4 == calls(Learned(path))


def test_a_cut_in_the_middle_of_the_file_is_noticed(path):
    """Any prefix of the file is no state."""
    told(path).close()
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert 0 == calls(Learned(path))


def test_a_row_that_cannot_be_is_left_out(path):
    """The others are used."""
    told(path).close()
    state = json.loads(path.read_text())
    state["keys"].append([["tool", "x"], -3, [1], [1]])
    path.write_text(json.dumps(state))
    assert 3 == calls(Learned(path))
    assert [] == aside(path)


def test_a_place_that_does_not_work_costs_a_line_and_not_the_agent(tmp_path):
    """A folder where the file should be, and a file where the folder should be."""
    (tmp_path / "forecasts.json").mkdir()
    blocked = Learned(tmp_path / "forecasts.json")
    blocked.forecaster.learn("frob", "", 5.0)
    assert not blocked.save()
    (tmp_path / "file").write_text("x")
    lost = Learned(tmp_path / "file" / "forecasts.json")
    lost.forecaster.learn("frob", "", 5.0)
    assert not lost.save()
    lost.close()


def test_calls_that_could_not_be_saved_are_saved_the_next_time(path):
    """The folder turns up later."""
    path.parent.write_text("in the way")
    learned = Learned(None)
    learned._path = path
    learned.forecaster.learn("frob", "", 5.0)
    assert not learned.save()
    path.parent.unlink()
    assert learned.save()
    assert 1 == calls(Learned(path))


def test_it_is_saved_every_few_minutes(path):
    """On a side thread, and only when it is due."""
    learned = told(path)
    learned.save_if_due(SAVE_EVERY_S - 1)
    assert not path.exists()
    learned.save_if_due(SAVE_EVERY_S)
    learned.close()
    assert 3 == calls(Learned(path))


def test_nothing_new_writes_nothing(path):
    """An agent that ran no tool does not touch the file."""
    told(path).close()
    before = path.stat().st_mtime_ns
    Learned(path).close()
    assert before == path.stat().st_mtime_ns
    Learned(path.with_name("other.json")).close()
    assert not path.with_name("other.json").exists()


def test_without_a_place_everything_stays_in_memory():
    """As with ledger="memory"."""
    learned = told(None)
    learned.save_if_due(1e9)
    learned.close()
    assert 3 == calls(learned)


def test_a_full_forecaster_is_saved_and_read_in_a_moment(path):
    """4096 keys: the file stays below 2 KB for each."""
    learned = Learned(path)
    for i in range(5000):
        learned.forecaster.learn("bash", f"c{i}", 1.0 + i)
    learned.close()
    assert path.stat().st_size < 4096 * 2048
    assert 4096 == len(Learned(path).forecaster.to_json()["keys"])


def test_the_place_is_the_users_data_folder(monkeypatch, tmp_path):
    """AGENTKV_DATA, else what the platform says."""
    monkeypatch.setenv("AGENTKV_DATA", str(tmp_path))
    assert tmp_path / "forecasts.json" == default_path()
    monkeypatch.delenv("AGENTKV_DATA")
    assert "forecasts.json" == default_path().name
    assert isinstance(Learned(None).forecaster, Forecaster)
