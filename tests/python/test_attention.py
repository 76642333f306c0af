"""`KVCache.attend` against float64. Every slot that no sequence owns is NaN in these tests."""

from __future__ import annotations

import itertools

import kvfolio as kv
import numpy as np
import pytest
from attention_reference import (
    Bench,
    HandMadePlan,
    assert_close,
    attention,
    fill,
    numpy_dtype,
    poison_unowned,
    rounded,
    to_float64,
    torch,
)

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")
ARRAYS = ["numpy", pytest.param("torch", marks=needs_torch)]
DTYPES = ["float32", "float16", "bfloat16"]
OPTIONS = {
    "scale": 0.3,
    "sliding_window": 21,
    "logit_softcap": 1.5,
    "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, -0.03, 0.0, 1.0, 0.01],
    "sinks": [0.0, 1.0, -1.0, 3.0, -np.inf, 5.0, 0.5, -20.0],
}


def make_cache(block_size=16, heads=2, head_dim=64, dtype="float32", array="numpy", num_blocks=None):
    pool = kv.BlockPool(num_blocks or 1024 // block_size, block_size)
    cache = kv.KVCache(pool, 1, heads, head_dim, dtype=dtype, array=array)
    for storage in (*cache.keys, *cache.values):
        fill(storage, np.nan)
    return cache


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_prefill_then_decode_is_right_for_every_block_size_head_dim_and_group(block_size, head_dim, group):
    bench = Bench(make_cache(block_size, 2, head_dim), [1, 33, 100, 5])
    for _ in range(2):
        _, got, expected = bench.step(2 * group)
        assert_close(got, expected)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_array_kind_comes_out_as_it_went_in(dtype, array):
    bench = Bench(make_cache(dtype=dtype, array=array), [40, 3, 129])
    for _ in range(3):
        _, got, expected = bench.step(8)
        assert_close(got, expected, dtype)
        assert type(got[0]) is type(bench.q) is type(got[1]) and got[0].dtype == bench.q.dtype
        if array == "torch":
            assert got[0].dtype == getattr(torch, dtype) and got[1].dtype == torch.float32
        else:
            assert got[0].dtype == numpy_dtype(dtype) and got[1].dtype == np.float32


def test_a_prompt_in_chunks_gives_what_it_gives_at_once():
    at_once, chunked = (Bench(make_cache(), [150], seed=3) for _ in range(2))
    k, v, q = (at_once.numbers(150, heads, 64) for heads in (2, 2, 8))

    def run(bench, start, stop):
        plan = bench.batch.plan(max_tokens=stop - start)
        bench.cache.write(0, k[start:stop], v[start:stop], plan)
        poison_unowned(bench.cache, plan)
        out = bench.cache.attend(0, q[start:stop], plan)
        plan.commit()
        return out

    whole = run(at_once, 0, 150)
    bounds = [0, 1, 17, 64, 65, 149, 150]
    parts = [run(chunked, start, stop) for start, stop in itertools.pairwise(bounds)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(whole, attention(q, k, v)[0], rtol=0, atol=2e-5)


def test_prefill_chunks_and_decode_go_together_in_one_call():
    bench = Bench(make_cache(), [70, 2, 1])
    bench.step(8)
    bench.add(range(500, 590))
    kinds = set()
    for _ in range(4):
        plan, got, expected = bench.step(8, max_tokens=40)
        assert_close(got, expected)
        kinds.add(tuple(np.diff(plan.query_start_loc).tolist()))
    assert (1, 1, 1, 37) in kinds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [c for n in range(6) for c in itertools.combinations(OPTIONS, n)])
def test_options_work_alone_and_in_every_combination(names, dtype):
    bench = Bench(make_cache(block_size=4, dtype=dtype), [1, 50, 90])
    for _ in range(2):
        _, got, expected = bench.step(8, **{name: OPTIONS[name] for name in names})
        assert_close(got, expected, dtype)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 10_000])
def test_a_window_counts_the_query_itself(window):
    bench = Bench(make_cache(), [100, 16, 1])
    for _ in range(2):
        _, got, expected = bench.step(2, sliding_window=window)
        assert_close(got, expected)
    if window == 1:  # each query sees its own position only: its value comes out
        values = np.concatenate([v[-1:] for _, v in bench.truth.values()])
        np.testing.assert_allclose(got[0], values, rtol=0, atol=2e-5)


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_err_at_most_twice_as_much_as_torch(dtype):
    bench = Bench(make_cache(dtype=dtype, array="torch", heads=2, head_dim=128), [200])
    _, (out, _), (expected, _) = bench.step(8)
    k, v = (torch.from_numpy(x).to(out.dtype).transpose(0, 1)[None] for x in bench.truth[0])
    q = bench.q.transpose(0, 1)[None]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    allowed = np.abs(to_float64(theirs[0].transpose(0, 1)) - expected).max()
    assert np.abs(to_float64(out) - expected).max() <= 2 * allowed + 1e-5


def test_long_contexts_stay_exact():
    bench = Bench(make_cache(num_blocks=300), [4000])
    for _ in range(2):
        _, got, expected = bench.step(2, scale=1.0)
        assert_close(got, expected)


def test_lse_merges_parts_of_a_context():
    bench = Bench(make_cache(), [64])
    bench.step(8)
    _, (out, lse), _ = bench.step(8)
    q, (k, v) = to_float64(bench.q), bench.truth[0]
    left, left_lse = attention(q, k[:40], v[:40])
    right, right_lse = attention(q, k[40:], v[40:])
    total = np.logaddexp(left_lse, right_lse)
    merged = left * np.exp(left_lse - total)[..., None] + right * np.exp(right_lse - total)[..., None]
    np.testing.assert_allclose(out, merged, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse, total, rtol=0, atol=2e-5)


def test_a_fork_reads_the_shared_blocks_and_writes_its_own():
    bench = Bench(make_cache(), [37])
    bench.step(8)
    batch = bench.batch
    twin = batch.add(batch.remove(0).fork())
    assert twin == 0
    bench.truth = {0: bench.truth[0]}
    _, got, expected = bench.step(8)
    assert_close(got, expected)


def test_beams_that_share_a_partial_block_do_not_see_each_other():
    bench = Bench(make_cache(), [37, 37])
    bench.step(8)
    bench.batch.reorder([0, 0])
    bench.truth[1] = bench.truth[0]
    plan, got, expected = bench.step(8)
    assert len(plan.copies) >= 1
    assert_close(got, expected)


def test_a_discarded_block_in_sight_is_refused_and_one_out_of_sight_is_not_read():
    cache = make_cache()
    bench = Bench(cache, [])
    sequence = cache.pool.sequence(list(range(100)), read_cache=False)
    row = bench.batch.add(sequence)
    empty = np.empty((0, 2, 64))
    bench.truth[row] = (empty, empty)
    bench.step(8, sliding_window=20)
    sequence.discard_before(64)
    _, got, expected = bench.step(8, sliding_window=37)  # the query stands at 100 and sees 64 and on
    assert_close(got, expected)
    plan = bench.batch.plan()
    q = bench.numbers(1, 8, 64)
    cache.write(0, *(bench.numbers(1, 2, 64) for _ in range(2)), plan)
    with pytest.raises(ValueError, match=r"block_table\[0, 3\] is the null block.*sliding_window"):
        cache.attend(0, q, plan, sliding_window=39)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is the null block"):
        cache.attend(0, q, plan)
    assert np.isfinite(cache.attend(0, q, plan, sliding_window=38)).all()
    plan.commit()


def test_an_empty_sequence_gives_zeros_and_lse_of_minus_infinity():
    cache = make_cache()
    plan = HandMadePlan.of([3], 16, 2, 2)
    plan.seq_lens[:] = 0
    q = np.ones((2, 4, 64), np.float32)
    out, lse = cache.attend(0, q, plan, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    out, lse = cache.attend(0, q, plan, return_lse=True, sinks=[1, 2, 3, 4])
    assert (out == 0).all() and (lse == [1, 2, 3, 4]).all()


def test_a_step_without_tokens_gives_nothing():
    cache = make_cache()
    plan = Bench(cache, []).batch.plan()
    out, lse = cache.attend(0, np.empty((0, 4, 64), np.float32), plan, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    plan.commit()


def test_rows_of_the_block_table_may_lie_apart():
    cache, length = make_cache(block_size=4), 30
    plan = HandMadePlan.of([9, 3, 7, 20, 1, 2, 5, 8], 4, length, length)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((length, heads, 64), np.float32) for heads in (4, 2, 2))
    cache.write(0, k, v, plan)
    expected = attention(q, k, v)[0]
    wide = np.full((3, 20), -1, np.int32)
    wide[1, :8] = plan.block_table
    for table in (wide[1:2, :8], wide[1:2], np.asfortranarray(np.repeat(plan.block_table, 2, 0))[:1]):
        plan.block_table = table
        np.testing.assert_allclose(cache.attend(0, q, plan), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cut", ["token", "head", "reversed", "dim"])
def test_queries_with_strides_are_read_in_place_or_copied(cut):
    cache, length = make_cache(), 20
    plan = HandMadePlan.of([9, 3], 16, length, length)
    random = np.random.default_rng(0)
    k, v = (random.standard_normal((length, 2, 64), np.float32) for _ in range(2))
    cache.write(0, k, v, plan)
    wide = random.standard_normal((2 * length, 8, 128), np.float32)
    q = {
        "token": wide[::2, :4, :64],
        "head": wide[:length, ::2, 64:],
        "reversed": wide[length - 1 :: -1, 3::-1, :64],
        "dim": wide[:length, :4, ::2],
    }[cut]
    np.testing.assert_allclose(cache.attend(0, q, plan), attention(q, k, v)[0], rtol=0, atol=2e-5)


def test_nan_outside_the_window_or_in_the_future_changes_nothing():
    cache, length = make_cache(block_size=4), 30
    plan = HandMadePlan.of([9, 3, 7, 20, 1, 2, 5, 8], 4, length, 8)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((length, heads, 64), np.float32) for heads in (4, 2, 2))
    plan_all = HandMadePlan.of([9, 3, 7, 20, 1, 2, 5, 8], 4, length, length)
    cache.write(0, k, v, plan_all)
    clean = cache.attend(0, q[-8:], plan, sliding_window=5)
    k[[20, 29]], v[[20, 29]] = np.nan, np.nan
    cache.write(0, k, v, plan_all)
    out = cache.attend(0, q[-8:], plan, sliding_window=5)
    sees = np.array([p - 5 < 20 or p == 29 for p in range(22, 30)])
    assert np.isnan(out[sees]).all()
    np.testing.assert_array_equal(out[~sees], clean[~sees])


def test_addresses_beyond_32_bits_are_reached():
    blocks, block_size, heads, head_dim = (
        140_000,
        16,
        8,
        128,
    )  # 2.3e9 elements each of K and V, of which few are touched
    pool = kv.BlockPool(blocks, block_size)
    try:
        cache = kv.KVCache(pool, 1, heads, head_dim, dtype="float16")
    except MemoryError:
        pytest.skip("the system does not promise so much memory")
    assert cache.keys[0].size > 2**31
    length = 40
    plan = HandMadePlan.of([blocks, 5, blocks - 1], block_size, length, length)
    random = np.random.default_rng(0)
    q, k, v = (rounded(random.standard_normal((length, h, head_dim)), "float16") for h in (8, heads, heads))
    cache.write(0, k, v, plan)
    out, lse = cache.attend(0, q, plan, return_lse=True)
    assert_close((out, lse), attention(q, k, v), "float16")
    plan.copies = np.array([[blocks, blocks - 2]], np.int32)
    cache.apply_copies(plan)
    assert (cache.values[0][blocks - 2] == v[:16]).all()


class TestBadInput:
    """Each is refused by a typed error that names the argument; nothing is computed."""

    @pytest.fixture
    def step(self):
        cache = make_cache(block_size=4)
        plan = HandMadePlan.of([9, 3, 7], 4, 10, 2)
        return cache, plan, np.ones((2, 4, 64), np.float32)

    @pytest.mark.parametrize(
        ("layer", "error"), [(1, IndexError), (-1, IndexError), (0.0, TypeError), (True, TypeError)]
    )
    def test_layer(self, step, layer, error):
        cache, plan, q = step
        with pytest.raises(error, match="layer must be"):
            cache.attend(layer, q, plan)

    @pytest.mark.parametrize(
        ("q", "error"),
        [
            (np.ones((2, 4, 64)), TypeError),
            (np.ones((2, 4, 64), np.float16), TypeError),
            (np.ones((2, 4, 64), ">f4"), TypeError),
            ([[1.0]], TypeError),
            (None, TypeError),
            (np.ones((3, 4, 64), np.float32), ValueError),
            (np.ones((2, 4, 32), np.float32), ValueError),
            (np.ones((2, 3, 64), np.float32), ValueError),
            (np.ones((2, 0, 64), np.float32), ValueError),
            (np.ones((2, 256), np.float32), ValueError),
        ],
    )
    def test_queries(self, step, q, error):
        cache, plan, _ = step
        with pytest.raises(error, match="^q must"):
            cache.attend(0, q, plan)

    @needs_torch
    def test_device(self, step):
        cache, plan, _ = step
        with pytest.raises(ValueError, match="q must be on the cpu.*meta"):
            cache.attend(0, torch.ones((2, 4, 64), device="meta"), plan)

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("scale", np.nan, ValueError),
            ("scale", 1e300, ValueError),
            ("scale", "1", TypeError),
            ("sliding_window", 0, ValueError),
            ("sliding_window", -3, ValueError),
            ("sliding_window", 2.0, TypeError),
            ("logit_softcap", 0.0, ValueError),
            ("logit_softcap", -1, ValueError),
            ("logit_softcap", np.inf, ValueError),
            ("alibi_slopes", [1.0], ValueError),
            ("alibi_slopes", [1.0, 2.0, 3.0, np.nan], ValueError),
            ("alibi_slopes", ["a"] * 4, TypeError),
            ("sinks", np.ones((4, 1)), ValueError),
            ("sinks", [1.0, 2.0, 3.0, np.inf], ValueError),
            ("sinks", [1.0, 2.0, 3.0, np.nan], ValueError),
        ],
    )
    def test_options(self, step, name, value, error):
        cache, plan, q = step
        with pytest.raises(error, match=f"{name} must"):
            cache.attend(0, q, plan, **{name: value})

    @pytest.mark.parametrize(
        ("name", "value", "error", "words"),
        [
            (
                "block_table",
                [[9, 300, 7]],
                IndexError,
                r"block_table\[0, 1\] must be between 1 and 256, not 300",
            ),
            ("block_table", [[9, 3, -1]], IndexError, r"block_table\[0, 2\] must be"),
            ("block_table", [[9, 0, 7]], ValueError, r"block_table\[0, 1\] is the null block"),
            ("block_table", [[9, 3]], ValueError, r"seq_lens\[0\] must be .* 8 .*, not 10"),
            (
                "block_table",
                [[9, 3, 7]] * 2,
                ValueError,
                "block_table must have 1 as its number of rows, not 2",
            ),
            ("block_table", [9, 3, 7], ValueError, "plan.block_table must have 2 dimensions"),
            ("seq_lens", [-1], ValueError, r"seq_lens\[0\] must be"),
            ("seq_lens", [1], ValueError, r"seq_lens\[0\] must be .* 2 "),
            ("seq_lens", [10, 10], ValueError, "block_table must have 2 as its number of rows"),
            ("query_start_loc", [1, 2], ValueError, r"query_start_loc\[0\] must be 0"),
            ("query_start_loc", [0, 3, 2], ValueError, "query_start_loc must have 2 as its length, not 3"),
        ],
    )
    def test_plan_arrays(self, step, name, value, error, words):
        cache, plan, q = step
        setattr(plan, name, np.array(value, np.int32))
        with pytest.raises(error, match=words):
            cache.attend(0, q, plan)

    def test_plan_kinds(self, step):
        cache, plan, q = step
        with pytest.raises(TypeError, match="plan must be a Plan"):
            cache.attend(0, q, None)
        plan.seq_lens = plan.seq_lens.astype(np.int64)
        with pytest.raises(TypeError, match="plan.seq_lens must be of dtype int32, not int64"):
            cache.attend(0, q, plan)
        plan.seq_lens = [10]
        with pytest.raises(TypeError, match="numpy array seq_lens"):
            cache.attend(0, q, plan)
