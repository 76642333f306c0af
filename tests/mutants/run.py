"""Break the pool at one place after the other, and see that a test notices.

Each `*.patch` beside this file begins with a line that says what it breaks and which test must fail by it::

    # A dropped claim does not release. Killed by: loom models::who_gets_a_block_comes_after_all_who_shared_it

The test is one of the pool's own, under the model checker (`loom`) or under seeded schedules
(`schedules`). The pool and what it builds on are copied into `target/mutants`, once for either kind of test,
as a crate that builds in seconds, and one patch at a time is applied there. Fails if a patch does not apply
or build, or if a test fails without a patch or passes with it. Arguments choose patches by name.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target" / "mutants"
SOURCES = Path("rust/core/src")
MODULES = ["context", "error", "holds", "ids", "key", "pool", "sync"]
CRATES = ["parking_lot", "sha2", "thiserror"]
CFGS = ["schedules", "loom"]
SECONDS = 300


class Unfit(Exception):
    """What keeps a mutant from being judged."""


@dataclass
class Mutant:
    name: str
    what: str
    cfg: str
    test: str

    @classmethod
    def read(cls, path: Path) -> "Mutant":
        what, found, killer = (
            path.read_text().partition("\n")[0].removeprefix("# ").partition(". Killed by: ")
        )
        words = killer.split()
        if not found or len(words) != 2 or words[0] not in CFGS:
            raise Unfit(f"{path.name}: the first line must say '# WHAT. Killed by: {'|'.join(CFGS)} TEST'")
        return cls(path.stem, what, *words)

    @property
    def patch(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.patch")


MANIFEST = f"""
[package]
name = "mutant"
version = "0.0.0"
edition = "2024"
[lib]
path = "{SOURCES}/lib.rs"
[features]
internals = []
[profile.dev]
debug = 0
opt-level = 1
[workspace]
[dependencies]
%s
[target.'cfg(loom)'.dependencies]
%s
"""
LIBRARY = """
#![allow(dead_code, unused_imports)]
%s
pub use {context::*, error::*, ids::*, key::Key};
"""


def sources() -> dict[Path, bytes]:
    """The files of the small crate."""
    crates = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["dependencies"]

    def dependencies(names: list[str]) -> str:
        return "\n".join(f"{name} = {json.dumps(crates[name])}" for name in names)

    modules = "\n".join(f"mod {module};" for module in MODULES)
    files = {
        Path("Cargo.toml"): (MANIFEST % (dependencies(CRATES), dependencies(["loom"]))).encode(),
        SOURCES / "lib.rs": (LIBRARY % modules).encode(),
    }
    for module in MODULES:
        for path in (ROOT / SOURCES).glob(f"{module}*/**/*.rs"):
            files[path.relative_to(ROOT)] = path.read_bytes()
        path = SOURCES / f"{module}.rs"
        if (ROOT / path).exists():
            files[path] = (ROOT / path).read_bytes()
    return files


@dataclass
class Workshop:
    """Where mutants are made and judged by tests of one kind."""

    cfg: str

    @property
    def copy(self) -> Path:
        return TARGET / f"source-{self.cfg}"

    def copy_sources(self) -> None:
        """Make the copy what the sources are. A file that is so already keeps its time, which cargo sees."""
        files = sources()
        for path in (self.copy / SOURCES).rglob("*.rs"):
            if path.relative_to(self.copy) not in files:
                path.unlink()
        for name, text in files.items():
            path = self.copy / name
            if not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        if not (self.copy / "Cargo.lock").exists():
            (self.copy / "Cargo.lock").write_bytes((ROOT / "Cargo.lock").read_bytes())

    def build(self) -> Path:
        """The tests, as a program."""
        command = ["cargo", "test", "--lib", "--no-run", "--quiet", "--message-format=json"]
        env = os.environ | {"RUSTFLAGS": f"--cfg {self.cfg}", "CARGO_TARGET_DIR": str(TARGET / self.cfg)}
        built = subprocess.run(command, cwd=self.copy, env=env, text=True, capture_output=True, check=False)
        messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
        if built.returncode != 0:
            errors = [message["message"]["rendered"] for message in messages if "message" in message]
            raise Unfit("does not build:\n" + "\n".join(errors) + built.stderr)
        return Path(next(message["executable"] for message in messages if message.get("executable")))

    def is_killed(self, mutant: Mutant) -> bool:
        """Whether the test fails by the mutant."""
        command = ["git", "apply", "-C1", "--unsafe-paths", "--directory", str(self.copy), str(mutant.patch)]
        applied = subprocess.run(command, cwd="/", text=True, capture_output=True, check=False)
        if applied.returncode != 0:
            raise Unfit(f"does not apply:\n{applied.stderr}")
        try:
            return not passes(self.build(), mutant.test)
        finally:
            self.copy_sources()

    def judge(self, mutants: list[Mutant]) -> list[str]:
        """What is wrong, with the tests as they are and with each mutant."""
        if not mutants:
            return []
        self.copy_sources()
        program = self.build()
        tests = sorted({mutant.test for mutant in mutants})
        failures = [
            f"{self.cfg} {test} fails without a mutant" for test in tests if not passes(program, test)
        ]
        for mutant in mutants:
            start = time.monotonic()
            try:
                outcome = "killed by" if self.is_killed(mutant) else "PASSES"
            except Unfit as unfit:
                outcome = f"UNFIT: {unfit}\n"
            if outcome != "killed by":
                failures.append(f"{mutant.name}: {outcome}")
            seconds = time.monotonic() - start
            print(f"{seconds:4.0f} s  {mutant.name:36} {outcome} {self.cfg} {mutant.test}", flush=True)
        return failures


def passes(program: Path, test: str) -> bool:
    """Whether a test passes; it must be there."""
    command = [str(program), "--exact", f"pool::{test}"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unfit(f"{test} does not end within {SECONDS} s") from None
    if "running 1 test\n" not in done.stdout:
        raise Unfit(f"there is no test {test}")
    return done.returncode == 0


def main() -> int:
    names = sys.argv[1:] or sorted(path.stem for path in Path(__file__).parent.glob("*.patch"))
    mutants = [Mutant.read(Path(__file__).with_name(f"{name}.patch")) for name in names]
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        chosen = [[mutant for mutant in mutants if mutant.cfg == cfg] for cfg in CFGS]
        judged = pool.map(lambda cfg, own: Workshop(cfg).judge(own), CFGS, chosen)
        failures = [failure for own in judged for failure in own]
    print(f"{len(mutants)} mutants, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
