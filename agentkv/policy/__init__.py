"""What should move, when and why: pure functions from facts to Decisions."""

from agentkv.policy.wait import POLICIES, keep, ladder, make_policy

__all__ = ["POLICIES", "keep", "ladder", "make_policy"]
