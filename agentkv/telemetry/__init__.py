"""Telemetry: what the ledger learns, told to OpenTelemetry, to Prometheus and to the log. Nothing here is on by itself.

| file | what | extra |
| --- | --- | --- |
| names.py | every name of a span, an attribute, a metric or an event, in one place | |
| otel.py | spans and metrics by the GenAI conventions | `otel` |
| prometheus.py | the text of a metrics endpoint | `prometheus` |
| events.py | one structlog line for each fact | |

All of them hear facts through `on_fact`, which an AgentKV and a Ledger have. No prompt text, no tool arguments; task
names are in spans and log lines, never in the labels of a metric.
"""
