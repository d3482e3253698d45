"""`vllm serve MODEL --kv-transfer-config "$(python -m agentkv_vllm --cpu-gib 8 --disk /nvme/kv)"`: prints the JSON."""

from __future__ import annotations

import argparse
import json

from agentkv_vllm.config import transfer_config

_GIB = 2**30


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m agentkv_vllm", description=__doc__)
    parser.add_argument("--cpu-gib", type=float, default=4.0, help="CPU memory for KV (default 4)")
    parser.add_argument("--disk", help="a folder for KV on disk; without it there is no disk tier")
    parser.add_argument("--disk-gib", type=float, default=16.0, help="how much of it (default 16)")
    parser.add_argument("--socket", help="where hints are taken (default: one place for each user)")
    args = parser.parse_args()
    config = transfer_config(
        cpu_bytes=int(args.cpu_gib * _GIB), disk=args.disk, disk_bytes=int(args.disk_gib * _GIB), socket=args.socket
    )
    print(json.dumps(config, separators=(",", ":")))  # noqa: T201  this is what it is for


if __name__ == "__main__":
    main()
