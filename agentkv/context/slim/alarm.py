"""Which lines of an output matter: errors and failures, warnings, summaries; and lines that say the same again.

Patterns look at one line of at most clean.MAX_LINE characters, so that none of them costs more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

ALARM = re.compile(
    r"[A-Z]\w*(?:Error|Exception|Failure|Panic)\b"
    r"|(?<![\w/.-])(?i:errors?|err|fail(?:ed|ures?|s|ing)?|exceptions?|traceback|fatal|panic(?:ked)?|crit(?:ical)?|emerg"
    r"|segmentation fault|core dumped|abort(?:ed|ing)?|killed|denied|refused|time[d-]? ?out|undefined reference"
    r"|no such file|not found|cannot|can't|could not|couldn't|unable to|unresolved|unhandled|rejected|conflicts?"
    r"|not ok|assertion)(?![\w/-]|\.\w)"
    r"|^E  |ERR!|[\u2717\u2718\u2716]"
)
"""A line that tells of something that went wrong."""
NO_ALARM = re.compile(r"(?i)\b(?:0|no|zero|without)\s+(?:\w+\s+)?(?:errors?|failures?|failed|exceptions?|conflicts?)\b")
WARNING = re.compile(r"(?i)\bwarn(?:ing|ings|s)?\b(?![\w/-]|\.\w)|\bdeprecat(?:ed|ion)\b|[a-z]Warning\b|\bvulnerabilit")
SUMMARY = re.compile(
    r"(?i)^\W{0,40}(?:(?:in )?total\b|summary\b|successfully \w+|finished\b|completed\b|saved\b|downloaded\b|wrote\b|build (?:succe|fail)|tests? run|ran \d+ test"
    r"|test (?:suites|result)|real\s+\d+m|exit(?:ed)? (?:code|status|with)|process exited|duration\b|elapsed\b"
    r"|(?:added|removed|changed|audited|installed|updated) \d+ )"
    r"|\b\d[\d,]* (?:passed|failed|skipped|errors?|failures?|warnings?|tests?|problems?|insertions|deletions|vulnerabilities)\b"
)
"""A line that sums up."""

COARSE = (
    *("error", "Error", "ERROR", "fail", "Fail", "FAIL", "fatal", "Fatal", "FATAL", "xception", "panic", "CRITICAL"),
    *(
        "denied",
        "refused",
        "imed out",
        "Traceback",
        "undefined reference",
        "No such file",
        "not found",
        "illed",
        "egmentation",
    ),
)
"""Words to look for where looking at each line would take too long."""

_MASK = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{7,64}\b|\d+(?:[.,:]\d+)*|[#=*._>\u2500-\u259f-]{3,}|\s{2,}")


def is_alarm(line: str) -> bool:
    """Whether `line` tells of a failure ("0 errors" does not)."""
    return ALARM.search(line) is not None and not (
        NO_ALARM.search(line) and not re.search(r"[1-9]\d* (?i:fail|err)", line)
    )


def mask(line: str) -> str:
    """`line` with numbers, hex, times and bars as "#": two lines with one mask say the same of different things."""
    return _MASK.sub("#", line).replace("##", "#").replace("# #", "#")


def hits(text: str, words: tuple[str, ...] = COARSE, *, each: int = 60) -> Iterator[int]:
    """Where `words` stand in `text`: the first `each` places of every word and its last. One pass in C per word."""
    for word in words:
        position, found = text.find(word), 0
        while position >= 0 and found < each:
            yield position
            found += 1
            position = text.find(word, position + len(word))
        if position >= 0:
            yield text.rfind(word)
