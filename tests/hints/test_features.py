"""The first command word: the one thing kept of a tool's arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.hints.features import command_word


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


def test_arguments_that_fail_to_be_read_have_no_command_word():
    """A hostile mapping costs nothing but its word."""

    class Broken(dict):
        def get(self, *_):
            raise RuntimeError("no")

    assert command_word(Broken(cmd="ls")) == ""
