"""Run every benchmark and hold its figures against bars.toml; exit 1 where one falls short."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help="names such as resume (default: all that bars.toml names)")
    parser.add_argument("--save", type=Path, help="write all results to this JSON file")
    args = parser.parse_args()
    bars = tomllib.loads((HERE / "bars.toml").read_text(encoding="utf-8"))
    unknown = set(args.scripts) - set(bars)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(bars)}")
    results, short = {}, []
    for script in args.scripts or bars:
        run = subprocess.run(
            [sys.executable, str(HERE / f"{script}.py"), "--json"], stdout=subprocess.PIPE, text=True, check=False
        )
        if run.returncode != 0:
            print(f"{script}: failed with exit code {run.returncode}")
            short.append(script)
            continue
        result = results[script] = json.loads(run.stdout.strip().splitlines()[-1])
        for figure, bar in bars[script].items():
            if figure not in result:
                why = "; ".join(map(str, result.get("left_out", {}).values())) or "it was not measured"
                print(f"SHORT {script}.{figure} is missing ({why})", flush=True)
                short.append(f"{script}.{figure}")
                continue
            value = result[figure]
            good = _holds(value, bar)
            limit = next(f"{word} {bar[word]}" for word in ("min", "max", "equals") if word in bar)
            print(f"{'ok   ' if good else 'SHORT'} {script}.{figure} = {value} ({limit}; {bar['why']})", flush=True)
            if not good:
                short.append(f"{script}.{figure}")
    if args.save is not None:
        args.save.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{len(short)} short of their bar: {', '.join(short)}" if short else "every figure holds its bar")
    return 1 if short else 0


def _holds(value: float | bool, bar: dict[str, float]) -> bool:
    if "equals" in bar:
        return value == bar["equals"]
    if "min" in bar:
        return value >= bar["min"]
    return value <= bar["max"]


if __name__ == "__main__":
    sys.exit(main())
