"""The HTML page: whole in itself, safe with any name, the right timeline; and as a browser shows it."""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC
from html.parser import HTMLParser
from zoneinfo import ZoneInfo

import pytest

from agentkv.budget.bill import Bill
from agentkv.budget.facts import ContextFact, ModelCall, MoveFact, OutcomeFact, TaskFact, ToolCallFact
from agentkv.budget.html import MAX_ROWS, page
from agentkv.budget.svg import draw
from agentkv.budget.timeline import MAX_LANES, Timeline, timeline
from agentkv.core.usage import Timing, Usage

START_MS = 1_780_000_000_000
HOSTILE = "</title></style><script>document.documentElement.dataset.pwned='yes'</script>\"'><img src=x onerror=alert(1)>\u202e\x00"
REQUIRED = os.environ.get("AGENTKV_REQUIRE_CHROMIUM")  # where it must be there, a skip would hide that it is not
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def call(at_s=0.0, total_s=1.0, tokens=100, task="t", session="s", **more):
    timing = more.pop("timing", Timing(prefill_s=total_s / 4, decode_s=total_s / 2, total_s=total_s))
    usage = Usage(input_tokens=tokens, cached_tokens=tokens // 2, output_tokens=10, calls=1)
    return ModelCall(
        task=task, session=session, at_ms=START_MS + round(at_s * 1000), usage=usage, timing=timing, **more
    )


def tool(end_s, actual_s, task="t", session="s", **more):
    return ToolCallFact(task=task, session=session, at_ms=START_MS + round(end_s * 1000), actual_s=actual_s, **more)


def move(at_s, action, to, **more):
    return MoveFact(task="t", session="s", at_ms=START_MS + round(at_s * 1000), action=action, to=to, blocks=1, **more)


def agent(name="t"):
    """A task with two tools, a fold, a break, moves and a sub-agent; every name is `name`."""
    about = {"task": name, "session": name}
    return [
        TaskFact(task=name, at_ms=START_MS),
        call(0, task=name, session=name, node=name, model=name),
        tool(9, 8, task=name, session=name, node=name, tool=name, command=name),
        MoveFact(**about, action="demote", to="host", at_ms=START_MS + 1200, blocks=1, size_bytes=10, reason=name),
        call(9, 2, 300, task=name, session=name, node=name, branch=f"{name}:1", purpose=name, loop=name, error=name),
        ContextFact(**about, event="break", cause=name, name=name, before_tokens=5, at_ms=START_MS + 9000),
        ContextFact(**about, event="fold", cause=name, before_tokens=300, after_tokens=50, at_ms=START_MS + 10_000),
        call(12, 2, 60, task=name, session=name + "2", branch=f"{name}|{name}:2", status="failed"),
        OutcomeFact(task=name, task_type=name, completed=True, at_ms=START_MS + 14_000),
    ]


class Tags(HTMLParser):
    """Names of the tags and attributes of a page, and the text outside of tags."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else():
    """No address, no other file, and a policy that lets no script run but its own."""
    text = page(Bill.from_facts("t", agent()))
    assert [] == re.findall(r"https?:|\bsrc=|\bhref=|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "unsafe" not in text


def test_any_name_is_text_and_nothing_else():
    """Task, session, node, model, tool, branch, cause: the page has the same tags as with harmless names."""
    hostile, harmless = (Tags(page(Bill.from_facts(name, agent(name)))) for name in (HOSTILE, "t"))
    assert harmless.tags == hostile.tags
    assert harmless.attributes == hostile.attributes
    assert "<script>document" in hostile.text
    assert "\u202e" not in hostile.text


def test_a_task_name_of_four_kilobytes_is_shown_and_does_not_fill_the_title():
    """SQL, quotes and all."""
    name = ("'; DROP TABLE facts; -- " * 200)[:4096]
    text = page(Bill.from_facts(name, agent(name)))
    title = re.search("<title>(.*?)</title>", text)[1]
    assert len(title) < 120
    assert Tags(text).text.count(name) >= 1


def test_times_are_told_with_their_zone():
    """So that a reader elsewhere is not misled."""
    bill = Bill.from_facts("t", agent())
    assert "2026-05-28 20:26:40 UTC" in page(bill, zone=UTC)
    assert "2026-05-29 04:26:40 CST" in page(bill, zone=ZoneInfo("Asia/Shanghai"))


def test_an_empty_bill_is_a_page_too():
    """It says that nothing was spent."""
    assert "no such task is known" in page(Bill.from_facts("t", []))
    assert "nothing was spent" in page(Bill.from_facts("t", [TaskFact(task="t", at_ms=1)]))


def test_impossible_times_do_not_break_the_page():
    """A clock that went back, a stamp beyond the calendar, a tool that began before the task."""
    facts = [call(100), call(-50), tool(3, 500), TaskFact(task="t", at_ms=2**62)]
    assert "ms since 1970" in page(Bill.from_facts("t", [TaskFact(task="t", at_ms=-(2**60)), *facts]))


def test_a_clock_that_was_not_set_yet_does_not_stretch_the_task():
    """It says 1970, and would press all else into the last pixel; its call is on the bill, and in the table."""
    unset = replace(call(), at_ms=0)
    one = Bill.from_facts("t", [TaskFact(task="t"), unset, call(0), call(2)])
    drawn = timeline(one)
    assert one.spans.wall_s == drawn.length_ms / 1000 < 60
    assert (3, 2) == (len(one.calls), sum(len(lane.context) for lane in drawn.lanes))
    assert "1970" not in page(one)


def test_phases_lie_one_behind_the_other_and_the_rest_is_model():
    """Queue, restore, recompute, prefill, decode, in the order in which an engine goes through them."""
    timing = Timing(queued_s=1, restore_s=2, recompute_s=3, prefill_s=4, decode_s=5, total_s=16)
    bars = timeline(Bill.from_facts("t", [call(0, timing=timing), tool(20, 4)])).lanes[0].bars
    assert [
        ("queue", 0, 1000), ("restore", 1000, 3000), ("recompute", 3000, 6000), ("prefill", 6000, 10_000),
        ("decode", 10_000, 15_000), ("model", 15_000, 16_000), ("tool", 16_000, 20_000),
    ] == [(bar.kind, bar.begin_ms, bar.end_ms) for bar in bars]  # fmt: skip


def test_the_strip_follows_the_dearest_tier():
    """On the device while computing, where moves took it after that; a copy written ahead changes nothing."""
    facts = [
        call(0), move(1, "write", "host"), move(2, "demote", "host"), move(4, "demote", "disk"),
        move(5, "prefetch", "host", outcome="failed"), move(6, "prefetch", "device"), call(8, 2), move(10, "drop", ""),
        tool(12, 1),
    ]  # fmt: skip
    strip = timeline(Bill.from_facts("t", facts)).lanes[0].tiers
    assert [("device", 0), ("host", 2000), ("disk", 4000), ("device", 6000), ("lost", 10_000)] == [
        (bar.kind, bar.begin_ms) for bar in strip
    ]
    assert 12_000 == strip[-1].end_ms


def test_the_sessions_with_most_tokens_are_drawn():
    """And the page says how many are not."""
    facts = [call(number, tokens=100 + number, session=f"s{number}") for number in range(MAX_LANES + 5)]
    time = timeline(Bill.from_facts("t", facts))
    assert (MAX_LANES, 5, "s5") == (len(time.lanes), time.hidden, time.lanes[0].name)
    assert "5 smaller sessions are not drawn" in page(Bill.from_facts("t", facts))


def test_lanes_are_named_for_who_worked_there():
    """The branch, else the session; numbered sessions of the task without its name."""
    facts = [
        call(0, session="t#1"),
        call(1, session="t#2", branch="dig:1|sift:2"),
        call(2, session="own"),
        call(3, session="", node="n"),
    ]
    assert ["session 1", "dig / sift", "own", "n"] == [
        lane.name for lane in timeline(Bill.from_facts("t", facts)).lanes
    ]


def test_folds_and_breaks_stand_with_their_session_else_with_the_first():
    """Marked above the context."""
    facts = [call(0, session="a"), call(1, session="b")]
    facts += [
        ContextFact(task="t", session=s, event=e, at_ms=START_MS + 2000)
        for s, e in (("b", "break"), ("", "fold"), ("b", "slim"))
    ]
    assert [[(2000, "fold")], [(2000, "break")]] == [lane.marks for lane in timeline(Bill.from_facts("t", facts)).lanes]


@pytest.mark.parametrize(
    ("length_s", "label"),
    [(0.5, ">100 ms<"), (9, ">2 s<"), (80, ">1:10 min<"), (500, ">2 min<"), (9000, ">1:30 h<"), (80_000, ">3 h<")],
)
def test_ticks_are_round_numbers(length_s, label):
    """Of a tenth of a second to a day."""
    assert label in draw(timeline(Bill.from_facts("t", [call(0, length_s)])))


def test_a_day_of_work_is_not_larger_than_a_minute_of_it():
    """Bars too narrow to be told apart are joined, tables folded."""
    facts = [fact for n in range(3000) for fact in (call(n * 10, 0.01, session="s"), tool(n * 10 + 1, 0.5))]
    text = page(Bill.from_facts("t", facts))
    assert len(text) < 900_000
    assert f"{3000 - MAX_ROWS:,} more in between" in text


def test_the_drawing_is_well_formed():
    """Read by a strict XML parser."""
    drawn = draw(timeline(Bill.from_facts("t", agent())))
    root = ET.fromstring(drawn)
    assert {"f-tool", "f-decode", "f-failed", "f-host"} <= {one.get("class") for one in root.iter("rect")}
    assert "" == draw(Timeline(length_ms=0, lanes=[]))


@pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="no Chromium: apt-get install chromium")
class TestInChromium:
    """The page as a browser sees it."""

    def show(self, tmp_path, text, *options):
        assert CHROMIUM is not None, "AGENTKV_REQUIRE_CHROMIUM is set, but there is no chromium"
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0", *options,
            file.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, complaints

    def test_the_script_runs_and_the_browser_complains_of_nothing(self, tmp_path):
        """The page's own policy allows its style and its script."""
        dom, complaints = self.show(tmp_path, page(Bill.from_facts("t", agent())), "--dump-dom")
        assert 'data-ready="yes"' in dom
        assert [] == complaints
        assert '<svg viewBox="0 0 1080' in dom

    def test_hostile_names_run_nothing(self, tmp_path):
        """Neither as script nor as an attribute; the page's own script still runs."""
        dom, complaints = self.show(tmp_path, page(Bill.from_facts(HOSTILE, agent(HOSTILE))), "--dump-dom")
        assert 'data-ready="yes"' in dom
        assert "data-pwned" not in dom
        assert [] == complaints

    def test_a_script_that_got_in_would_not_run(self, tmp_path):
        """The policy is a second wall: it names the page's own script by its digest."""
        text = page(Bill.from_facts("t", agent())).replace(
            "<footer", "<script>document.documentElement.dataset.pwned='yes'</script><footer"
        )
        dom, complaints = self.show(tmp_path, text, "--dump-dom")
        assert "data-pwned" not in dom
        assert complaints

    def test_a_click_on_a_head_sorts_the_table_and_another_turns_it_round(self, tmp_path):
        """By numbers where there are numbers: 900 before 1,000."""
        text = page(
            Bill.from_facts(
                "t", [call(n, tokens=tokens, node=f"n{tokens}") for n, tokens in enumerate((1000, 900, 2000))]
            )
        )
        text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        for clicks, expected in ((1, ["n900", "n1000", "n2000"]), (2, ["n2000", "n1000", "n900"])):
            click = "<script>for (let i = 0; i < %d; i++) [...document.querySelectorAll('th')].filter(h => h.textContent == 'input').at(-1).click()</script>"
            dom, _ = self.show(tmp_path, text.replace("</body>", click % clicks + "</body>"), "--dump-dom")
            table = dom[dom.index("Model calls</h2>") :]
            assert expected == re.findall(r'class="left">(n\d+)<', table[: table.index("</table>")])

    def test_it_can_be_seen_and_printed(self, tmp_path):
        """A picture with colours in it, and a PDF."""
        text = page(Bill.from_facts("t", agent()))
        picture, paper = tmp_path / "page.png", tmp_path / "page.pdf"
        self.show(tmp_path, text, f"--screenshot={picture}", "--window-size=1200,1600")
        self.show(tmp_path, text, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert len(picture.read_bytes()) > 30_000
        assert paper.read_bytes().startswith(b"%PDF")
