"""`agentkv calibrate`: the real model end to end, and what is said of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv.cli import app, plot
from agentkv.cli.calibrate import crossing_table, sentences, to_json
from agentkv.core.rates import Prefill, Rates
from agentkv.errors import ConfigError, ExtraMissing
from agentkv.policy.cost import crossover, table_lengths
from agentkv.runtime import calibration
from agentkv.runtime.calibration import Calibration
from agentkv.runtime.machine import Place
from agentkv.runtime.ratefiles import load_rates, rates_folder

GB = 1e9
TOKEN_BYTES = 131_072
PLACE = Place(
    machine="m",
    cpu="Some CPU",
    cores=2,
    device="cpu",
    fingerprint="ab",
    model="some-model",
    token_bytes=TOKEN_BYTES,
    context_tokens=131_072,
    mount="/ (x)",
)


def rates(**changed):
    disk = {"read_bytes_s": 2 * GB, "write_bytes_s": 1 * GB}
    prefill = Prefill(quadratic_s=1e-9, linear_s=5e-5, constant_s=0.001)
    return Rates(
        **{"memcpy_bytes_s": 10 * GB, "h2d_bytes_s": 20 * GB, "d2h_bytes_s": 20 * GB, "prefill": prefill}
        | disk
        | changed
    )


def found(**changed):
    return Calibration(place=PLACE, rates=rates(**changed), disk_off="")


@pytest.fixture
def measured(monkeypatch):
    """The command with a measurement that takes no time; what it was asked for is noted."""
    asked = []

    def measure(model, **options):
        asked.append((model, options))
        options["progress"]("measuring")
        return found()

    monkeypatch.setattr(calibration, "calibrate", measure)
    return asked


def run(*argv):
    return CliRunner().invoke(app, ["calibrate", *argv])


def test_options_reach_the_measurement(measured, tmp_path):
    """Model, device, folder and time."""
    run("--model", "a", "--device", "cpu", "--disk", str(tmp_path), "--seconds", "3")
    ((model, options),) = measured
    options.pop("progress")
    assert ("a", {"device": "cpu", "disk": tmp_path, "seconds": 3.0}) == (model, options)


@pytest.mark.parametrize(("argv", "folder"), [((), True), (("--disk", "none"), False)])
def test_the_disk_is_the_cache_folders_unless_told_otherwise(measured, argv, folder):
    """`none` leaves the disk out."""
    run(*argv)
    assert (rates_folder() / "probe" if folder else None) == measured[0][1]["disk"]


def test_the_result_is_saved_and_said_where(measured):
    """The engine finds it at its next start."""
    shown = run()
    assert 0 == shown.exit_code
    assert rates() == load_rates(PLACE)
    assert str(rates_folder()) in shown.stdout


def test_standard_output_has_the_json_object_only(measured):
    """Progress goes to standard error."""
    told = json.loads(run("--json").stdout)
    assert [512, 1024, 2048, 4096, 8192, 16_384, 32_768] == [row["tokens"] for row in told["crossover"]]
    assert {"host", "disk"} == set(told["break_even_tokens"])
    assert Path(told["saved"]).is_file()
    assert (TOKEN_BYTES, "some-model") == (told["model"]["bytes_per_token"], told["model"]["name"])


def test_the_table_says_who_wins_from_which_length():
    """A disk that loses to recompute at short lengths, and wins at long ones."""
    crossing = crossover(rates(), TOKEN_BYTES, table_lengths(32_768))
    assert "recompute" not in {row.winner for row in crossing.rows}
    host, disk = sentences(crossing, disk_off="")
    assert "Recompute loses to the host tier at every length." == host
    assert f"Recompute loses to the disk tier from {math.ceil(crossing.disk_tokens)} tokens on." == disk
    assert 7 == crossing_table(crossing).row_count


def test_a_restore_that_never_pays_and_a_disk_that_is_off_are_said():
    """In words, and as null."""
    slow = found(h2d_bytes_s=1e6, read_bytes_s=None, write_bytes_s=None, prefill=Prefill(linear_s=1e-5))
    crossing = crossover(slow.rates, TOKEN_BYTES, (512,))
    assert [
        "Recompute loses to the host tier at no length.",
        "Disk tier off: no folder was given.",
    ] == sentences(crossing, disk_off="no folder was given")
    told = to_json(slow, crossing, saved=None, plot=None)
    assert {"host": None, "disk": None} == told["break_even_tokens"]
    assert ("recompute", None) == (told["crossover"][0]["winner"], told["crossover"][0]["disk_s"])
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_plot_is_drawn_in_the_format_of_its_name(measured, tmp_path, suffix, magic):
    """PNG or SVG."""
    path = tmp_path / f"crossing{suffix}"
    assert 0 == run("--plot", str(path)).exit_code
    assert path.read_bytes().startswith(magic)


def test_the_plot_has_no_disk_line_without_a_disk(tmp_path):
    """And marks the break-even length where it lies within the table."""
    path = tmp_path / "a.svg"
    plot.draw(path, crossover(rates(), TOKEN_BYTES, table_lengths(32_768)), title="with")
    assert path.stat().st_size > 10_000
    plot.draw(path, crossover(rates(read_bytes_s=None, write_bytes_s=None), TOKEN_BYTES, (512, 1024)), title="without")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(("name", "words"), [("a.pdf", "png or .svg"), ("no/folder/a.png", "no folder")])
def test_a_plot_that_cannot_be_drawn_is_refused_before_measuring(measured, tmp_path, name, words):
    """Not after minutes."""
    ended = run("--plot", str(tmp_path / name))
    assert isinstance(ended.exception, ConfigError)
    assert words in str(ended.exception)
    assert [] == measured


def test_without_matplotlib_the_error_names_the_extra(measured, tmp_path, monkeypatch):
    """Before measuring, too."""
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _name: None)
    ended = run("--plot", str(tmp_path / "a.png"))
    assert isinstance(ended.exception, ExtraMissing)
    assert "agentkv-sdk[plot]" in str(ended.exception)
    assert [] == measured


def test_an_interrupt_saves_nothing_and_says_so(monkeypatch):
    """Exit code 130, one line."""

    def interrupted(model, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate", interrupted)
    ended = run()
    assert 130 == ended.exit_code
    assert "nothing was saved" in ended.stderr
    assert not rates_folder().exists()


def agentkv(*argv, **options):
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.Popen(
        [sys.executable, "-m", "agentkv.cli", "calibrate", *argv],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.slow
@pytest.mark.weights
def test_the_real_model_on_this_machine(tmp_path):
    """End to end: rates, table, plot and cache; the disk folder is gone again."""
    out, disk = tmp_path / "crossing.svg", tmp_path / "new" / "disk"
    with agentkv("--json", "--plot", str(out), "--disk", str(disk), "--seconds", "2") as process:
        stdout, stderr = process.communicate(timeout=200)
    assert 0 == process.returncode, stderr
    told = json.loads(stdout)
    assert [512, 1024, 2048, 4096, 8192] == [row["tokens"] for row in told["crossover"]]
    assert 23_040 == told["model"]["bytes_per_token"]
    times = [row["recompute_s"] for row in told["crossover"]]
    assert times == sorted(times)
    assert all(told["rates"][name] > 1e6 for name in ("memcpy_bytes_s", "h2d_bytes_s", "d2h_bytes_s", "read_bytes_s"))
    assert out.read_bytes().startswith(b"<?xml")
    assert not disk.parent.exists()
    assert told["saved"] in [str(path) for path in rates_folder().iterdir()]


@pytest.mark.slow
@pytest.mark.weights
def test_ctrl_c_in_the_real_measurement_leaves_nothing(tmp_path):
    """Neither disk files nor a calibration."""
    disk = tmp_path / "disk"
    with agentkv("--disk", str(disk), "--seconds", "20") as process:
        end_s = time.monotonic() + 60
        while not disk.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        assert disk.exists()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    assert 130 == process.returncode, stderr
    assert "nothing was saved" in stderr
    assert not disk.exists()
    assert not rates_folder().exists()
