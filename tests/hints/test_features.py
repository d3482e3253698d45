"""The first command word: the one thing kept of a tool's arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.hints.features import (
    _PLAIN,
    _is_plain,
    _line_words,
    _read_line,
    _shell_words,
    command_word,
    command_words,
    declared_timeout_s,
    size_bytes,
)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("pytest -q", "pytest"),
        ({"cmd": "pytest -q tests"}, "pytest"),
        ({"command": ["git", "log", "--oneline"]}, "git"),
        ('{"command": "rg -n x"}', "rg"),
        (["/usr/bin/git", "grep", "x"], "git"),
        ("./scripts/run.sh --fast", "run.sh"),
        ("C:\\\\tools\\\\node.exe app.js", "node.exe"),
        ("sudo -u root /usr/bin/make -j4", "make"),
        ("sudo -n make", "make"),
        ("env -i PATH=/bin FOO='a b' python3 x.py", "python3"),
        ("DEBUG=1 LEVEL=2 npm test", "npm"),
        ("time timeout 30 pytest", "pytest"),
        ("timeout -k 5 30 pytest", "pytest"),
        ("cd /repo && pytest -x", "pytest"),
        ("cd /repo&&pytest -x", "pytest"),
        ("cd /repo; FOO=1 make test | tail", "make"),
        ("cd /repo\nexport A=1\ncargo build", "cargo"),
        ("# run it\ngrep x \\\n  y", "grep"),
        ("cd /repo", "cd"),
        ("bash -c 'cd x && cargo test'", "cargo"),
        (["bash", "-lc", "ls -l | wc"], "ls"),
        ("(cd sub && make)", "make"),
        ("echo 'an open quote", "echo"),
        ({"path": "/etc/passwd"}, ""),
        ({"cmd": None, "command": "ls"}, "ls"),
        ({"cmd": 7}, ""),
        ("{not json", ""),
        ('"$(secret)"', ""),
        ("!!", ""),
        ("", ""),
        (None, ""),
        (42, ""),
        (b"ls", ""),
        ([], ""),
        ("x" * 100, ""),
        ("pytest " + "a" * 1_000_000, "pytest"),
    ],
)
def test_the_command_word_is_found(args, word):
    """Prefixes that say nothing about the duration are skipped, folders are cut off."""
    assert command_word(args) == word


@given(
    st.recursive(
        st.none() | st.text() | st.integers() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["cmd", "command", "x"]), inner),
    )
)
def test_any_arguments_give_a_short_word_without_blanks(args):
    """Never an exception, never more than one short word: arguments stay where they are."""
    word = command_word(args)
    assert len(word) <= 32
    assert word == "".join(word.split())


@given(st.text(st.sampled_from("ab1=-./*~@{}[]$#!<>\t ;|&()\n\x1f\xa0\u2028'\"\\\\é")))
def test_a_plain_line_is_read_as_a_shell_would(line):
    """The quick way and the exact way find the same words wherever the quick one may be used."""
    if _is_plain(line):
        assert _shell_words(line) == _PLAIN.findall(line)


def test_arguments_that_fail_to_be_read_have_no_command_word():
    """A hostile mapping costs nothing but its word."""

    class Broken(dict):
        def get(self, *_):
            raise RuntimeError("no")

    assert command_word(Broken(cmd="ls")) == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("git diff HEAD~1", "git diff"),
        ("cd /repo && git -C sub --no-pager log -n 3", "git log"),
        (["pip", "install", "-e", "."], "pip install"),
        ("python -m pytest -q", "pytest"),
        ("python3.12 -m pip install x", "pip install"),
        ("python script.py", "python"),
        ("python -m 'my secret'", "python"),
        ("cat secret.txt", "cat"),
        ("pytest tests", "pytest"),
        ("git", "git"),
        ("git /etc/passwd", "git"),
        ("git Secret", "git"),
        ("git " + "x" * 30, "git"),
        ("make -j4 test", "make test"),
        ("kubectl -n prod get pods", "kubectl get"),
        ("docker --debug ps", "docker ps"),
        ("npm run build", "npm run"),
        (None, ""),
    ],
)
def test_a_sub_command_is_kept_of_programs_that_have_them(args, words):
    """`git clone` takes longer than `git diff`; the argument of `cat` is nobody's business."""
    assert words == command_words(args)
    assert words.partition(" ")[0] == command_word(args)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ("ls -l", 5),
        ({"cmd": "ls"}, 5),
        (["ab", "cde"], 5),
        ({"path": "a", "text": "x" * 10_000}, 10_009),
        (b"abc", 3),
        ({"n": 7}, 9),
        (None, 0),
        ([[[["deep"]]]], 0),
        (["x"] * 1_000_000, 64),
    ],
)
def test_the_size_of_the_arguments_is_about_right_and_cheap(args, size):
    """Long texts count, endless lists do not cost."""
    assert size == size_bytes(args)


def test_a_hostile_sequence_has_no_size():
    """It costs nothing but its size."""

    class Broken(list):
        def __getitem__(self, _):
            raise RuntimeError("no")

    assert 0 == size_bytes(Broken([1]))


@pytest.mark.parametrize(
    ("args", "expected_s"),
    [
        ({"cmd": "pytest", "timeout": 30}, 30.0),
        ({"timeout_ms": 1500}, 1.5),
        ({"timeout": 120_000}, 120.0),
        ({"timeout_seconds": 2.5}, 2.5),
        ({"command": "timeout 5m make test"}, 300.0),
        ("timeout -k 5 30s pytest -q", 30.0),
        ("sudo timeout --foreground 7 ls", 7.0),
        ("timeout 3 a && b", None),
        ("echo timeout 3 ", None),
        ({"timeout": True}, None),
        ({"timeout": -1}, None),
        ({"timeout": "soon"}, None),
        (["timeout", "3", "ls"], None),
        (None, None),
    ],
)
def test_a_declared_timeout_is_read_from_the_arguments(args, expected_s):
    """Keys with and without units, and command lines that one `timeout` wraps as a whole; never an error."""
    assert expected_s == declared_timeout_s(args)


_PIECES = st.sampled_from(
    ["pytest", "git", "log", "cd", "sudo", "python3", "-m", "timeout", "30", "A=1", "bash", "-c", "&&", ";", "|", "'", '"', "#",
     "\\\n", "\n", " ", "  ", "\x85", "(", ")", "!", "x.sh", "/bin/ls", "."]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=8).map("".join) | st.lists(_PIECES, max_size=8).map(" ".join) | st.text(max_size=30))
def test_a_first_word_that_says_enough_is_what_the_whole_line_says(line):
    """The short way and the long one agree."""
    assert _read_line(line) == _line_words(line)
