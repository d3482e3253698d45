"""The rules one by one: what each keeps, what it leaves out, and what it leaves alone."""

from __future__ import annotations

import json

import pytest

from agentkv.context.outputs import Outputs
from agentkv.context.slim import Slimmer
from agentkv.context.slim.alarm import is_alarm, mask
from agentkv.context.slim.clean import clean
from agentkv.context.tokens import estimate


def slim(text: str, *, tool: str = "bash", command: str = "", **options):
    return Slimmer(**{"outputs": Outputs(), "count": estimate, **options}).slim(text, tool=tool, command=command)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR: no such column", "java.lang.NullPointerException: x", "E   assert 1 == 2", "make: *** [all] Error 2", "npm ERR! code E404",
        "panic: runtime error", "fatal: not a git repository", "Segmentation fault (core dumped)", "2 failed, 3 passed", "✗ it works",
        "permission denied", "connection timed out", "foo.errors.ParseError: bad", "0 errors, 3 failures",
    ],
)  # fmt: skip
def test_this_line_tells_of_a_failure(line):
    """In every tool's words."""
    assert is_alarm(line)


@pytest.mark.parametrize(
    "line",
    [
        "0 errors",
        "no failures",
        "src/errors.py",
        "test_error_handling PASSED",
        "copied fail-safe.txt",
        "error_count = 3",
        "all is well",
    ],
)
def test_this_line_does_not(line):
    """The word alone, in a name or with a zero, is no failure."""
    assert not is_alarm(line)


def test_lines_that_differ_in_numbers_have_one_mask():
    """Also hexadecimal ones, times, and bars."""
    assert mask("10:00:01 wrote 0xdeadbeef [####----] 12.5%") == mask("10:00:02 wrote 0x1234 [######--] 50%")
    assert mask("wrote a") != mask("wrote b")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("10%\r20%\r100%\ndone\r\n", "100%\ndone"),
        ("long text\rshort", "shorttext"),
        ("long text\r\x1b[Kshort", "short"),
        ("a\rERROR: broke\rb", "ERROR: broke\nbRROR: broke"),
        ("one\n\x1b[1A\x1b[2Ktwo", "two"),
        ("error: lost\n\x1b[1A\x1b[2Ktwo", "error: lost\ntwo"),
        ("b\bbold", "bold"),
        ("a\x00b\x07", "ab"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]0;never closed", "0;never closed"),
        ("blanks   \n\n\n", "blanks"),
        ('{\r"a": 1}', '{\n"a": 1}'),
    ],
)
def test_a_text_is_what_a_terminal_would_finally_show(raw, shown):
    """And whatever told of a failure before it was drawn over."""
    assert shown == clean(raw)


PYTEST = """============================= test session starts ==============================
platform linux -- Python 3.11.7, pytest-9.0.0
rootdir: /srv
collected 4 items

tests/test_a.py::test_one PASSED                                         [ 25%]
tests/test_a.py::test_two FAILED                                         [ 50%]
tests/test_a.py::TestB::test_three FAILED                                [ 75%]
tests/test_a.py::test_four PASSED                                        [100%]

=================================== FAILURES ===================================
___________________________________ test_two ___________________________________

    def test_two():
        value = 1
>       assert value == 2
E       assert 1 == 2

tests/test_a.py:7: AssertionError
------------------------------ Captured stdout call -----------------------------
the printed words
_______________________________ TestB.test_three _______________________________

self = <test_a.TestB object at 0x7f>

    def test_three(self):
>       raise KeyError("x")
E       KeyError: 'x'

tests/test_a.py:12: KeyError
=========================== short test summary info ============================
FAILED tests/test_a.py::test_two - assert 1 == 2
FAILED tests/test_a.py::TestB::test_three - KeyError: 'x'
========================= 2 failed, 2 passed in 0.12s ==========================
"""


def test_a_pytest_run_keeps_failures_with_their_reasons_and_counts():
    """Passed tests are the runner's own count; each failing test stands above its reason, once."""
    lines = slim(PYTEST, command="pytest -v").text.split("\n")
    assert [
        "FAILED tests/test_a.py::test_two", "> assert value == 2", "E assert 1 == 2", "tests/test_a.py:7: AssertionError",
        "-- Captured stdout call", "the printed words",
        "FAILED tests/test_a.py::TestB::test_three", '> raise KeyError("x")', "E KeyError: 'x'", "tests/test_a.py:12: KeyError",
        "== 2 failed, 2 passed in 0.12s",
    ] == lines[1:-1]  # fmt: skip
    assert "collected 4 items" == lines[0]
    assert lines[-1].startswith("[agentkv: ")


def test_a_run_that_was_stopped_keeps_the_failures_it_told_of():
    """Without a short summary the progress lines are all there is."""
    text = (
        PYTEST.split("=================================== FAILURES", maxsplit=1)[0]
        + "\n".join(f"noise {n}" for n in range(99))
        + "\nTerminated"
    )
    once = slim(text, command="pytest -v", max_tokens=300)
    assert "tests/test_a.py::test_two FAILED" in once.text
    assert "tests/test_a.py::test_one PASSED" not in once.text


def test_a_green_run_is_its_count():
    """Nothing else is worth a token."""
    green = "".join(f"tests/test_a.py::test_{n} PASSED [{n}%]\n" for n in range(99))
    text = f"=== test session starts ===\n{green}\n=== 99 passed in 1.20s ===\n"
    assert "== 99 passed in 1.20s" == slim(text).text.split("\n")[0]


@pytest.mark.parametrize(
    ("passing", "rest"),
    [
        ("test_a{n} (checks.Checks.test_a{n}) ... ok", "FAILED (failures=1)"),
        ("test orders::part_{n} ... ok", "test result: FAILED. 60 passed; 1 failed"),
        ("=== RUN   TestPart{n}\n--- PASS: TestPart{n} (0.00s)", "--- FAIL: TestOther (0.01s)"),
        ("  ✓ adds part {n} (3 ms)", "Tests: 1 failed, 60 passed, 61 total"),
        ("ok 12 - part {n}", "not ok 61 - other"),
        ("[ RUN      ] Part.{n}\n[       OK ] Part.{n} (0 ms)", "[  FAILED  ] Other.it (1 ms)"),
    ],
)
def test_other_runners_lose_their_passing_lines_too(passing, rest):
    """unittest, cargo, go, jest, TAP, googletest."""
    text = "\n".join([*(passing.format(n=chr(97 + n % 26) + chr(97 + n // 26)) for n in range(60)), rest])
    once = slim(text)
    assert "tests" == once.rule
    assert rest in once.text
    assert once.kept_tokens * 5 < once.raw_tokens


def test_a_build_keeps_each_finding_once_with_its_place():
    """Commands, frames of warnings and repeats from a header go; errors keep their line of source."""
    one = "gcc -Wall -c {n}.c\nIn file included from {n}.c:1:\ncommon.h:3:12: warning: 'spare' defined but not used\n    3 | static int spare;\n      |            ^~~~~\n"
    text = "".join(one.format(n=n) for n in range(30))
    text += "7.c: In function 'work':\n7.c:9:5: error: 'missing' undeclared\n    9 |     missing();\n      |     ^~~~~~~\nmake: *** [Makefile:7: 7.o] Error 1\n"
    expected = [
        "common.h:3:12: warning: 'spare' defined but not used", "7.c:9:5: error: 'missing' undeclared", "    9 |     missing();",
        "make: *** [Makefile:7: 7.o] Error 1",
    ]  # fmt: skip
    assert expected == slim(text, command="make").text.split("\n")[:-1]


def test_findings_with_an_arrow_become_one_line():
    """As rustc and ruff write them."""
    text = "".join(
        f"F401 [*] `os` imported but unused\n --> src/a{n}.py:5:8\n  |\n5 | import os\n  |        ^^\n  |\nhelp: Remove unused import\n\n"
        for n in range(9)
    )
    lines = slim(text + "Found 9 errors.\n", command="ruff check").text.split("\n")
    assert "src/a0.py:5:8: F401 [*] `os` imported but unused" == lines[0]
    assert "Found 9 errors." == lines[-2]


def test_an_install_keeps_errors_and_what_was_installed():
    """Names of what was fetched stand on one line."""
    text = "".join(
        f"Collecting package{n}\n  Downloading package{n}-1.0.whl (1.2 MB)\n  Link requires a different Python\nWARNING: cache {n} is off\n"
        for n in range(30)
    )
    text += "WARNING: running as root\nERROR: No matching distribution found for nothing\nSuccessfully installed package1-1.0\n"
    once = slim(text, command="pip install -v x")
    assert once.text.startswith("packages: package0 package1 ")
    assert "WARNING: cache 0 is off (x30 like this)" in once.text
    for line in text.split("\n")[-4:]:
        assert line in once.text
    assert once.kept_tokens * 5 < once.raw_tokens


DIFF = """diff --git a/src/a.py b/src/a.py
index 1234567..89abcde 100644
--- a/src/a.py
+++ b/src/a.py
@@ -10,9 +10,9 @@ def work():
     first
     second
     third
-    old = 1
+    new = 2
     fourth
     fifth
     sixth
diff --git a/src/new.py b/src/new.py
new file mode 100644
index 0000000..89abcde
--- /dev/null
+++ b/src/new.py
@@ -0,0 +1 @@
+added
"""


def test_a_diff_keeps_files_with_counts_hunks_and_changes():
    """Of what did not change one line at each side of a change stays."""
    expected = [
        "src/a.py +1 -1", "@@ -10,9 +10,9 @@ def work():", "     third", "-    old = 1", "+    new = 2", "     fourth",
        "src/new.py (new) +1 -0", "@@ -0,0 +1 @@", "+added",
    ]  # fmt: skip
    assert expected == slim(DIFF, command="git diff", small_tokens=60).text.split("\n")[:-1]


def test_a_long_log_of_commits_keeps_every_message_before_any_line_of_code():
    """With the short hash; then files, then hunks, then lines while they fit."""
    text = "".join(
        f"commit {n:040x}\nAuthor: Kim <kim@example.org>\nDate:   Mon Feb 9 09:08:00 2026 +0000\n\n    Subject {n}\n\n    Ticket FIN-{n}.\n\n"
        + DIFF.replace("added", "\n+".join(f"line {k}" for k in range(40)))
        for n in range(30)
    )
    once = slim(text, command="git log -p")
    assert once.kept_tokens <= 1500
    for n in range(30):
        assert f"{n:040x}"[:9] + f" Subject {n}\n" in once.text
        assert f"Ticket FIN-{n}." in once.text


def test_json_of_many_items_keeps_first_last_and_those_that_tell_of_a_failure():
    """It says how many there were; links and empty fields of the items go first."""
    rows = [
        {"id": n, "state": "done", "node_url": f"https://x/{n}", "parent": None, "text": f"row {n}"} for n in range(900)
    ]
    rows[500] |= {"state": "failed", "reason": "token expired"}
    found = json.loads(slim(json.dumps({"total": 900, "rows": rows})).text)
    assert 900 == found["total"]
    shown = [row for row in found["rows"] if isinstance(row, dict)]
    assert {0, 500, 899} <= {row["id"] for row in shown}
    assert f"{900 - len(shown)} more of 900 items" == found["rows"][-1]
    assert {"id", "state", "text"} == shown[0].keys()
    assert "token expired" == next(row for row in shown if row["id"] == 500)["reason"]


def test_deep_json_is_the_same_wherever_it_is_slimmed():
    """How much of the interpreter's stack is left makes no difference; the answer is JSON."""

    def deeper(levels: int) -> str:
        return slim(text).text if levels == 0 else deeper(levels - 1)

    for depth in (50, 300, 900, 5000):
        text = '{"a":[1,' * depth + '"x"' + "]}" * depth + " " * 5
        text = f"[{', '.join([text] * 3)}, {list(range(3000))}]"
        assert deeper(0) == deeper(600)
        assert isinstance(json.loads(deeper(0)), list)


def test_json_that_fits_only_loses_its_blanks():
    """Numbers, escapes and order stay as they were written."""
    text = '{ "b": 1.50,\n  "a": [ 1e5, "\\u00e9 : x" ],\n  "c": {} }' + " " * 30
    assert '{"b":1.50,"a":[1e5,"\\u00e9 : x"],"c":{}}' == slim(text).text


def test_numbers_are_kept_as_written_where_items_are_left_out():
    """Money is not rounded by being shown."""
    text = json.dumps({"amount": 0, "rest": list(range(5000))}).replace('"amount": 0', '"amount": 12345678901234567.10')
    assert '"amount":12345678901234567.10' in slim(text).text


def test_a_search_and_a_list_of_paths_name_file_and_folder_once():
    """Nothing is lost, so there is nothing to read again."""
    hits = "".join(f"src/some/long/path/module.py:{n}:def function_{n}(argument):\n" for n in range(40))
    once = slim(hits + "src/some/long/path/module.py-41-    pass\n--\nother/file.py:3:x\n", command="grep -rn def")
    assert once.text.startswith("src/some/long/path/module.py\n0:def function_0(argument):\n")
    assert "\n41-    pass\n--\nother/file.py\n3:x\n[agentkv: grouped by file]" in once.text
    assert once.handle is None
    paths = "".join(f"src/some/long/path/module_{n}.py\n" for n in range(40)) + "README.md\n"
    once = slim(paths, command="find .")
    assert once.text.startswith("src/some/long/path/: module_0.py module_1.py ")
    assert once.text.endswith("\nREADME.md\n[agentkv: grouped by folder]")


def test_times_and_addresses_are_no_search_hits():
    """A log is not grouped by its timestamps."""
    for line in ("2026-01-01T00:{n:02d}:05 INFO x", "12:34:{n:02d} started", "http://a.b:80{n}:x", "10.0.0.1:{n}: up"):
        text = "\n".join(line.format(n=n) + " words" * n for n in range(30))
        assert "grouped by file" not in slim(text).text


def test_long_lists_are_cut_within_the_bound():
    """First and last with the number between them."""
    hits = "".join(f"src/module_{n}.py:{n}:def function_{n}(argument):\n" for n in range(4000))
    paths = "".join(f"folder{n % 300}/module_{n}.py\n" for n in range(4000))
    for text in (hits, paths, "".join(f"-rw-r--r-- 1 root root {n} Nov 29 10:00 file_{n}.py\n" for n in range(4000))):
        once = slim(text)
        assert once.kept_tokens <= 1500
        assert " more .." in once.text
        assert once.handle is not None


def test_an_ls_that_is_too_long_keeps_sizes_and_names():
    """Rights, owners and times are left out and can be read again; one that fits is what was asked for."""
    text = "total 80\n" + "".join(
        f"-rw-r--r-- 1 root staff  {n}K Nov 29 10:0{n % 9} my file {n}.py\n" for n in range(200)
    )
    assert "-rw-r--r-- 1 root staff" in slim(text[:1000], command="ls -l").text
    text += "drwxr-xr-x 2 root staff 4096 Nov 29  2025 folder\nlrwxrwxrwx 1 root staff 3 Nov 29 10:00 link -> x\n"
    lines = slim(text, command="ls -l").text.split("\n")
    assert ["my file 0.py 0K", "folder/", "link -> x 3"] == [lines[0], *lines[-3:-1]]


def test_a_files_text_stays_as_it_is_while_it_fits():
    """An agent may want to edit it word by word: neither JSON nor hits in it are rewritten."""
    text = '{\n  "name": "shop",\n' + "".join(f'  "src/a.py:{n}:x": [1, 2],\n' for n in range(30)) + '  "end": 1\n}'
    assert text == slim(text, command="cat package.json").text
    assert text == slim(text, tool="read_file").text
    assert text == slim(text, command="cat").text
    assert text != slim(text, command="curl x").text


def test_where_only_a_word_of_the_command_is_known_the_text_decides():
    """`sed -i ... && git diff` is known as "sed", `cat run.log` as "cat"."""
    assert "diff" == slim(DIFF, command="sed", small_tokens=60).rule
    assert "pytest" == slim(PYTEST, command="cat").rule
    assert "pytest" == slim(PYTEST, command="cat logs/run.log").rule
    assert PYTEST.rstrip() == slim(PYTEST, command="cat docs/example.txt").text
    assert DIFF.rstrip() == slim(DIFF, command="cat my.patch", small_tokens=60).text
    lines = [f"{n} something was done to {chr(97 + n % 26)}" for n in range(3000)]
    lines[1500] = "1500 ERROR it was not done"
    assert "1500 ERROR it was not done" in slim("\n".join(lines), command="cat").text


def test_a_long_file_keeps_what_it_defines():
    """Over the bound: the head, the tail, and the names of functions and classes."""
    text = "import os\n" + "".join(f"\n\ndef function_{n}(a):\n" + "    a += 1\n" * 40 for n in range(60))
    once = slim(text, command="cat src/long.py")
    assert "file" == once.rule
    assert once.text.startswith("import os\n")
    assert sum(f"def function_{n}(a):" in once.text for n in range(60)) == 60


def test_line_numbers_of_a_file_lose_their_padding():
    """They say the same in fewer tokens."""
    assert "1\tone\n2\n10\tten" == slim("     1\tone\n     2\t\n    10\tten\n", command="cat -n a.py").text


def test_a_table_keeps_its_head_its_end_and_rows_that_tell_of_a_failure():
    """Rows are not taken for repeats of each other."""
    rows = [f"{n},order {n},ok,{n * 7}" for n in range(3000)]
    rows[1500] = "1500,order 1500,failed,0"
    once = slim("id,name,state,cents\n" + "\n".join(rows))
    assert once.text.startswith("id,name,state,cents\n0,order 0,ok,0\n1,order 1,ok,7\n")
    assert "1500,order 1500,failed,0" in once.text
    assert "2999,order 2999,ok,20993" in once.text


def _word(number: int) -> str:
    return "".join(chr(97 + number * factor % 26) for factor in (1, 3, 7, 11)) + chr(97 + number // 26)


def test_a_stack_trace_keeps_the_exception_its_ends_and_the_users_own_frames():
    """Frames of libraries are left out."""
    frames = ['  File "/srv/app/main.py", line 3, in main\n    run()']
    frames += [
        f'  File "/usr/lib/python3.11/site-packages/lib/{_word(n)}.py", line {n}, in {_word(n)}\n    call({_word(n)})'
        for n in range(60)
    ]
    frames[30] = '  File "/srv/app/orders.py", line 77, in price\n    return table[key]'
    trace = "\n".join(["Traceback (most recent call last):", *frames, "KeyError: 'tax'"])
    text = "\n".join(
        [
            "service started",
            trace,
            *(f"request {_word(n)} served from {_word(n + 7)}" for n in range(300)),
        ]
    )
    kept = slim(text, max_tokens=1000).text
    for piece in ("Traceback (most recent call last):", "main.py", "orders.py", f"{_word(59)}.py", "KeyError: 'tax'"):
        assert piece in kept
    assert kept.count("site-packages") == 1
    java = "\n".join(
        [
            "java.lang.IllegalStateException: x",
            *(f"\tat org.junit.Runner.r{n}(Runner.java:{n})" for n in range(200)),
            "Caused by: java.io.IOException: y",
        ]
    )
    kept = slim(java, max_tokens=200).text
    assert "IllegalStateException: x" in kept
    assert "Caused by: java.io.IOException: y" in kept


def test_in_a_text_that_is_too_long_lines_equal_but_for_numbers_stand_once():
    """With a count; the last of them too; equal errors once."""
    text = "".join(f"waiting for port 8080, attempt {n}\n" for n in range(500)) + "ERROR: gave up\n" * 3
    lines = slim(text).text.split("\n")
    assert [
        "waiting for port 8080, attempt 0 (x500 like this)",
        "waiting for port 8080, attempt 499",
        "ERROR: gave up (x3)",
    ] == lines[:3]


def test_in_a_text_that_fits_only_equal_neighbours_are_counted():
    """A time in front does not make them differ; other numbers do."""
    text = "".join(f"10:00:{n:02} still waiting for the port\n" for n in range(50)) + "gave up\n" * 3
    assert ["10:00:00 still waiting for the port (x50)", "gave up (x3)"] == slim(text).text.split("\n")[:2]


@pytest.mark.parametrize("tool", ["", "sql_query", "web_search", "bash"])
@pytest.mark.parametrize(
    "row",
    [
        "order {n}: total {m} EUR",
        "cpu{n} {m}%",
        "user{n},{m}",
        "{n} | {m}.50 | {n}",
        "X_{n} = {m}",
        "{m}M\t./dir{n}",
        "Product {n}: ${m}.99",
        "10:00:{n:02} handled {m}",
    ],
)
def test_data_that_fits_keeps_every_row(tool, row):
    """Rows of one shape with other numbers are an answer, not noise."""
    text = "\n".join(row.format(n=n, m=n * 37 % 101) for n in range(40))
    assert text == slim(text, tool=tool).text


def test_errors_in_the_middle_of_a_very_long_log_are_found():
    """Of a text of many megabytes only the ends and the places with a word of failure are looked at."""
    lines = [f"request {n} from client-{n % 97} took {n % 13} ms" for n in range(60_000)]
    lines[41_234] = "request 41234: FATAL could not open ledger: disk full"
    once = slim("\n".join(lines))
    assert "FATAL could not open ledger: disk full" in once.text
    assert once.text.startswith("request 0 from client-0")
    assert "request 59999 from" in once.text


PAGE = """<!DOCTYPE html><html><head><title>Orders &amp; more</title><style>p{color:red}</style>
<script>var hidden = '<p>no</p>';</script></head><body><nav><a href="/x">Menu</a></nav><!-- <p>no</p> -->
<h2 class="big">Late orders</h2><p>Three   orders are
late, see <a href="https://example.org/7">order 7</a>.</p><ul><li>seven<li>eight</ul><SCRIPT>no</SCRIPT><br>end</body></html>"""


def test_a_web_page_is_its_words():
    """Headings, paragraphs, items and links; no scripts, styles, menus or comments."""
    late = "Three orders are late, see order 7 (https://example.org/7)."
    expected = ["# Orders & more", "## Late orders", late, "- seven", "- eight", "end"]
    assert expected == slim(PAGE, command="curl x", small_tokens=20).text.split("\n")[:-1]
    assert PAGE == slim(PAGE, command="cat index.html", small_tokens=20).text


@pytest.mark.parametrize("piece", ["<script>", "<", "<a ", "<!--", "&amp", "</p", "<script>x</SCRIPT>"])
def test_a_broken_page_takes_no_longer_than_a_whole_one(piece):
    """Tags that are never closed are looked for once."""
    assert slim("<html>" + piece * (400_000 // len(piece))).kept_tokens <= 1500


def test_what_saves_little_is_not_worth_a_change():
    """A text that fits keeps its bytes unless a rule saves a good part of it."""
    text = "\n".join(
        f"module_{n}.py:{n}:a hit with rather many words, so that its file's name is a small part of it"
        for n in range(12)
    )
    assert text == slim(text, command="grep -n hit").text
    assert "none" == slim(text, command="grep -n hit").rule


def test_gaps_of_a_very_long_text_are_numbered_as_the_whole():
    """Though only windows of it were looked at."""
    lines = [f"{_word(n)} {_word(n // 26 + 3)} {_word(n // 676 + 5)} was served" for n in range(40_000)]
    lines[20_000] = "FATAL: the ledger is locked"
    told = slim("\n".join(lines)).text.split("\n")[:-1]
    gaps = [at for at, line in enumerate(told) if line.startswith("... lines ")]
    assert len(gaps) >= 2
    for at in gaps:
        first, last = map(int, told[at].removeprefix("... lines ").split("-"))
        assert told[at - 1] == lines[first - 2]
        assert told[at + 1] == lines[last]


def test_a_long_page_is_told_without_where_its_links_lead():
    """Its words count; the rest is behind the handle."""
    items = "".join(f'<p><a href="/product/{n}">Product {n} in {_word(n)}</a></p>' for n in range(400))
    once = slim(f"<html><body>{items}</body></html>")
    assert "/product/" not in once.text
    assert "Product 0 in" in once.text


@pytest.mark.parametrize(
    "tool", ["Read", "read_file", "filesystem__read_text_file", "mcp.files/read_file", "load_document", "fs_read"]
)
def test_a_tool_that_reads_files_is_known_by_many_names(tool):
    """With a server's name in front, too: head, tail and definitions, not what looks like failures."""
    code = "".join(f"def {_word(n)}(left, right):\n    return left * {n} + right\n\n" for n in range(300))
    assert "file" == slim(code, tool=tool).rule


@pytest.mark.parametrize("tool", ["readiness", "cat_facts", "read_sensor", "spread"])
def test_a_tool_that_reads_something_else_is_not_taken_for_one(tool):
    """Only names that say so."""
    code = "".join(f"def {_word(n)}(left, right):\n    return left * {n} + right\n\n" for n in range(300))
    assert "file" != slim(code, tool=tool).rule


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_a_file_keeps_all_its_lines_whatever_ends_them(end):
    """A file is no terminal: a carriage return draws over nothing."""
    rows = [f"{n},name {n}" for n in range(60)]
    assert "\n".join(rows) == slim(end.join(rows), tool="read_file").text


def test_a_table_with_a_line_below_its_head_is_one():
    """As a database's shell prints it: rows are data, not repetitions."""
    rows = [f" {n} | user{n} | {n * 13}" for n in range(400)]
    once = slim("\n".join([" id | name | total", "----+------+-------", *rows]))
    assert "table" == once.rule
    assert rows[0] in once.text
    assert rows[-1] in once.text
    assert 400 < once.kept_tokens


def test_a_list_in_which_nothing_stands_out_is_shown_while_there_is_room():
    """A little over the bound is not a reason to leave nine tenths out."""
    packages = [f"{_word(n)}-{_word(n * 7)}=={_word(n * 3)}.{_word(n * 5)}" for n in range(200)]
    once = slim("\n".join(packages), command="pip freeze", max_tokens=1000)
    assert "log" == once.rule
    assert once.raw_tokens > 1000
    assert 600 < once.kept_tokens <= 1000


def test_json_says_which_fields_are_nowhere_in_what_is_left():
    """Else an agent takes it that there are none."""
    rows = [{"id": n, "name": f"user{n}", "html_url": f"http://x/{n}", "deleted_at": None} for n in range(300)]
    told = json.loads(slim(json.dumps(rows)).text)
    assert "left out, with them all of html_url, deleted_at; read_output('" in told[-1]
