"""What the bookkeeping of a step costs, from Python, beside the goals and a careful pure-Python manager.

    python benches/decode_step.py

Every sequence decodes one token a step, as many of them at each place in a block as at any other, and every
array but the CSR trio is read. Times are means over whole runs of 16 steps, in which every sequence fills one
block, of the best of some runs: what is left out is what other processes took, and no part of the work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import kvfolio as kv
import numpy as np
from peers import plain_python

BLOCK_SIZE = 16
RUNS = 24


def best(work: Callable[[], Any], runs: int, before: Callable[[], Any] = lambda: None) -> float:
    """The least time of some runs, in microseconds."""
    times = []
    for _ in range(runs):
        before()
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times) * 1e6


def prompt(length: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens that no other seed has."""
    return np.random.default_rng(seed).integers(0, 100_000, length, np.int32)


def kvfolio_step(num_sequences: int, length: int) -> float:
    """Microseconds a decode step."""
    room = length + BLOCK_SIZE * (RUNS + 6)
    pool = kv.BlockPool(num_sequences * (room // BLOCK_SIZE + 1), BLOCK_SIZE)
    batch = kv.Batch(pool, max_sequences=num_sequences, max_tokens_per_sequence=room)
    tokens = np.full(num_sequences, 7, np.int32)
    for i in range(num_sequences):
        row = batch.add(pool.sequence(prompt(length + i % BLOCK_SIZE, i)))
        with batch.plan(rows=[row]) as plan:
            pass
        plan.extend(tokens[:1])

    def steps() -> None:
        for _ in range(BLOCK_SIZE):
            plan = batch.plan()
            _ = plan.rows, plan.token_ids, plan.positions, plan.query_start_loc, plan.seq_lens
            _ = plan.block_table, plan.slot_mapping, plan.copies, plan.last_page_len, plan.table_updates
            _ = plan.logits_rows, plan.logits_indices, plan.skipped, plan.never_fit
            plan.commit()
            plan.extend(tokens)

    steps()
    return best(steps, RUNS) / BLOCK_SIZE


def python_step(num_sequences: int, length: int) -> float:
    """The same for the pure-Python manager."""
    runs = 4
    room = length + BLOCK_SIZE * (runs + 6)
    blocks = room // BLOCK_SIZE + 1
    manager = plain_python.Manager(num_sequences * blocks, BLOCK_SIZE, num_sequences, blocks)
    tokens = np.full(num_sequences, 7, np.int32)
    for i in range(num_sequences):
        sequence = manager.admit(prompt(length + i % BLOCK_SIZE, i).tolist())
        step = manager.plan([sequence])
        manager.commit(step)
        manager.extend(step, tokens[:1])

    def steps() -> None:
        for _ in range(BLOCK_SIZE):
            step = manager.plan()
            manager.commit(step)
            manager.extend(step, tokens)

    steps()
    return best(steps, runs) / BLOCK_SIZE


def csr_and_memcpy(num_sequences: int, length: int) -> tuple[float, float]:
    """Microseconds to make the CSR trio, and to copy as many bytes."""
    pool = kv.BlockPool(num_sequences * (length // BLOCK_SIZE + 2), BLOCK_SIZE)
    batch = kv.Batch(pool, max_sequences=num_sequences, max_tokens_per_sequence=2 * length)
    for i in range(num_sequences):
        batch.add(pool.sequence(prompt(length, i)))
    batch.plan().commit()
    plans = []

    def plan() -> None:
        if plans:
            plans.pop().commit()
        for row in batch.rows:
            batch.extend([row], [7])
        plans.append(batch.plan())

    def read() -> None:
        _ = plans[0].page_indptr, plans[0].page_indices, plans[0].last_page_len

    csr = best(read, 15, plan)
    source = plans.pop().page_indices.copy()
    target = np.empty_like(source)
    return csr, best(lambda: np.copyto(target, source), 15)


def admissions(length: int) -> tuple[float, float, float, float]:
    """Microseconds to admit a cached prompt and to compute a fresh one; then the same in pure Python."""
    blocks = length // BLOCK_SIZE + 1
    pool = kv.BlockPool(20 * blocks, BLOCK_SIZE)
    batch = kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=2 * length)
    fresh = iter(range(1000))
    current: list[kv.Sequence] = []

    def leave() -> None:
        if current:
            current.pop().free()

    def compute(tokens: Any) -> None:
        current.append(pool.sequence(tokens))
        batch.add(current[0])
        plan = batch.plan()
        _ = plan.token_ids, plan.positions, plan.block_table, plan.slot_mapping
        plan.commit()

    prompts = [prompt(length, i) for i in range(15)]
    computed = best(lambda: compute(prompts[next(fresh)]), 15, leave)
    leave()

    def admit() -> None:
        current.append(pool.sequence(prompts[-1]))
        batch.add(current[0])

    cached = best(admit, 15, leave)
    if current[0].num_cached != (length - 1) // BLOCK_SIZE * BLOCK_SIZE:
        sys.exit("the prompt was not in the cache")

    manager = plain_python.Manager(4 * blocks, BLOCK_SIZE, 2, blocks + 1)
    lists = [tokens.tolist() for tokens in prompts[:3]]
    held: list[plain_python.Sequence] = []

    def release() -> None:
        if held:
            manager.release(held.pop())

    def python_compute(tokens: list[int]) -> None:
        held.append(manager.admit(tokens))
        manager.commit(manager.plan())

    python_computed = best(lambda: python_compute(lists.pop()), 3, release)
    release()
    last = prompts[0].tolist()
    python_cached = best(lambda: held.append(manager.admit(last)), 3, release)
    return cached, computed, python_cached, python_computed


def line(what: str, took: float, goal: float | None, plain: float | None = None) -> None:
    """One row of the table."""
    verdict = "" if goal is None else f"{goal:7.0f}   {'met' if took <= goal else 'MISSED':6}"
    ratio = "" if plain is None else f"{plain:10.0f} {plain / took:7.0f} x"
    print(f"{what:44} {took:8.1f}   {verdict:17} {ratio}", flush=True)


def main() -> None:
    """Print the table."""
    print(
        f"kvfolio {kv.__version__}, Python {sys.version.split()[0]}, numpy {np.__version__}; microseconds\n"
    )
    print(f"{'':44} {'kvfolio':>8}   {'goal':>7}   {'':6} {'plain Python':>10}   ratio")
    steps = {}
    for num, length, goal in ((256, 1000, 10), (1024, 1000, 40), (256, 32_000, 15)):
        steps[num, length] = kvfolio_step(num, length)
        plain = python_step(num, length) if length == 1000 else None
        line(f"decode step, {num} sequences of {length} tokens", steps[num, length], goal, plain)
    csr, memcpy = csr_and_memcpy(256, 1000)
    line("CSR trio, 256 sequences of 1000 tokens", csr, 2 * memcpy)
    csr, memcpy = csr_and_memcpy(256, 16_000)
    line("CSR trio, 256 sequences of 16000 tokens", csr, 2 * memcpy)
    cached, computed, python_cached, python_computed = admissions(32_768)
    line("admission of a cached prompt of 32768 tokens", cached, 300, python_cached)
    line("plan and commit of a fresh one", computed, 300, python_computed)

    print("\ncost of a step against the context's length, 64 sequences (flat: linear in what changed)")
    for length in (250, 1000, 4000, 16_000):
        line(f"  {length} tokens", kvfolio_step(64, length), None)
    sizes = (16, 64, 256, 1024)
    costs = [steps.get((num, 1000)) or kvfolio_step(num, 1000) for num in sizes]
    slope, base = np.polyfit(sizes, costs, 1)
    print(f"\nagainst the sequences: {base:.1f} us and {1000 * slope:.1f} ns a sequence ({sizes})")


if __name__ == "__main__":
    main()
