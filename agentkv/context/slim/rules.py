"""The rules that come with the package, in the order in which they are asked."""

from __future__ import annotations

from agentkv.context.slim import builds, diffs, installs, jsons, listings, logs, pages, runners
from agentkv.context.slim.jsontext import looks_like_json
from agentkv.context.slim.rule import Rule, SlimRules
from agentkv.context.slim.verbatim import is_file, outline


def default_rules() -> SlimRules:
    """The built-in rules. The last one matches every text."""
    return SlimRules(
        Rule(name="file", matches=is_file, apply=outline, over_only=True),
        Rule(
            name="json", matches=lambda _tool, _command, text: looks_like_json(text), apply=jsons.thin, over_only=True
        ),
        Rule(name="page", matches=pages.is_page, apply=pages.page),
        Rule(name="pytest", matches=runners.is_pytest, apply=runners.pytest_run),
        Rule(name="diff", matches=diffs.is_diff, apply=diffs.diff),
        Rule(name="build", matches=builds.is_build, apply=builds.build),
        Rule(name="install", matches=installs.is_install, apply=installs.install),
        Rule(name="tests", matches=runners.has_passing_lines, apply=runners.other_run),
        Rule(name="ls", matches=listings.is_long_listing, apply=listings.long_listing, over_only=True),
        Rule(name="grouped by folder", matches=listings.is_paths, apply=listings.by_folder, lossless=True),
        Rule(name="paths", matches=listings.is_paths, apply=listings.by_folder_cut, over_only=True),
        Rule(name="grouped by file", matches=listings.is_hits, apply=listings.by_file, lossless=True),
        Rule(name="hits", matches=listings.is_hits, apply=listings.by_file_cut, over_only=True),
        Rule(name="table", matches=listings.is_table, apply=listings.table, over_only=True),
        Rule(name="runs", matches=lambda _tool, _command, _text: True, apply=logs.runs),
        Rule(name="repeats", matches=lambda _tool, _command, _text: True, apply=logs.repeats, over_only=True),
        Rule(name="log", matches=lambda _tool, _command, _text: True, apply=logs.log, over_only=True),
    )
