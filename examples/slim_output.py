"""A long tool output, slimmed on arrival, and a part of it read again. No model is needed.

python examples/slim_output.py                       # a build log made up on the spot
some-command 2>&1 | python examples/slim_output.py - some-command
"""

from __future__ import annotations

import sys

from agentkv.context.outputs import Outputs, reader
from agentkv.context.slim import Rule, Slimmer, default_rules
from agentkv.context.tokens import count_text


def made_up_log() -> str:
    """Two thousand steps, one of which goes wrong."""
    lines = [f"10:{n // 60 % 60:02d}:{n % 60:02d} step {n}: copied part-{n % 7}.bin" for n in range(2000)]
    lines[1234] = "10:20:34 step 1234: ERROR part-2.bin: checksum differs, expected 7f3a found 9c01"
    lines.append("1999 steps done, 1 failed")
    return "\n".join(lines)


def main() -> None:
    piped = sys.argv[1:2] == ["-"]
    text = sys.stdin.read() if piped else made_up_log()
    command = " ".join(sys.argv[2:]) if piped else "sh copy.sh"

    # Rules of your own come first: a name and two plain functions.
    quiet = Rule(
        name="heartbeats",
        matches=lambda tool, _command, _text: tool == "watch",
        apply=lambda text, _budget: f"{text.count('beat')} heartbeats",
    )
    outputs = Outputs()
    slimmer = Slimmer(outputs=outputs, count=count_text, max_tokens=1_000, rules=default_rules().first(quiet))

    slimmed = slimmer.slim(text, tool="bash", command=command)
    print(slimmed.text)
    print(f"\n{slimmed.raw_tokens} -> {slimmed.kept_tokens} tokens by the rule {slimmed.rule!r}")
    if slimmed.handle is not None:
        read_output = reader(outputs)
        print("\nread_output(..., pattern='error'):")
        print(read_output(slimmed.handle, pattern="error"))


if __name__ == "__main__":
    main()
