"""The program as it is put together, and `agentkv doctor`."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from agentkv import cli
from agentkv.cli import COMMANDS, app, doctor, main
from agentkv.core.rates import Prefill, Rates
from agentkv.runtime.machine import Place, machine_digest
from agentkv.runtime.ratefiles import save_rates

RATES = Rates(memcpy_bytes_s=1e9, h2d_bytes_s=1e9, d2h_bytes_s=1e9, prefill=Prefill(linear_s=1e-3), measured_at=1.0)
PLACE = Place(
    machine=machine_digest(),
    cpu="c",
    cores=1,
    device="cpu",
    fingerprint="ab",
    model="some-model",
    token_bytes=1,
    context_tokens=1,
)


def run(*argv):
    return CliRunner().invoke(app, list(argv))


def test_every_command_registers_itself_once():
    """A module of the list has `register`, and its command is known by its file's name."""
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        groups = [group.name for group in app.registered_groups]
        assert 1 == [*names, *groups].count(name)


def test_our_errors_end_the_program_with_one_sentence(monkeypatch, capsys):
    """No traceback, exit code 1."""
    monkeypatch.setattr(cli, "_register_outside_commands", lambda: None)
    monkeypatch.setattr("sys.argv", ["agentkv", "calibrate", "--plot", "crossing.pdf"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (1, "") == (ended.value.code, shown.out)
    assert re.fullmatch(r"agentkv: --plot crossing\.pdf: .*\n", shown.err)


def test_doctor_says_that_nothing_was_calibrated_and_how_to():
    """And how blocks would be copied here."""
    told = json.loads(run("doctor", "--json").stdout)["Tiers"]
    assert {"copy path", "disk tier", "calibration"} == set(told)
    assert "agentkv calibrate" in told["calibration"]
    assert told["disk tier"].startswith("off: no folder was given")


def test_doctor_lists_the_calibrations_of_this_machine():
    """One row a model, with every disk that was measured for it."""
    save_rates(PLACE, RATES)
    save_rates(replace(PLACE, mount="/data (xfs on y)"), replace(RATES, samples=3))
    save_rates(replace(PLACE, machine="another", model="foreign"), RATES)
    told = json.loads(run("doctor", "--json").stdout)["Tiers"]
    assert re.search(r"cpu, no disk, .* ago, 1 run\b", told["calibration of some-model"])
    assert re.search(r"cpu, /data \(xfs on y\), .* ago, 3 runs", told["calibration of some-model"])
    assert not any("foreign" in name for name in told)


def test_doctor_tries_the_folder_of_the_disk_tier_and_leaves_nothing(tmp_path):
    """A folder that is not there yet is made and removed."""
    told = json.loads(run("doctor", "--json", "--disk", str(tmp_path / "new" / "disk")).stdout)["Tiers"]
    assert told["disk tier"].startswith("works: ")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", ["file/below", "file"])
def test_doctor_says_why_the_disk_tier_is_off(tmp_path, bad):
    """A path below a regular file, and the file itself."""
    (tmp_path / "file").touch()
    told = json.loads(run("doctor", "--json", "--disk", str(tmp_path / bad)).stdout)["Tiers"]
    assert re.match(r"off: .*(Not a directory|File exists)", told["disk tier"])


@pytest.mark.parametrize(
    ("device", "why_not", "words"),
    [
        (None, "", "not installed"),
        ("cpu", "", "memmove"),
        ("cuda:0 (A GPU)", "", "batches of blocks"),
        ("cuda:0 (A GPU)", "no cuda-bindings", "one copy for each run of blocks: no cuda-bindings"),
    ],
)
def test_doctor_names_the_copy_path(monkeypatch, device, why_not, words):
    """By the device that would be used; on CUDA with the reason why copies are not batched."""
    from agentkv.kv.streams import batch

    monkeypatch.setattr(batch, "available", lambda: why_not)
    monkeypatch.setattr(doctor, "_would_use", lambda: {} if device is None else {"device": device})
    assert words in json.loads(run("doctor", "--json").stdout)["Tiers"]["copy path"]


def test_doctor_prints_the_same_for_people():
    """In tables."""
    shown = run("doctor").stdout
    assert all(title in shown for title in ("Packages", "Machine", "Would be used", "Tiers", "copy path"))
