"""Rolling summary: early turns become one structured summary, the last ones stay word for word."""

from agentkv.context.notebook import Fold
from agentkv.context.summary.extract import extract
from agentkv.context.summary.folder import Folder
from agentkv.context.summary.once import fold
from agentkv.context.summary.plan import Proposal
from agentkv.context.summary.record import Summary
from agentkv.context.summary.shape import applied
from agentkv.context.summary.turns import SUMMARY_MARK, groups, is_summary

__all__ = [
    "SUMMARY_MARK",
    "Fold",
    "Folder",
    "Proposal",
    "Summary",
    "applied",
    "extract",
    "fold",
    "groups",
    "is_summary",
]
