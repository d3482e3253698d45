"""The simulator: discrete events on a virtual clock, driving the real policies over recorded or made-up traces.

| module | its job |
| --- | --- |
| `trace` | waits and sessions; reading and writing them |
| `lines`, `fields`, `formats`, `requests`, `grouping`, `reader` | a damaged file's lines, its values, five formats, sessions, and reading with a bound |
| `synthetic`, `mix` | made-up traces, and the published figures they keep to |
| `hardware`, `shape`, `costs` | cards and models by name, a model's sizes, seconds and bytes |
| `plan` | how much memory and compute a number of tasks needs |
| `workload`, `simulator`, `compare`, `result` | a trace made into load, the events, several policies side by side, what a run tells |
| `memory`, `context`, `runs`, `facts`, `link`, `device` | blocks in three tiers, copies and steps |
| `record`, `replay`, `embedded`, `stepwise`, `steptimes` | a real run, simulated and held against what was |
"""
