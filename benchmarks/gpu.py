"""Everything about a GPU that no machine without one can tell, in one script of at most nine minutes.

    python benchmarks/gpu.py --json > gpu.jsonl

needs a source checkout, torch, transformers, safetensors, xxhash and numpy; no installation, no weights, no network.
It prints one JSON object when a section ends, so that a killed run leaves what it had, and one with everything last.
A section that no longer fits into the budget is skipped, and says so. Exit status 1 if a pass line is missed or a
section failed. `--device cpu --small` runs the same code on two cores in half a minute: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    sys.path.insert(0, str(folder))

ESTIMATES_S = {"link": 60, "torture": 60, "arena": 40, "resume": 150, "decode": 110, "slab": 60}
"""Seconds on a GPU machine, guessed; in order of worth, should the budget end early."""
SECTIONS = tuple(ESTIMATES_S)
_SMALL_ESTIMATE = 0.1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the device tier is")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all of it (default 540)")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure"
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON only; without it pass lines are printed for people too"
    )
    parser.add_argument("--out", type=Path, help="a file that gets the lines of JSON as well")
    args = parser.parse_args()
    args.sections = args.sections.split(",")
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {unknown}; choose from {', '.join(SECTIONS)}")
    return args


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    from common import machine as basics

    from agentkv.kv.streams.batch import available

    try:
        facts = basics()
    except OSError:  # no git there
        facts = {"torch": torch.__version__}
    facts |= {"device": device, "batched_copies": available() or "yes", "cpus": os.cpu_count()}
    if device == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / (1 << 30), 1),
            "cuda": torch.version.cuda,
        }
    return facts


def one_section(name: str, scene: Any) -> dict[str, Any]:
    """Its result, whatever becomes of it."""
    needed = ESTIMATES_S[name] * (_SMALL_ESTIMATE if scene.small else 1)
    if scene.left_s < needed:
        why = f"{scene.left_s:.0f} s are left of the budget, it takes about {needed:.0f} s"
        return {"section": name, "skipped": why}
    scene.notes.clear()
    started = time.monotonic()
    try:
        found = importlib.import_module(f"gpu_sections.{name}").run(scene)
    except Exception as error:  # one section's failure must not cost the others their results
        traceback.print_exc()
        result: dict[str, Any] = {"section": name, "error": repr(error)}
    else:
        lines = [line.json() for line in found.lines]
        result = {"section": name, "figures": found.figures, "lines": lines}
    return result | {"notes": list(scene.notes), "took_s": round(time.monotonic() - started, 1)}


def put(result: dict[str, Any], out: Path | None) -> None:
    """One line of JSON, at once."""
    line = json.dumps(result)
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def say(result: dict[str, Any]) -> None:
    """The pass lines, for people."""
    print(f"-- {result['section']}: {result.get('skipped') or result.get('error') or str(result['took_s']) + ' s'}")
    for line in result.get("lines", ()):
        verdict = {True: "pass", False: "FAIL", None: "  - "}[line["ok"]]
        print(f"   {verdict} {line['what']}: {line['value']} (wanted {line['bound']})")
    for note in result.get("notes", ()):
        print(f"   note: {note}")


def main() -> None:
    args = parse()
    deadline_s = time.monotonic() + args.budget_s
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu --small shows that the script runs")
    from gpu_sections.scene import Scene

    scene = Scene(device=args.device, small=args.small, scratch=args.scratch, deadline_s=deadline_s)
    facts = machine(args.device)
    results = []
    for name in args.sections:
        result = one_section(name, scene)
        results.append(result)
        if not args.json:
            say(result)
        put(result, args.out)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    lines = [line for result in results for line in result.get("lines", ())]
    summary = {
        "passed": sum(line["ok"] is True for line in lines),
        "missed": [f"{line['what']}: {line['value']}, wanted {line['bound']}" for line in lines if line["ok"] is False],
        "not_judged": sum(line["ok"] is None for line in lines),
        "skipped": [result["section"] for result in results if "skipped" in result],
        "failed": [result["section"] for result in results if "error" in result],
    }
    put({"summary": summary, "machine": facts, "sections": results}, args.out)
    sys.exit(1 if summary["missed"] or summary["failed"] else 0)


if __name__ == "__main__":
    main()
