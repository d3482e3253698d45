"""llama.cpp's server for examples/llamacpp.py, in a process of its own and in any interpreter that has xllamacpp.

python examples/llamacpp_server.py model.gguf --folder DIR      # prints its address; runs until standard input ends
"""

from __future__ import annotations

import argparse
import sys
import tempfile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of context for each slot")
    parser.add_argument("--ram-mib", type=int, default=0, help="its own prompt cache (its default: 8192)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where slots are saved (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        serve(args, args.folder or temporary)


def serve(args: argparse.Namespace, folder: str) -> None:
    """Run the server until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel, params.n_ctx = args.slots, args.slots * args.tokens
    params.slot_save_path, params.endpoint_slots = f"{folder}/", True
    params.cache_ram_mib, params.warmup = args.ram_mib, False
    params.cpuparams.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
