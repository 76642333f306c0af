"""Attention's error beside torch's at the same precision, and what threads, sharing and instructions change.

The measure is FlashAttention 3's: against float64, the largest error at most twice, the mean error at most
one and a half times that of the textbook's computation in the storage type. Every slot that no sequence owns
is NaN.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import kvfolio as kv
import numpy as np
import pytest
from attention_reference import (
    Bench,
    HandMadePlan,
    assert_close,
    attention,
    fill,
    rounded,
    to_float64,
    torch,
)

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.fixture
def all_threads():
    before = kv.get_num_threads()
    yield
    kv.set_num_threads(before)


def make_cache(block_size, heads, head_dim, dtype, array="torch", num_blocks=None):
    pool = kv.BlockPool(num_blocks or 4096 // block_size, block_size)
    cache = kv.KVCache(pool, 1, heads, head_dim, dtype=dtype, array=array)
    for storage in (*cache.keys, *cache.values):
        fill(storage, np.nan)
    return cache


def textbook(q, k, v):
    """Softmax of q k^T times v in the storage type; queries are the last positions."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    n, s = q.shape[1], k.shape[1]
    seen = torch.ones(n, s, dtype=torch.bool).tril(s - n)
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 1)])
@pytest.mark.parametrize(
    ("length", "queries"), [(1, 1), (113, 1), (1000, 1), (300, 300), (513, 64), (700, 5)]
)
def test_errors_are_at_most_those_of_torch(dtype, head_dim, heads, length, queries):
    cache = make_cache(16, heads[1], head_dim, dtype)
    kind = cache.keys[0].dtype
    generator = torch.Generator().manual_seed(length)
    k, v = (torch.randn(length, heads[1], head_dim, generator=generator).to(kind) for _ in range(2))
    q = torch.randn(queries, heads[0], head_dim, generator=generator).to(kind)
    ids = np.random.default_rng(1).permutation(np.arange(1, 200))[: -(-length // 16)].tolist()
    cache.write(0, k, v, HandMadePlan.of(ids, 16, length, length))
    out = cache.attend(0, q, HandMadePlan.of(ids, 16, length, queries))
    truth = attention(to_float64(q), to_float64(k), to_float64(v))[0]
    ours, theirs = (np.abs(to_float64(x) - truth) for x in (out, textbook(q, k, v)))
    slack = 2e-6 if dtype == "float32" else 1e-5
    assert ours.max() <= 2 * theirs.max() + slack
    assert ours.mean() <= 1.5 * theirs.mean() + slack / 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_cells_of_the_table_and_empty_rows_change_nothing(dtype):
    cache = make_cache(4, 2, 64, dtype, array="numpy")
    bench = Bench(cache, [70, 1, 33])
    bench.step(8)
    plan = bench.batch.plan()
    q = bench.numbers(3, 8, 64)
    k, v = (bench.numbers(3, 2, 64) for _ in range(2))
    cache.write(0, k, v, plan)
    clean = cache.attend(0, q, plan)
    poisoned = HandMadePlan.of([1], 4, 1, 1)
    poisoned.block_table = np.concatenate([plan.block_table, np.full((3, 3), 2**31 - 1, np.int32)], axis=1)
    for row, length in enumerate(plan.seq_lens):
        poisoned.block_table[row, -(-int(length) // 4) :] = (-1, 2**31 - 1, 0)[row]
    poisoned.seq_lens, poisoned.query_start_loc = plan.seq_lens.copy(), plan.query_start_loc.copy()
    np.testing.assert_array_equal(to_float64(cache.attend(0, q, poisoned)), to_float64(clean))
    poisoned.seq_lens[1] = 0
    out, lse = cache.attend(0, q, poisoned, return_lse=True)
    assert (to_float64(out[1]) == 0).all() and (lse[1] == -np.inf).all()
    np.testing.assert_array_equal(to_float64(out[[0, 2]]), to_float64(clean[[0, 2]]))
    plan.rollback()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[(3900, 1)], [(2500, 1), (3, 1), (700, 40)], [(900, 1)] * 4])
def test_threads_change_nothing_but_the_order_of_sums(all_threads, dtype, rows):
    cache = make_cache(16, 2, 64, dtype, array="numpy", num_blocks=300)
    random = np.random.default_rng(0)
    free = random.permutation(np.arange(1, 300, dtype=np.int32)).tolist()
    plan = HandMadePlan.of([1], 16, 1, 1)
    plan.block_table = np.full((len(rows), 250), -1, np.int32)
    expected, queries = [], []
    for row, (length, count) in enumerate(rows):
        ids = [free.pop() for _ in range(-(-length // 16))]
        plan.block_table[row, : len(ids)] = ids
        k, v, q = (
            rounded(random.standard_normal((n, h, 64)), dtype)
            for n, h in ((length, 2), (length, 2), (count, 16))
        )
        cache.write(0, k, v, HandMadePlan.of(ids, 16, length, length))
        queries.append(q)
        expected.append(attention(*(to_float64(x) for x in (q, k, v))))
    plan.seq_lens = np.array([length for length, _ in rows], np.int32)
    plan.query_start_loc = np.cumsum([0, *(count for _, count in rows)], dtype=np.int32)
    truth = tuple(np.concatenate(parts) for parts in zip(*expected, strict=True))
    for count in (1, 2, 7):
        kv.set_num_threads(count)
        assert_close(cache.attend(0, np.concatenate(queries), plan, return_lse=True), truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 5.0, "sinks": [0.5] * 8}, {"sliding_window": 100}])
def test_parallel_samples_read_their_prompt_together_and_get_what_they_would_get_alone(dtype, options):
    bench = Bench(make_cache(16, 2, 64, dtype, array="numpy"), [400])
    bench.step(8)
    parent = bench.batch.remove(0)
    rows = [bench.batch.add(parent.fork()) for _ in range(4)]
    truth = bench.truth.pop(0)
    bench.truth = dict.fromkeys(rows, truth)
    for _ in range(3):
        plan, got, expected = bench.step(8, **options)
        assert_close(got, expected, dtype)
    assert (plan.block_table[:, :24] == plan.block_table[0, :24]).all()  # they do share it


@pytest.mark.parametrize("capability", ["portable", "avx2", "avx512", "amx", "neon"])
def test_every_instruction_set_that_can_run_here_passes_the_tests_of_attention(capability):
    script = "import kvfolio._native as native; print(*native.cpu_capabilities())"
    available = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if capability not in available.stdout.split():
        pytest.skip(f"{platform.machine()} has {available.stdout.strip()}, not {capability}")
    environment = os.environ | {"KVFOLIO_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    tests = [str(Path(__file__).parent / "test_attention.py"), __file__]
    chosen = "(errors_are and 128) or every_dtype or nan_outside or samples or dead or threads_change"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        f"({chosen}) and not every_instruction",
    ]
    run = subprocess.run(
        [*command, *tests], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stdout[-2000:]


def test_the_number_of_threads_is_a_number_of_threads(all_threads):
    kv.set_num_threads(3)
    assert kv.get_num_threads() == 3
    for wrong, error in [
        (0, ValueError),
        (-1, ValueError),
        (10**6, ValueError),
        (2.0, TypeError),
        (True, TypeError),
    ]:
        with pytest.raises(error, match="num_threads must be"):
            kv.set_num_threads(wrong)
    assert kv.get_num_threads() == 3
    script = "import kvfolio as kv; print(kv.get_num_threads())"
    environment = os.environ | {"KVFOLIO_NUM_THREADS": "5", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "5"
