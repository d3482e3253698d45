"""What is left of a task's parts, and of an AgentKV: how much is told, to whom, and which files stay open."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv import AgentKV, Context, Message, Request, ScriptedEngine
from agentkv.core.task import Caller
from agentkv.runtime.build import stages_for
from agentkv.runtime.carry import Carry


def test_what_many_segments_left_is_bounded() -> None:
    """The newest are told, and how many are not."""
    carry = Carry()
    for number in range(100):
        carry.add("t", f"part {number}", f"{number:04} " * 200)
    told = carry.text(Caller(task="t", branch="segment=next"))
    assert len(told) < 17_000
    assert "[From the segment 'part 99']" in told
    assert told.startswith("[85 earlier segments are not told any more]")
    carry.add("u", "large", "x" * 50_000)
    assert 50_000 < len(carry.text(Caller(task="u", branch="segment=next")))


def test_tenants_have_folders_of_their_own(tmp_path: Path) -> None:
    """Equal keys and equal words of two salts never meet; one salt finds its own again."""
    context = Context(folder=tmp_path)
    for salt, found in (("acme", None), ("globex", None), ("", None), ("acme", "told")):
        stages = stages_for(ScriptedEngine([]), context, in_memory=False, salt=salt)
        assert stages is not None
        assert found == stages.notebook.note(b"1")
        stages.notebook.put_note(b"1", "told")
        stages.notebook.close()
    assert "acme" not in str(list(tmp_path.rglob("*")))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_a_closed_agentkv_holds_no_files(tmp_path: Path) -> None:
    """Of the notes that it wrote."""
    context = Context(folder=tmp_path, volatile=(r"Day \d+",))
    messages = (Message(role="system", content="Day 3."), Message(role="user", content="go"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with AgentKV.with_engine(ScriptedEngine(["ok"]), context=context) as kv:
            kv.submit(Request(messages=messages)).result(30)
    assert len(list((tmp_path / "notes").iterdir())) >= 1
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
