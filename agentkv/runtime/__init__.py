"""Composition: `AgentKV` wires engine, policy, forecasts, budgets and ledger, and owns their lifetime.

| file | job |
| --- | --- |
| accounts.py | opening a task's account, in this process or shared |
| agentkv.py | the class that users hold |
| books.py | tasks, their budgets, and the facts that become a bill |
| budgets.py | `kv.budgets`: grants, what is left, caps on loops, limits of types of tasks |
| build.py | the local engine from options in words |
| calls.py | a model call: who, what it may cost, the engine, the books |
| counted.py | a tool call as it counts, with its task and with its type |
| desk.py | what happens when a tool starts, tells its progress, ends |
| emit.py | hints on their way out |
| gate.py | what happens to a step that does not fit into its budget |
| hosts.py | finding the framework's host; the plain-Python host and its node wrapper |
| identity.py | who is calling: explicit task scopes, then the host |
| planner.py | waits, forecasts and policy turned into moves at the right time |
| prefixes.py | prompts that do not extend the last one are noticed |
| tasks.py | the scope of one task |
| tools.py | the scope around one tool call |
"""
