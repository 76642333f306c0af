"""Run the crate under ThreadSanitizer and AddressSanitizer, and see that both are loud where it is broken.

The stable toolchain has both; `RUSTC_BOOTSTRAP=1` lets it use them. The standard library is not
instrumented: under ThreadSanitizer the end of a `thread::scope` whose threads were not joined one by one
orders nothing, nor does libtest's channel. So the tests with threads would be reported for what is right;
`stress` is made to use neither.

1. `stress` (tests/rust/stress) under ThreadSanitizer: not one report.
2. `stress` and the tests of the kernels under AddressSanitizer: not one report.
3. Each `tests/mutants_sanitizers/*.patch`, applied to a copy of the sources: a report. Its first line says
   what it breaks and who must see it: `# WHAT. Killed by: thread stress`.

Arguments choose patches by name; `--only-mutants` and `--no-mutants` choose parts; `--seconds N` is how long
`stress` runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants_sanitizers"
TARGET = ROOT / "target" / "sanitize"
COPY = TARGET / "source"
PARTS = ["Cargo.toml", "Cargo.lock", "rust", "benches", "tests/rust"]
REPORTS = {"thread": "WARNING: ThreadSanitizer", "address": "ERROR: AddressSanitizer"}
STRESS = ["build", "--example", "stress"]
# What to build, and how to run it.
PROGRAMS: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("thread", "stress"): (STRESS, ["--threads", "4", "--blocks", "48"]),
    ("address", "stress"): (STRESS, ["--threads", "4", "--blocks", "48"]),
    ("address", "kernels"): (["test", "--no-run", "--lib"], ["kernels::", "--test-threads=2"]),
}
MUTANT_SECONDS = 60


class Unfit(Exception):
    """What keeps a program from being judged."""


@dataclass
class Mutant:
    """A patch, and the program that must be loud by it."""

    path: Path
    what: str
    program: tuple[str, str]

    @classmethod
    def read(cls, path: Path) -> "Mutant":
        """From the first line of a patch."""
        what, found, killer = (
            path.read_text().partition("\n")[0].removeprefix("# ").partition(". Killed by: ")
        )
        sanitizer, _, program = killer.partition(" ")
        if not found or (sanitizer, program) not in PROGRAMS:
            allowed = ", ".join(" ".join(program) for program in PROGRAMS)
            raise Unfit(f"{path.name}: the first line must be '# WHAT. Killed by: WHO', WHO one of {allowed}")
        return cls(path, what, (sanitizer, program))


def copy_sources() -> None:
    """Make the copy what the sources are. A file that is so already keeps its time, for cargo to see it."""
    wanted = set()
    for part in PARTS:
        path = ROOT / part
        wanted |= {path} if path.is_file() else {file for file in path.rglob("*") if file.is_file()}
    names = {path.relative_to(ROOT) for path in wanted}
    for path in COPY.rglob("*"):
        if path.is_file() and path.relative_to(COPY) not in names:
            path.unlink()
    for name in names:
        path = COPY / name
        if not path.exists() or path.read_bytes() != (ROOT / name).read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)


def build(program: tuple[str, str]) -> Path:
    """Build a program under its sanitizer."""
    sanitizer = program[0]
    host = subprocess.run(
        ["rustc", "--print", "host-tuple"], text=True, capture_output=True, check=True
    ).stdout.strip()
    # With a target, build scripts and macros stay as they are.
    command = [
        "cargo",
        *PROGRAMS[program][0],
        "--release",
        "-p",
        "kvfolio",
        "--target",
        host,
        "--message-format=json",
    ]
    env = os.environ | {
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": f"-Zsanitizer={sanitizer} -Cunsafe-allow-abi-mismatch=sanitizer",
        "CARGO_TARGET_DIR": str(TARGET / sanitizer),
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
        # The kernels take minutes to be built otherwise; races need the optimiser to leave out what std adds.
        "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1" if sanitizer == "address" else "3",
    }
    done = subprocess.run(
        [*command, "--quiet"], cwd=COPY, env=env, text=True, capture_output=True, check=False
    )
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        rendered = [message["message"]["rendered"] for message in messages if "message" in message]
        raise Unfit("does not build:\n" + "\n".join(rendered) + done.stderr)
    return Path(next(message["executable"] for message in messages if message.get("executable")))


def run(program: tuple[str, str], seconds: int) -> tuple[bool, str]:
    """Whether the program passed without a report, and what it printed."""
    sanitizer, name = program
    words = PROGRAMS[program][1] + (["--seconds", str(seconds)] if name == "stress" else [])
    env = os.environ | {
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "detect_stack_use_after_return=1",
        "RUST_BACKTRACE": "0",
    }
    command = [str(build(program)), *words]
    try:
        done = subprocess.run(
            command, env=env, text=True, capture_output=True, timeout=20 * seconds + 600, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unfit(f"{name} under {sanitizer} does not end") from None
    return done.returncode == 0 and REPORTS[sanitizer] not in done.stderr, done.stdout + done.stderr


def judge(mutant: Mutant) -> str:
    """What becomes of a mutant."""
    command = ["git", "apply", "-C1", "--unsafe-paths", "--directory", str(COPY), str(mutant.path)]
    applied = subprocess.run(command, cwd="/", text=True, capture_output=True, check=False)
    if applied.returncode != 0:
        return f"UNFIT: does not apply: {applied.stderr}"
    try:
        passed, output = run(mutant.program, MUTANT_SECONDS)
    except Unfit as unfit:
        return f"UNFIT: {unfit}"
    finally:
        copy_sources()
    if passed:
        return "PASSES"
    return "reported" if REPORTS[mutant.program[0]] in output else "FAILS WITHOUT A REPORT"


def main() -> int:
    """Print a line for each program and mutant; 1 if one is not as it has to be."""
    parser = argparse.ArgumentParser(description="Run the crate under ThreadSanitizer and AddressSanitizer.")
    parser.add_argument("mutants", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only-mutants", action="store_true")
    parser.add_argument("--no-mutants", action="store_true")
    options = parser.parse_args()
    copy_sources()
    failures = 0

    def say(start: float, who: tuple[str, str], what: str, outcome: str, expected: str) -> None:
        nonlocal failures
        failures += outcome != expected
        print(f"{time.monotonic() - start:5.0f} s  {' '.join(who):21} {outcome:9} {what}", flush=True)

    if not options.only_mutants:
        for program in PROGRAMS:
            start = time.monotonic()
            passed, output = run(program, options.seconds)
            lines = output.strip().splitlines()
            result = next((line for line in lines if "calls" in line or "test result" in line), "")
            say(start, program, result, "silent" if passed else "LOUD", "silent")
            if not passed:
                print(output, file=sys.stderr)
    if not options.no_mutants:
        names = options.mutants or sorted(path.stem for path in PATCHES.glob("*.patch"))
        for mutant in [Mutant.read(PATCHES / f"{name}.patch") for name in names]:
            start = time.monotonic()
            say(start, mutant.program, f"{mutant.path.stem}: {mutant.what}", judge(mutant), "reported")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
