"""`python -m agentkv.cli`."""

from agentkv.cli import main

main()
