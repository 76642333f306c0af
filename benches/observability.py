"""What metrics and events cost a step, beside a run without them.

    python benches/observability.py

Four pools do the same work in turn, some milliseconds each, so that what else the machine does meets all of
them alike. With metrics, another process reads them ten times a second; with events, they are recorded and
nobody follows, or a publisher looks every 10 ms and sends them to a subscriber in another process. The ratio
of a round is to the pool without either in the same round; shown are their median and quartiles, by the
processor time of the thread that steps, and by the clock, which also counts what other processes take.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, thread_time

import kvfolio as kv
import numpy as np
from kvfolio.events import Publisher
from kvfolio.metrics import serve
from numpy.typing import NDArray

BLOCK_SIZE = 16
ROWS, LENGTH, STEPS = 256, 1000, 320  # of which each fills 20 blocks
PROMPT = 32_768
ROUNDS = 24
CASES = ("without", "metrics, read 10 times a second", "events, nobody follows", "events, published")

SCRAPE = (
    "import sys, time, urllib.request\n"
    "while True: urllib.request.urlopen(sys.argv[1]).read(); time.sleep(0.1)"
)
SUBSCRIBE = (
    "import sys, zmq\ns = zmq.Context().socket(zmq.SUB); s.subscribe(b''); s.connect(sys.argv[1])\n"
    "while True: s.recv_multipart()"
)


@contextmanager
def beside(program: str, argument: str) -> Iterator[None]:
    """Run a small program meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", program, argument], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def tokens(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    return rng.integers(0, 100_000, length, np.int32)


class Decode:
    """`STEPS` decode steps of `ROWS` sequences."""

    num_blocks = ROWS * ((LENGTH + STEPS) // BLOCK_SIZE + 3)
    unit = ("decode step of 256 rows", STEPS)

    def __init__(self, pool: kv.BlockPool) -> None:
        self.pool = pool
        room = LENGTH + STEPS + 2 * BLOCK_SIZE
        self.batch = kv.Batch(pool, max_sequences=ROWS, max_tokens_per_sequence=room)
        self.sampled = np.full(ROWS, 7, np.int32)
        self.rng = np.random.default_rng(0)

    def prepare(self) -> None:
        for row in self.batch.rows:
            self.batch.remove(row).free()
        for index in range(ROWS):
            self.batch.add(self.pool.sequence(tokens(self.rng, LENGTH + index % BLOCK_SIZE)))
        for _ in range(2):
            plan = self.batch.plan()
            plan.commit()
            plan.extend(self.sampled)

    def run(self) -> None:
        for _ in range(STEPS):
            plan = self.batch.plan()
            _ = plan.token_ids, plan.positions, plan.seq_lens, plan.block_table, plan.slot_mapping
            plan.commit()
            plan.extend(self.sampled)


class Admit:
    """Fresh prompts of `PROMPT` tokens, planned and committed in a full pool: each evicts another one."""

    num_blocks = 4 * (PROMPT // BLOCK_SIZE + 1)
    unit = ("fresh prompt of 32768 tokens", 4)

    def __init__(self, pool: kv.BlockPool) -> None:
        self.pool = pool
        self.batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=PROMPT + 1)
        self.rng = np.random.default_rng(1)

    def prepare(self) -> None:
        self.prompts = [tokens(self.rng, PROMPT) for _ in range(4)]

    def run(self) -> None:
        for prompt in self.prompts:
            self.batch.add(self.pool.sequence(prompt))
            plan = self.batch.plan()
            _ = plan.token_ids, plan.positions, plan.block_table, plan.slot_mapping
            plan.commit()
            self.batch.remove(0).free()


def measure(
    kind: Callable[[kv.BlockPool], Decode | Admit], num_blocks: int, rounds: int
) -> list[list[tuple[float, float]]]:
    """Seconds of each round of each case, of the processor and by the clock."""
    pools = [kv.BlockPool(num_blocks, BLOCK_SIZE, events=index >= 2) for index in range(4)]
    works = [kind(pool) for pool in pools]
    times: list[list[tuple[float, float]]] = [[] for _ in works]
    with ExitStack() as stack:
        stack.enter_context(beside(SCRAPE, stack.enter_context(serve(pools[1], port=0)).url))
        publisher = Publisher(pools[3], endpoint="tcp://127.0.0.1:0", bind=True)
        stack.enter_context(publisher)
        stack.enter_context(beside(SUBSCRIBE, publisher.endpoint))
        for number in range(rounds + 1):
            # Each comes first in its turn.
            for index in (np.arange(4) + number) % 4:
                works[index].prepare()
                began = thread_time(), perf_counter()
                works[index].run()
                if number:
                    times[index].append((thread_time() - began[0], perf_counter() - began[1]))
        publisher.flush()
        if publisher.stats.batches < 10:
            sys.exit("nothing was published")
    return times


def ratio(own: list[tuple[float, float]], plain: list[tuple[float, float]], clock: int) -> str:
    """Median and quartiles."""
    ratios = [one[clock] / other[clock] for one, other in zip(own, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"x {middle:.3f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print the table."""
    for kind in (Decode, Admit):
        what, count = kind.unit
        times = measure(kind, kind.num_blocks, ROUNDS)
        print(f"\n{what}, {ROUNDS} rounds of {count}")
        for case, own in zip(CASES, times, strict=True):
            each = 1e6 * statistics.median(processor for processor, _ in own) / count
            by_processor, by_clock = (ratio(own, times[0], clock) for clock in (0, 1))
            print(f"  {case:34} {each:8.1f} us   processor {by_processor}   clock {by_clock}")


if __name__ == "__main__":
    main()
