"""When does computing a context again lose to bringing it back? From this machine's own rates.

python examples/when_to_move.py              # what `agentkv calibrate` saved, else measured now (SmolLM2-135M)
python examples/when_to_move.py --scripted   # no model: a 70B model behind PCIe 5 and a fast NVMe disk
"""

from __future__ import annotations

import sys

from agentkv.core.rates import Prefill, Rates
from agentkv.policy.cost import crossover, in_words, kv_bytes_per_token, table_lengths
from agentkv.runtime.calibration import calibrate
from agentkv.runtime.ratefiles import rates_folder, save_rates, saved_here
from agentkv.units import format_seconds

MODEL = "smollm2-135m"


def rates_of_this_machine() -> tuple[Rates, int, int]:
    """Rates, bytes of a token's KV, longest context."""
    saved = [(place, rates) for place, rates in saved_here() if place.model == MODEL]
    if not saved:
        found = calibrate(MODEL, disk=rates_folder() / "probe", progress=lambda line: print(line, file=sys.stderr))
        save_rates(found.place, found.rates)
        saved = [(found.place, found.rates)]
    place, rates = saved[0]
    return rates, place.token_bytes, place.context_tokens


def rates_of_a_large_machine() -> tuple[Rates, int, int]:
    """Assumed, not measured: 50 GB/s to the device, 7 GB/s from disk, 4,000 tokens a second at the start."""
    prefill = Prefill(quadratic_s=2e-9, linear_s=2.5e-4, constant_s=0.03)
    rates = Rates(
        memcpy_bytes_s=10e9, h2d_bytes_s=50e9, d2h_bytes_s=50e9, read_bytes_s=7e9, write_bytes_s=5e9, prefill=prefill
    )
    return rates, kv_bytes_per_token(layers=80, kv_heads=8, head_dim=128, dtype_bytes=2), 131_072


def main() -> None:
    assumed = "--scripted" in sys.argv
    rates, token_bytes, context_tokens = rates_of_a_large_machine() if assumed else rates_of_this_machine()
    found = crossover(rates, token_bytes, table_lengths(context_tokens))
    print(f"{'tokens':>8} {'recompute':>12} {'from host':>12} {'from disk':>12}  fastest")
    for row in found.rows:
        disk = "-" if row.disk_s is None else format_seconds(row.disk_s)
        print(
            f"{row.tokens:>8} {format_seconds(row.recompute_s):>12} {format_seconds(row.host_s):>12} {disk:>12}"
            f"  {row.winner}"
        )
    print(f"recompute loses to the host tier {in_words(found.host_tokens)}")
    if found.disk_tokens is not None:
        print(f"recompute loses to the disk tier {in_words(found.disk_tokens)}")


if __name__ == "__main__":
    main()
