"""What should move, when and why: pure functions from facts to Decisions.

| module | its job |
| --- | --- |
| `rules` | the bundle that is a policy: decide, evict_key, turn_key, admit |
| `evict`, `schedule` | who gives way; who computes next, who waits outside |
| `moves` | decisions that several policies share |
| `lazy`, `hazard`, `wait` | ours: the default, the full rule, the ladder (with `waiting`, its arithmetic) |
| `baselines/`, `bounds` | other people's; what could be had by somebody who knows the future |
| `catalogue` | all of them by name |
| `cost`, `fit` | what moving and recomputing cost; times fitted from measurements |
"""

from agentkv.policy.catalogue import BASELINES, BOUNDS, OURS, RULES, make_rules
from agentkv.policy.rules import Rules
from agentkv.policy.wait import POLICIES, keep, ladder, make_policy

__all__ = ["BASELINES", "BOUNDS", "OURS", "POLICIES", "RULES", "Rules", "keep", "ladder", "make_policy", "make_rules"]
