"""Web pages as their words: headings, paragraphs, list items, links; no scripts, styles, menus of attributes.

Where a link leads is told only of pages that would fit whole: of others the words count.
Works on tags one after the other, nested or not, closed or not; never raises. Where the text of an HTML file was asked
for (`cat index.html`), the rule for files comes first.
"""

from __future__ import annotations

import re
from html import unescape

from agentkv.context.slim.alarm import is_alarm
from agentkv.context.slim.clean import lines_of
from agentkv.context.slim.logs import MANY_CHARS
from agentkv.context.slim.pick import CONTEXT, EDGE, FILLER, MATTER, NOISE, cost, render

_START = re.compile(r"(?i)\s*(?:<\?xml[^<>]{0,200}>\s*)?(?:<!doctype html\b|<html[\s>])")
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]{0,15})\b[^<>]{0,4000}>|<!--|<![^<>]{0,400}>")
_SILENT = frozenset({"script", "style", "svg", "noscript", "template", "iframe", "nav", "footer"})
_BREAKS = frozenset(
    [
        "p",
        "div",
        "br",
        "li",
        "ul",
        "ol",
        "tr",
        "table",
        "section",
        "article",
        "header",
        "main",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "pre",
        "blockquote",
        "dt",
        "dd",
        "form",
        "hr",
        "title",
    ]
)
_BEFORE = {**{f"h{n}": f"{'#' * n} " for n in range(1, 7)}, "title": "# ", "li": "- ", "td": " ", "th": " "}
_BLANKS = re.compile(r"[ \t\xa0]{2,}")
_HREF = re.compile(r"""(?i)\shref\s*=\s*(?:"([^"<>\s]{1,500})"|'([^'<>\s]{1,500})'|([^"'<>\s]{1,500}))""")
_HEADING = re.compile(r"#{1,6} \S")
_HEAD_LINES = 25


def is_page(_tool: str, _command: str, text: str) -> bool:
    """Whether this is an HTML document."""
    return _START.match(text[:2_000]) is not None


def page(text: str, budget: int) -> str | None:
    """The page's words, headings first where not all of them fit."""
    if len(text) > MANY_CHARS:
        return None
    words = unescape("".join(_words(text, links=cost(text) <= budget)))
    lines = [line for line in (_BLANKS.sub(" ", line).strip() for line in words.split("\n")) if line.strip("#- ")]
    lines = lines_of("\n".join(lines))
    ranks = [FILLER if line else NOISE for line in lines]
    for at, line in enumerate(lines):
        if _HEADING.match(line) or is_alarm(line[:200]):
            ranks[at] = MATTER
        elif at < _HEAD_LINES:
            ranks[at] = CONTEXT
        elif at > 0 and _HEADING.match(lines[at - 1]):
            ranks[at] = EDGE
    return render(lines, ranks, budget)


def _words(text: str, *, links: bool) -> list[str]:
    out: list[str] = []
    leads = ""
    unclosed: set[str] = set()
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        out.append(text[at : tag.start()].replace("\n", " "))
        at = tag.end()
        name = (tag[2] or "").lower()
        if tag[0] == "<!--":
            at = _behind(text, "--", at, unclosed)
        elif not tag[1] and name in _SILENT and not tag[0].endswith("/>"):
            at = _behind(text, f"</{name}", at, unclosed)
        if links and name == "a":
            out.append(f" ({leads})" if leads else "")
            leads = "" if tag[1] else _href(tag[0])
        if name in _BREAKS:
            out.append("\n")
        if not tag[1]:
            out.append(_BEFORE.get(name, ""))
    out.append(text[at:].replace("\n", " "))
    return out


def _href(tag: str) -> str:
    """Where the link of an <a> leads; "" for nowhere else."""
    found = _HREF.search(tag)
    place = next(filter(None, found.groups()), "") if found is not None else ""
    return "" if place.startswith(("#", "javascript:")) else place


def _behind(text: str, end: str, at: int, unclosed: set[str]) -> int:
    """Behind the next `end` and its bracket; `at` where there is none, which is looked for only once."""
    for spelling in (end, end.upper()):
        found = -1 if spelling in unclosed else text.find(spelling, at)
        if found >= 0:
            return (text.find(">", found) + 1) or len(text)
        unclosed.add(spelling)
    return at
