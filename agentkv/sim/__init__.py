"""The simulator: discrete events on a manual clock, driving the real policies over recorded or synthetic traces.

| module | its job |
| --- | --- |
| `trace` | waits, sessions, and reading and writing them |
| `lines`, `formats`, `grouping` | a damaged file's lines; what a record of each format says; sessions from them |
| `synthetic` | made-up traces with published marginals |
| `hardware`, `costs` | cards and models by name; seconds and bytes from them |
| `plan` | how much memory and compute a number of tasks needs |
"""
