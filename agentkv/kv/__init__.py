"""The data plane: blocks of KV in three tiers. It knows where blocks are and how they move, never why.

| module | its job |
| --- | --- |
| `geometry` | how many bytes a token and a block take |
| `index` | content keys of blocks |
| `book` | which block has a copy in which tier, who holds it, in which order copies are given up |
| `freemap` | which slots of a tier are free |
| `device`, `host`, `slab` | the memory of the three tiers |
| `limits`, `pins`, `numa` | how much memory there is to be had, how it is page-locked, where it should lie |
| `segments`, `checksums`, `breaker` | the slab's files, what their blocks must hash to, the pause after a failure |
| `lair`, `journal`, `records`, `resume` | the slab's folder, and what makes it last: a journal, its bytes, taking over |
| `store` | the lasting folders seen from outside |
| `streams/` | copies and events: CPU, CUDA, and an adversary for tests |
| `mover`, `carrier` | lanes of threads, and what they do with a job |
| `transfers` | trips of blocks between tiers, and their commits |
| `queue` | who waits for host slots |
| `room` | which copies are given up when somebody needs space |
| `leases` | what running sequences have in hand |
| `moves` | what a planner's moves do to a session's blocks |
| `ticket` | what somebody who waits for blocks holds in hand |
| `keep` | a note per session, so that it outlives the process |
| `gauge` | how fast this machine copies, reads and writes |
| `guard` | the one lock, and what happens at its release |
| `audit` | counts for people and policies, and the recount for tests |
| `tiers`, `planner_side` | the one front door: the engine's side and the planner's |
"""
