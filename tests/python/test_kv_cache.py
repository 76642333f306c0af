"""`KVCache`: storage, `wrap`, `write` and `apply_copies`."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import kvfolio as kv
import numpy as np
import pytest
from attention_reference import (
    Bench,
    HandMadePlan,
    assert_close,
    fill,
    numpy_dtype,
    rounded,
    to_float64,
    torch,
)

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")
ARRAYS = ["numpy", pytest.param("torch", marks=needs_torch)]
DTYPES = ["float32", "float16", "bfloat16"]


def layouts(pool, heads, head_dim, dtype, array, layers=2):
    """Storage of the caller's own, in the ways that people lay it out: name -> keys and values."""
    blocks, size = pool.num_physical_blocks, pool.block_size

    def zeros(*shape):
        return rounded(np.zeros(shape, np.float32), dtype, array)

    def each(make):
        return [make() for _ in range(layers)]

    def swapped(x):
        return x.transpose(1, 2) if array == "torch" else x.transpose(0, 2, 1, 3)

    packed = each(lambda: zeros(blocks, 2, size, heads, head_dim))  # FlashInfer
    halves = each(lambda: zeros(2, blocks, size, heads, head_dim))  # FlashAttention in vLLM
    rows = each(lambda: zeros(blocks, size, heads, 2 * head_dim))
    hnd = each(lambda: zeros(blocks, 2, heads, size, head_dim))
    everything = zeros(blocks, layers, 2, size, heads, head_dim)  # a block's layers side by side
    return {
        "nhd": (
            each(lambda: zeros(blocks, size, heads, head_dim)),
            each(lambda: zeros(blocks, size, heads, head_dim)),
        ),
        "hnd": tuple(each(lambda: swapped(zeros(blocks, heads, size, head_dim))) for _ in range(2)),
        "nhd and hnd": (
            each(lambda: zeros(blocks, size, heads, head_dim)),
            each(lambda: swapped(zeros(blocks, heads, size, head_dim))),
        ),
        "packed": ([x[:, 0] for x in packed], [x[:, 1] for x in packed]),
        "halves": ([x[0] for x in halves], [x[1] for x in halves]),
        "rows": ([x[..., :head_dim] for x in rows], [x[..., head_dim:] for x in rows]),
        "packed hnd": ([swapped(x[:, 0]) for x in hnd], [swapped(x[:, 1]) for x in hnd]),
        "block first": tuple([everything[:, layer, kind] for layer in range(layers)] for kind in range(2)),
    }


LAYOUTS = ["nhd", "hnd", "nhd and hnd", "packed", "halves", "rows", "packed hnd", "block first"]


def snapshot(cache):
    return [to_float64(array).copy() for array in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_own_storage_has_the_promised_shape_dtype_and_kind(dtype, array):
    pool = kv.BlockPool(10, 16)
    cache = kv.KVCache(pool, 3, 2, 80, dtype=dtype, array=array)
    assert len(cache.keys) == len(cache.values) == cache.num_layers == 3
    for storage in (*cache.keys, *cache.values):
        assert tuple(storage.shape) == (11, 16, 2, 80) and (to_float64(storage) == 0).all()
        if array == "torch":
            assert storage.dtype == getattr(torch, dtype) and storage.is_contiguous()
        else:
            assert storage.dtype == numpy_dtype(dtype) and storage.flags.c_contiguous
    assert (cache.num_kv_heads, cache.head_dim, cache.block_size, cache.dtype) == (2, 80, 16, dtype)
    assert dtype in repr(cache) and "3 layers" in repr(cache)


def test_storage_is_supplied_by_the_system_only_when_written():
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = kv.KVCache(kv.BlockPool(40_000, 16), 4, 8, 128)  # 21 GB
    assert cache.nbytes > 20e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_torch_is_not_imported_for_numpy_users():
    program = """
import sys, numpy as np, kvfolio as kv
cache = kv.KVCache(kv.BlockPool(4, 4), 1, 1, 8, dtype="bfloat16")
batch = kv.Batch(cache.pool, max_sequences=1, max_tokens_per_sequence=9)
batch.add(cache.pool.sequence([1, 2, 3]))
with batch.plan() as plan:
    x = np.zeros((3, 1, 8), cache.keys[0].dtype)
    cache.apply_copies(plan)
    cache.write(0, x, x, plan)
    cache.attend(0, x, plan, return_lse=True, sinks=[1.0])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_storage_of_any_layout_serves_like_its_own(layout, array):
    for dtype in DTYPES:
        pool = kv.BlockPool(60, 4)
        keys, values = layouts(pool, 2, 24, dtype, array)[layout]
        cache = kv.KVCache.wrap(pool, keys, values)
        assert cache.dtype == dtype and all(a is b for a, b in zip(cache.keys, keys, strict=True))
        for storage in (*keys, *values):
            fill(storage, np.nan)
        bench = Bench(cache, [30, 7])
        for _ in range(2):
            _, got, expected = bench.step(4, layer=1)
            assert_close(got, expected, dtype)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_move_whole_blocks_of_every_layer_and_nothing_else(layout, array):
    pool = kv.BlockPool(6, 4)
    cache = kv.KVCache.wrap(pool, *layouts(pool, 2, 24, "float32", array)[layout])
    for number, storage in enumerate((*cache.keys, *cache.values)):
        storage[...] = rounded(
            np.arange(7 * 4 * 2 * 24).reshape(7, 4, 2, 24) + 10_000 * number, "float32", array
        )
    for copies in ([[1, 2], [1, 3]], [[1, 2], [2, 1]], [[1, 2], [2, 3], [3, 4]], [[5, 5]]):
        before = snapshot(cache)
        plan = HandMadePlan.of([1], 4, 1, 1)
        plan.copies = np.array(copies, np.int32)
        cache.apply_copies(plan)
        for old, new in zip(before, snapshot(cache), strict=True):
            expected = old.copy()
            for src, dst in copies:
                expected[dst] = old[src]
            np.testing.assert_array_equal(new, expected)


def test_copies_are_applied_once_for_each_plan_and_cache():
    pool = kv.BlockPool(6, 4)
    caches = [kv.KVCache(pool, 1, 1, 8) for _ in range(2)]
    plan = HandMadePlan.of([2], 4, 1, 1)
    plan.copies = np.array([[1, 2]], np.int32)
    for cache in caches:
        cache.keys[0][1] = 1
        cache.apply_copies(plan)
        assert (cache.keys[0][2] == 1).all()
        cache.keys[0][2] = 5  # written since
        cache.apply_copies(plan)
        assert (cache.keys[0][2] == 5).all()
    other = HandMadePlan.of([2], 4, 1, 1)
    other.copies = plan.copies
    caches[0].apply_copies(other)
    assert (caches[0].keys[0][2] == 1).all()


def test_a_cache_does_not_keep_plans_alive():
    cache = kv.KVCache(kv.BlockPool(6, 4), 1, 1, 8)
    plan = HandMadePlan.of([2], 4, 1, 1)
    cache.apply_copies(plan)
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_a_write_before_the_plans_copies_is_refused():
    pool = kv.BlockPool(8, 4)
    cache = kv.KVCache(pool, 1, 1, 8)
    batch = kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=20)
    sequence = pool.sequence([1, 2, 3, 4, 5])
    batch.add(sequence)
    x = np.ones((5, 1, 8), np.float32)
    with batch.plan() as plan:
        cache.write(0, x, x, plan)  # nothing to copy: no need to call apply_copies
    plan.extend([6])
    twin = sequence.fork()
    batch.add(twin)
    plan = batch.plan()
    assert len(plan.copies) >= 1
    x = 2 * np.ones((plan.num_tokens, 1, 8), np.float32)
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match=r"call apply_copies\(plan\) first") as refusal:
        cache.write(0, x, x, plan)
    assert type(refusal.value) is not RuntimeError
    assert all((a == b).all() for a, b in zip(before, snapshot(cache), strict=True))
    cache.apply_copies(plan)
    cache.write(0, x, x, plan)
    for table in plan.block_table:
        assert (cache.keys[0][table[1], :2, 0, 0] == [1, 2]).all()
    plan.commit()


@pytest.mark.parametrize("num_tokens", [3, 5000])
@pytest.mark.parametrize("cut", ["dense", "strided", "dim"])
def test_write_puts_each_token_into_its_slot_and_nothing_else(num_tokens, cut):
    random = np.random.default_rng(0)
    cache = kv.KVCache(kv.BlockPool(400, 16), 2, 4, 32)
    for storage in (*cache.keys, *cache.values):
        fill(storage, np.nan)
    slots = random.permutation(400 * 16)[:num_tokens] + 16
    slots[1] = -1
    plan = HandMadePlan(*[np.zeros((1, 1), np.int32)] * 2, np.array([0, num_tokens], np.int32), slots)
    wide = random.standard_normal((num_tokens, 12, 64), np.float32)
    k, v = {
        "dense": (wide[:, :4, :32].copy(), wide[:, 4:8, :32].copy()),
        "strided": (wide[:, :8:2, :32], wide[:, 8:, 32:]),
        "dim": (wide[:, :4, ::2], wide[:, 4:8, 1::2]),
    }[cut]
    cache.write(1, k, v, plan)
    for storage, new in ((cache.keys[1], k), (cache.values[1], v)):
        expected = np.full((401 * 16, 4, 32), np.nan, np.float32)
        expected[slots[slots >= 0]] = new[slots >= 0]
        np.testing.assert_array_equal(storage.reshape(expected.shape), expected)
    assert np.isnan(cache.keys[0]).all() and np.isnan(cache.values[0]).all()


@needs_torch
def test_numpy_and_torch_may_be_mixed_and_each_gets_its_own_kind_back():
    cache = kv.KVCache(kv.BlockPool(8, 4), 1, 1, 8, array="torch")
    plan = HandMadePlan.of([3, 5], 4, 6, 6)
    x = np.random.default_rng(0).standard_normal((6, 1, 8), np.float32)
    cache.write(0, x, torch.from_numpy(x).requires_grad_(), plan)
    ours = cache.attend(0, x, plan)
    theirs = cache.attend(0, torch.from_numpy(x).requires_grad_(), plan, sinks=torch.tensor([-np.inf]))
    assert isinstance(ours, np.ndarray) and isinstance(theirs, torch.Tensor) and not theirs.requires_grad
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_bfloat16_is_taken_as_bits_too():
    cache = kv.KVCache(kv.BlockPool(8, 4), 1, 1, 8, dtype="bfloat16")
    plan = HandMadePlan.of([3, 5], 4, 6, 6)
    x = rounded(np.random.default_rng(0).standard_normal((6, 1, 8)), "bfloat16")
    bits = x.view(np.uint16)
    cache.write(0, bits, x, plan)
    out = cache.attend(0, bits, plan)
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(out, cache.attend(0, x, plan).view(np.uint16))


class TestBadInput:
    """Each is refused by a typed error that names the argument, and nothing has changed."""

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"num_layers": 0}, ValueError, "num_layers must be at least 1, not 0"),
            ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be"),
            ({"head_dim": 2.0}, TypeError, "head_dim must be"),
            (
                {"dtype": "float64"},
                ValueError,
                "dtype must be one of float32, float16, bfloat16, not 'float64'",
            ),
            ({"dtype": np.int8}, ValueError, "dtype must be one of"),
            ({"device": "mps"}, ValueError, "device must be 'cpu' or 'cuda', not 'mps'"),
            ({"backend": "flashinfer"}, ValueError, "backend must be 'kvfolio' on the cpu"),
            ({"array": "jax"}, ValueError, "array must be 'numpy' or 'torch', not 'jax'"),
            ({"pool": None}, TypeError, "pool must be a BlockPool, not NoneType"),
        ],
    )
    def test_construction(self, changes, error, words):
        arguments = {"pool": kv.BlockPool(4, 4), "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, **changes}
        with pytest.raises(error, match=words):
            kv.KVCache(**arguments)

    @pytest.mark.parametrize(
        ("keys", "values", "error", "words"),
        [
            ([], [], ValueError, "keys and values must have one array each"),
            ([np.zeros((5, 4, 2, 8), "f4")], [], ValueError, "keys and values must have one array each"),
            ([np.zeros((4, 4, 2, 8), "f4")], None, ValueError, r"keys\[0\] must be of shape \[5 \(pool"),
            (
                [np.zeros((5, 3, 2, 8), "f4")],
                None,
                ValueError,
                r"keys\[0\] must be of shape .* 4 \(pool.block_size",
            ),
            ([np.zeros((5, 4, 8), "f4")], None, ValueError, r"keys\[0\] must have 4 dimensions"),
            ([np.zeros((5, 4, 2, 8), "f8")], None, TypeError, r"keys\[0\] must be of dtype"),
            ([np.zeros((5, 4, 2, 8), "f2")], None, TypeError, r"values\[0\] must be of dtype float16"),
            (
                [np.zeros((5, 4, 8, 2), "f4").transpose(0, 1, 3, 2)],
                None,
                ValueError,
                r"keys\[0\] must be contiguous",
            ),
            (
                [np.broadcast_to(np.zeros((4, 2, 8), "f4"), (5, 4, 2, 8))],
                None,
                ValueError,
                r"keys\[0\] must be writable",
            ),
            ([[[1.0]]], None, TypeError, r"keys\[0\] must be a numpy array or a torch tensor, not list"),
            (None, [np.zeros((5, 4, 1, 8), "f4")], ValueError, r"values\[0\] must be of shape"),
        ],
    )
    def test_wrapping(self, keys, values, error, words):
        good = [np.zeros((5, 4, 2, 8), np.float32)]
        with pytest.raises(error, match=words):
            kv.KVCache.wrap(
                kv.BlockPool(4, 4), good if keys is None else keys, good if values is None else values
            )

    def test_wrapping_memory_twice(self):
        pool, memory = kv.BlockPool(4, 4), np.zeros((5, 4, 2, 16), np.float32)
        with pytest.raises(ValueError, match=r"keys\[0\] and values\[0\] must not share memory"):
            kv.KVCache.wrap(pool, [memory[..., :8]], [memory[..., 7:15]])
        overlapping = np.lib.stride_tricks.as_strided(memory, (5, 4, 2, 8), (64, 64, 32, 4))
        with pytest.raises(ValueError, match="place of its own for every element"):
            kv.KVCache.wrap(pool, [overlapping], [np.zeros((5, 4, 2, 8), np.float32)])

    @pytest.fixture
    def step(self):
        cache = kv.KVCache(kv.BlockPool(8, 4), 2, 2, 8)
        fill(cache.keys[0], 7)
        yield cache, HandMadePlan.of([3, 5], 4, 6, 2), np.ones((2, 2, 8), np.float32)
        assert all((x == (7 if x is cache.keys[0] else 0)).all() for x in (*cache.keys, *cache.values))

    @pytest.mark.parametrize(("layer", "error"), [(2, IndexError), (-1, IndexError), ("0", TypeError)])
    def test_layer(self, step, layer, error):
        cache, plan, x = step
        with pytest.raises(error, match="layer must be"):
            cache.write(layer, x, x, plan)

    @pytest.mark.parametrize("name", ["k", "v"])
    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (np.ones((2, 2, 8)), TypeError),
            (np.ones((3, 2, 8), np.float32), ValueError),
            (np.ones((2, 1, 8), np.float32), ValueError),
            (np.ones((2, 2, 4), np.float32), ValueError),
            (np.ones((2, 16), np.float32), ValueError),
            (None, TypeError),
        ],
    )
    def test_values_to_write(self, step, name, bad, error):
        cache, plan, x = step
        with pytest.raises(error, match=f"^{name} must"):
            cache.write(0, **{"k": x, "v": x, name: bad}, plan=plan)

    @pytest.mark.parametrize(
        ("slots", "error", "words"),
        [
            ([12, 36], IndexError, r"slot_mapping\[1\] must be below 36 .* not 36"),
            ([2**40, 1], IndexError, r"slot_mapping\[0\] must be below"),
            ([12], ValueError, "number of tokens"),
            ([[12, 13]], ValueError, "plan.slot_mapping must have 1 dimensions"),
        ],
    )
    def test_slots(self, step, slots, error, words):
        cache, plan, x = step
        plan.slot_mapping = np.array(slots, np.int64)
        with pytest.raises(error, match=words):
            cache.write(0, x, x, plan)

    @pytest.mark.parametrize(
        ("copies", "error", "words"),
        [
            ([[1, 2], [0, 3]], IndexError, r"copies\[1\] must name blocks between 1 and 8, not 0"),
            ([[1, 2], [3, 9]], IndexError, r"copies\[1\] must name blocks between 1 and 8, not 9"),
            ([[1, 2], [3, -1]], IndexError, r"copies\[1\] must name blocks"),
            ([[1, 2], [3, 2]], ValueError, r"copies\[1\] must not have the destination 2"),
            ([[1, 2, 3]], ValueError, r"copies must be of shape \[c, 2\]"),
            ([1, 2], ValueError, "plan.copies must have 2 dimensions"),
        ],
    )
    def test_copies(self, step, copies, error, words):
        cache, plan, _ = step
        plan.copies = np.array(copies, np.int32)
        with pytest.raises(error, match=words):
            cache.apply_copies(plan)
        if np.shape(copies) == (
            2,
            2,
        ):  # a refused call has not been made: the plan's copies are still to be done
            with pytest.raises(RuntimeError, match="apply_copies"):
                cache.write(0, np.ones((2, 2, 8), np.float32), np.ones((2, 2, 8), np.float32), plan)


def planned(num_blocks, block_size):
    pool = kv.BlockPool(num_blocks, block_size)
    batch = kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=64)
    sequence = pool.sequence(range(3))
    batch.add(sequence)
    return pool, sequence, batch.plan()


def test_a_plan_of_another_pool_is_refused():
    pool, _sequence, own = planned(8, 4)
    _pool, _other, foreign = planned(100, 8)
    cache = kv.KVCache(pool, 1, 1, 8)
    x = np.ones((3, 1, 8), np.float32)
    for call in (
        lambda: cache.apply_copies(foreign),
        lambda: cache.write(0, x, x, foreign),
        lambda: cache.attend(0, x, foreign),
    ):
        with pytest.raises(ValueError, match="plan must be of the cache's pool"):
            call()
    assert not cache.keys[0].any()
    cache.write(0, x, x, own)
    assert cache.keys[0].sum() == 3 * 8
    own.commit()
    foreign.commit()


def test_a_plan_that_was_rolled_back_writes_into_nobodys_block():
    pool, _sequence, plan = planned(8, 4)
    cache = kv.KVCache(pool, 1, 1, 8)
    plan.rollback()
    x = np.ones((3, 1, 8), np.float32)
    for call in (
        lambda: cache.apply_copies(plan),
        lambda: cache.write(0, x, x, plan),
        lambda: cache.attend(0, x, plan),
    ):
        with pytest.raises(kv.StaleHandle, match="rolled back"):
            call()
    assert not cache.keys[0].any()
