"""The store of whole outputs: handles, bounded answers, quota, age, files, other processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentkv.clock import ManualClock
from agentkv.context.outputs import ANSWER_CHARS, Outputs, reader
from agentkv.errors import ConfigError, DiskUnavailable

TEXT = "\n".join(f"line {number}" for number in range(1, 1001))


@pytest.fixture(params=["memory", "folder"])
def outputs(request, tmp_path):
    return Outputs(None if request.param == "memory" else tmp_path / "outputs")


def test_what_is_put_is_read_again_by_its_lines(outputs):
    """The numbers are those of the text as it was put."""
    handle = outputs.put(TEXT)
    assert "40: line 40\n41: line 41" == outputs.read(handle, lines="40-41")
    assert "7: line 7" == outputs.read(handle, lines="7")
    assert outputs.read(handle, lines="999-") == "999: line 999\n1000: line 1000"
    assert outputs.read(handle, lines="-2") == "1: line 1\n2: line 2"


def test_a_pattern_finds_lines_whatever_the_case(outputs):
    """Alternatives and gaps are understood; nothing else of a regular expression is."""
    handle = outputs.put("alpha\nERROR in beta.py: 3\ngamma (x)\n")
    assert outputs.read(handle, pattern="error").endswith("2: ERROR in beta.py: 3")
    assert outputs.read(handle, pattern=r"beta\.py|gamma").endswith("2: ERROR in beta.py: 3\n3: gamma (x)")
    assert outputs.read(handle, pattern="error.*3").endswith("2: ERROR in beta.py: 3")
    assert outputs.read(handle, pattern="gamma (").endswith("3: gamma (x)")
    assert "No line of 1-3 contains" in outputs.read(handle, pattern="(a+)+$")


def test_an_answer_is_bounded_and_says_how_to_go_on(outputs):
    """Whatever is asked for."""
    handle = outputs.put("x" * 900 + "\n" + TEXT * 20)
    for answer in (outputs.read(handle), outputs.read(handle, lines="1-"), outputs.read(handle, pattern="line")):
        assert len(answer) <= ANSWER_CHARS + 200
        assert "go on with lines=" in answer


@pytest.mark.parametrize(
    ("handle", "lines", "words"),
    [
        ("k222222222222", "", "not kept any more"),
        ("../../etc/passwd", "", "No output has the handle"),
        (".key", "", "No output has the handle"),
        ("", "", "No output has the handle"),
        (None, "5-1", "2: line 2"),
        (None, "nonsense", "is no range"),
        (None, "5000-6000", "There are only 1000 lines"),
        (None, "0", "1: line 1"),
        (None, "99999999999999999999", "is no range"),
    ],
)
def test_what_was_asked_wrongly_is_told_in_words(outputs, handle, lines, words):
    """A model that mistypes gets an answer that it can act on, never an exception."""
    assert words in outputs.read(handle if handle is not None else outputs.put(TEXT), lines=lines)


def test_a_long_line_is_read_in_pieces_and_long_json_item_by_item(outputs):
    """One line of a megabyte can be read too."""
    handle = outputs.put("a" * 2500 + "b")
    assert "3: " + "a" * 500 + "b" == outputs.read(handle, lines="3")
    handle = outputs.put("[" + ",".join(f'{{"id":{number}}}' for number in range(500)) + "]")
    assert '3:   "id": 0' == outputs.read(handle, lines="3")


def test_the_same_text_has_one_handle_and_another_text_another(outputs):
    """Handles come from content; no two texts share one, empty tool call ids or not."""
    assert outputs.put("one") == outputs.put("one")
    handles = {outputs.put(f"result {number}") for number in range(200)}
    assert 200 == len(handles)


def test_parallel_results_never_share_a_slot(outputs):
    """Each of many threads reads back its own text."""
    wrong = []

    def work(number):
        text = f"output of call '' in thread {number}"
        handle = outputs.put(text)
        if outputs.raw(handle) != text:
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    outputs.check()


def test_handles_of_one_folder_are_not_those_of_another(tmp_path):
    """Who knows a text cannot guess its handle elsewhere; the same folder gives the same handle after a restart."""
    first, second = Outputs(tmp_path / "a"), Outputs(tmp_path / "b")
    assert first.handle(TEXT) != second.handle(TEXT)
    handle = first.put(TEXT)
    assert "1: line 1" == Outputs(tmp_path / "a").read(handle, lines="1")
    assert handle == Outputs(tmp_path / "a").handle(TEXT)


def test_in_memory_the_same_text_has_the_same_handle_in_every_process():
    """So a prompt is the same bytes after a restart even where outputs are not kept."""
    code = "from agentkv.context.outputs import Outputs; print(Outputs().put('some text'))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert Outputs().handle("some text") == done.stdout.strip()


def test_files_are_the_owners_alone(tmp_path):
    """Outputs are prompt content: folder 0700, files 0600, nothing left aside."""
    outputs = Outputs(tmp_path / "o")
    outputs.put(TEXT)
    assert 0o700 == stat.S_IMODE((tmp_path / "o").stat().st_mode)
    files = list((tmp_path / "o").iterdir())
    assert 2 == len(files)
    assert {0o600} == {stat.S_IMODE(file.stat().st_mode) for file in files}


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_the_oldest_go_first_beyond_the_quota(tmp_path, kind):
    """What was put or put again last stays."""
    clock = ManualClock(wall_ms=1_000_000)
    outputs = Outputs(None if kind == "memory" else tmp_path / "o", quota_bytes=1_000, clock=clock)
    handles = []
    for number in range(10):
        clock.advance(1)
        handles.append(outputs.put(f"{number}" * 150))
        outputs.check()
    assert "not kept any more" in outputs.read(handles[0])
    assert outputs.read(handles[-1]).startswith("1: 999")


def test_a_text_larger_than_the_quota_is_not_kept_and_puts_nothing_out(outputs):
    """One huge output does not empty the store."""
    small = Outputs(quota_bytes=500)
    handle = small.put("small")
    huge = small.put("x" * 501)
    assert "1: small" == small.read(handle)
    assert "not kept any more" in small.read(huge)
    assert Outputs(quota_bytes=0).put("a")


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_is_too_old_goes_at_the_next_sweep(tmp_path, kind):
    """Retention; putting an output again makes it young."""
    clock = ManualClock(wall_ms=1_000_000)
    outputs = Outputs(None if kind == "memory" else tmp_path / "o", keep_s=10, clock=clock)
    old, again = outputs.put("old"), outputs.put("again")
    clock.advance(8)
    outputs.put("again")
    clock.advance(5)
    outputs.sweep()
    assert "not kept any more" in outputs.read(old)
    assert "1: again" == outputs.read(again)
    outputs.check()


def test_a_small_text_is_remembered_under_a_key_of_the_callers(outputs):
    """Also the empty one, which says that there is nothing."""
    assert outputs.recall("k") is None
    outputs.remember("k", "")
    assert "" == outputs.recall("k")


def test_a_damaged_key_makes_old_handles_unreadable_and_nothing_worse(tmp_path):
    """The store goes on with a new key."""
    handle = Outputs(tmp_path).put("one")
    (tmp_path / ".key").write_bytes(b"short")
    outputs = Outputs(tmp_path)
    assert handle != outputs.handle("one")
    assert "1: two" == outputs.read(outputs.put("two"))


def test_a_full_disk_gives_a_handle_and_a_clear_answer(tmp_path, monkeypatch):
    """Keeping is best effort: the handle is the same bytes, reading says that it is gone."""
    outputs = Outputs(tmp_path)
    expected = outputs.handle("text")

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentkv.context.outputs.os.open", full)
    assert expected == outputs.put("text")
    assert "not kept any more" in outputs.read(expected)


def test_impossible_options_raise(tmp_path):
    """Misuse is told when the store is made."""
    with pytest.raises(ConfigError):
        Outputs(quota_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable):
        Outputs(tmp_path / "file")


def test_the_tool_is_a_plain_function_that_a_model_understands():
    """Its name, its arguments and what they mean stand in it."""
    outputs = Outputs()
    tool = reader(outputs)
    assert "read_output" == tool.__name__
    assert "2: b" == tool(outputs.put("a\nb"), lines="2")
    for word in ("handle", "lines", "pattern", "[agentkv: "):
        assert word in tool.__doc__


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=())),
    lines=st.text(max_size=12),
    pattern=st.text(max_size=12),
    handle=st.text(max_size=14),
)
def test_no_text_handle_range_or_pattern_raises(text, lines, pattern, handle):
    """Lone surrogates, NUL and every script are kept as they came."""
    outputs = Outputs()
    kept = outputs.put(text)
    assert text == outputs.raw(kept)
    outputs.read(kept, lines, pattern)
    outputs.read(handle, lines, pattern)
    outputs.check()


class Store(RuleBasedStateMachine):
    """Puts, answers, time and restarts in any order, against a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(wall_ms=1_000_000)
        self.made = tempfile.TemporaryDirectory()
        self.outputs = self.opened()
        self.put_s: dict[str, float] = {}
        self.texts: dict[str, str] = {}

    def opened(self) -> Outputs:
        return Outputs(Path(self.made.name) / "o", quota_bytes=600, keep_s=50, clock=self.clock)

    @rule(text=st.text(st.characters(exclude_categories=()), max_size=300))
    def put(self, text):
        self.clock.advance(1)
        handle = self.outputs.put(text)
        self.put_s[handle], self.texts[handle] = self.clock.now_s(), text
        fits = len(text.encode("utf-8", "surrogatepass")) <= 600
        assert (text if fits else None) == self.outputs.raw(handle)

    @rule(key=st.text(max_size=3), text=st.text(max_size=20))
    def remember(self, key, text):
        self.clock.advance(1)
        self.outputs.remember(key, text)
        assert self.outputs.recall(key) is not None

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds):
        self.clock.advance(seconds)
        self.outputs.sweep()
        for handle, put_s in self.put_s.items():
            if self.clock.now_s() - put_s > 50:
                assert self.outputs.raw(handle) is None

    @rule()
    def restart(self):
        before = {handle: self.outputs.raw(handle) for handle in self.texts}
        self.outputs.sweep()
        after_sweep = {handle: self.outputs.raw(handle) for handle in self.texts}
        self.outputs = self.opened()
        assert after_sweep == {handle: self.outputs.raw(handle) for handle in self.texts}
        assert all(before[handle] is not None for handle in after_sweep if after_sweep[handle] is not None)

    @invariant()
    def sums_are_right_and_nobody_reads_anothers_text(self):
        self.outputs.check()
        for handle, text in self.texts.items():
            assert self.outputs.raw(handle) in (None, text)

    def teardown(self) -> None:
        self.made.cleanup()


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
