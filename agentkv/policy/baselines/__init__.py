"""Published policies and simple rules to measure ours against, each as Rules; sources are in each docstring.

Ours are idealised versions: each keeps its rule and gets this project's data plane (incremental writes, partial
eviction, exact prefixes), which most of the originals do not have, so they look better here than at home.

KVFlow (arXiv 2507.07400) is left out: it evicts by the number of steps until an agent of a *workflow graph* runs again,
and traces of single agents have no such graph: every waiting session is one step away, so its key would be constant.
"""

from agentkv.policy.baselines.continuum import continuum, continuum_preview
from agentkv.policy.baselines.infercept import infercept
from agentkv.policy.baselines.plain import keep_lru, lru, pause_prefetch
from agentkv.policy.baselines.programs import mori, thunderagent
from agentkv.policy.baselines.tokencake import tokencake

__all__ = [
    "continuum",
    "continuum_preview",
    "infercept",
    "keep_lru",
    "lru",
    "mori",
    "pause_prefetch",
    "thunderagent",
    "tokencake",
]
