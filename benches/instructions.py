"""Count instructions a block, or a decode step, and compare with the recorded ones.

`make bench-instructions` fails when a figure has grown by more than 5 %;
`python benches/instructions.py --record` makes the figures of now the recorded ones. Instructions are counted
by valgrind's callgrind, which says the same on a busy machine: but not what waiting for memory or for another
core costs, which `cargo bench` is for. Another compiler may count differently: then record anew.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
STEPS = [
    "allocate+free, k=1",
    "allocate+free, k=16",
    "allocate+free, k=256",
    "hit",
    "publish",
    "evict",
    "release to idle",
    "hash",
    "decode step of 256 rows",
]
MOST_GROWTH = 0.05


def build() -> Path:
    """Build the program whose steps are counted, as it is released."""
    command = ["cargo", "bench", "--no-run", "--quiet", "-p", "kvfolio", "--features", "internals"]
    command += ["--bench", "instructions", "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Path(next(message["executable"] for message in messages if message.get("executable")))


def count(program: Path, step: str) -> float:
    """Instructions for each block, or each step of a batch."""
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        "--toggle-collect=*counted*",
    ]
    done = subprocess.run([*valgrind, str(program), step], text=True, capture_output=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or collected is None or collected[1] == "0":
        raise SystemExit(f"{step} was not counted:\n{done.stdout}{done.stderr}")
    return round(int(collected[1]) / int(done.stdout), 1)


def main() -> int:
    """Print a line for each step; 1 if one takes more than it did."""
    parser = argparse.ArgumentParser(description="Count instructions and compare with the recorded ones.")
    parser.add_argument("--record", action="store_true", help="make these the recorded ones")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("skipped: instructions are counted by valgrind, which is not installed")
        return 0
    compiler = subprocess.run(
        ["rustc", "--version"], text=True, capture_output=True, check=True
    ).stdout.strip()
    recorded: dict[str, Any] = {"compiler": compiler, "instructions": {}}
    if RECORD.exists():
        recorded = json.loads(RECORD.read_text())
    if recorded["compiler"] != compiler:
        print(f"the recorded figures are of {recorded['compiler']}, these are of {compiler}")
    program = build()
    figures, grown = {}, False
    for step in STEPS:
        now, before = count(program, step), recorded["instructions"].get(step)
        figures[step] = now
        change = now / before - 1 if before else None
        grown |= change is None or change > MOST_GROWTH
        print(
            f"{step:26} {now:10.1f}  "
            + ("not recorded" if change is None else f"{before:10.1f}  {change:+.1%}")
        )
    if options.record:
        RECORD.write_text(json.dumps({"compiler": compiler, "instructions": figures}, indent=2) + "\n")
        return 0
    if grown:
        print(
            "grown by more than 5 %, or not recorded; python benches/instructions.py --record if it has to be"
        )
    return grown


if __name__ == "__main__":
    sys.exit(main())
