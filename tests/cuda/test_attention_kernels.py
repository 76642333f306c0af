"""Attention of the CUDA kernels, run in the emulator, against float64.

In every step all that no sequence owns is NaN, forbidden where AddressSanitizer looks, and the dead cells of
the block table hold ids of no block.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from harness import Attention, Failed, PlanAttention, Pointer, Program, Sparse, Storage, tokens
from paged import DTYPES, TILE_KEYS, Step

torch = pytest.importorskip("torch")

OPTIONS = {
    "scale": 0.3,
    "sliding_window": 70,
    "logit_softcap": 1.5,
    "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, -0.03, 0.0, 0.1, 0.01],
    "sinks": [0.0, 1.0, -1.0, 3.0, -np.inf, 5.0, 0.5, -20.0],
}
DECODE = [(300, 1), (113, 1), (1, 1), (64, 1)]
SPECULATION = [(150, 8), (66, 4), (130, 2)]
PREFILL = [(130, 130), (200, 67), (5, 5)]


def assert_close(step, out, lse):
    """Within twice the rounding of the storage type, and 1e-5."""
    expected, expected_lse = step.expected()
    kind = DTYPES[step.dtype][1]
    rounding = np.abs(expected.astype(np.float32).astype(kind).astype(np.float64) - expected).max()
    tolerance = 2e-5 if step.dtype == "float32" else 2 * rounding + 1e-5
    tolerance *= 1 if step.dtype == "float32" else 2  # weights are rounded, too, before they meet V
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2e-5)


def textbook(q, k, v):
    """Softmax of q k^T times v by torch in the storage type; queries are the last positions."""
    group = q.shape[1] // k.shape[1]
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[q.dtype.name]
    q, k, v = (torch.from_numpy(x.astype(np.float32)).to(kind).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    n, s = q.shape[1], k.shape[1]
    seen = torch.ones(n, s, dtype=torch.bool).tril(s - n)
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1).double().numpy()


@pytest.mark.parametrize("rows", [DECODE, SPECULATION, PREFILL], ids=["decode", "speculation", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads"), [(64, (4, 4)), (128, (8, 2)), (256, (8, 1))])
def test_errors_are_at_most_those_of_torch(runner, rows, dtype, head_dim, heads):
    """The rules of the CPU's kernels: at most twice torch's largest error, one and a half times its mean."""
    step = Step(rows, heads, head_dim, dtype)
    out, lse, _ = step.run(runner("plain"))
    expected, expected_lse = step.expected()
    theirs = np.abs(
        np.concatenate([textbook(*x) for x in zip(step.q, step.k, step.v, strict=True)]) - expected
    )
    ours = np.abs(out.astype(np.float64) - expected)
    slack = 2e-6 if dtype == "float32" else 1e-5
    assert ours.max() <= 2 * theirs.max() + slack
    assert ours.mean() <= 1.5 * theirs.mean() + slack / 10
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", ["asan", "tsan"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "schedule", [("descending", "early", 1), ("shuffled", "either", 5)], ids=["descending", "shuffled"]
)
def test_sanitizers_are_silent(runner, variant, dtype, schedule):
    # Chunks of up to five tiles: all stages are used again within one.
    options = OPTIONS | {"sliding_window": 480}
    step = Step(
        [(500, 1), (70, 1), (0, 1), (500, 10), (100, 40)], (8, 2), 64, dtype, options=options, extra=1
    )
    out, lse, headers = step.run(
        runner(variant), **dict(zip(("order", "landing", "seed"), schedule, strict=True))
    )
    assert_close(step, out, lse)
    assert [header[1:3].tolist() for header in headers] == [[1, 5], [1, 9]], "one merge in each list"


@pytest.mark.parametrize("names", [c for n in range(6) for c in itertools.combinations(OPTIONS, n)])
def test_options_work_alone_and_in_every_combination(runner, names):
    number = sum(2**i for i, name in enumerate(OPTIONS) if name in names)
    step = Step(
        [(200, 1), (90, 3), (75, 20)], (8, 2), 64, list(DTYPES)[number % 3], seed=number,
        block_size=(16, 4, 5)[number % 3], layout=("NHD", "HND", "packed")[number // 2 % 3],
        options={name: OPTIONS[name] for name in names},
    )  # fmt: skip
    assert_close(step, *step.run(runner("plain"))[:2])


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
def test_every_layout_and_block_size(runner, layout, block_size):
    step = Step([(129, 1), (90, 9), (3, 1)], (8, 2), 64, layout=layout, block_size=block_size)
    assert_close(step, *step.run(runner("asan"))[:2])


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 8), (20, 1), (80, 1), (12, 4)])
def test_every_size_of_group(runner, heads):
    step = Step([(100, 1), (70, 3)], heads)
    assert_close(step, *step.run(runner("plain"))[:2])


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 10_000])
def test_a_window_counts_the_query_itself(runner, window):
    step = Step([(200, 1), (129, 40), (1, 1)], (4, 1), options={"sliding_window": window})
    out, lse, _ = step.run(runner("asan"))
    assert_close(step, out, lse)
    if window == 1:
        np.testing.assert_array_equal(out[0], np.repeat(step.v[0][-1], 4, axis=0))


def test_blocks_before_the_window_are_not_read(runner):
    step = Step([(200, 1), (150, 40)], (4, 1), options={"sliding_window": 30})
    for row, first in ((0, 170), (1, 81)):  # what the first query sees
        for position in range(first):
            block, offset = step.block_table[row, position // 16], position % 16
            step.keys[block, offset] = step.values[block, offset] = np.nan
            step.owned[block, offset] = False
        step.block_table[row, : first // 16] = -5
    assert_close(step, *step.run(runner("asan"))[:2])


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_no_keys_give_zeros(runner, sinks):
    options = {"sinks": OPTIONS["sinks"]} if sinks else {}
    step = Step([(0, 1), (90, 1), (0, 2), (0, 9)], (8, 2), options=options, padding_rows=2)
    out, lse, _ = step.run(runner("asan"))
    assert not out[[0, *range(2, 13)]].any()
    expected = OPTIONS["sinks"] if sinks else [-np.inf] * 8
    np.testing.assert_allclose(lse[[0, *range(2, 13)]], [expected] * 12, rtol=1e-6)
    assert_close(step, out, lse)


def test_large_scores_neither_overflow_nor_vanish(runner):
    step = Step([(200, 1), (130, 20)], (8, 2), dtype="float32", spread=12.0)
    out, _, _ = step.run(runner("plain"))
    np.testing.assert_allclose(out, step.expected()[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_results_do_not_depend_on_the_schedule(runner, dtype):
    def run(*schedule):
        step = Step([(300, 1), (200, 40)], (8, 2), dtype=dtype, options=OPTIONS)
        return step.run(runner("plain"), **dict(zip(("order", "landing", "seed"), schedule, strict=True)))[:2]

    first = run("ascending", "late", 1)
    for schedule in (("descending", "early", 1), ("shuffled", "either", 2), ("shuffled", "late", 3)):
        for got, expected in zip(run(*schedule), first, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("queries", [1, 20])
def test_pages_beyond_four_gibibytes_are_reached(runner, queries):
    """Blocks lie 1 GiB apart, and three of six are owned: 32 bits would lead to the others."""
    stride, dim, ids = 1 << 30, 64, [5, 3, 4]
    step = Step([(40, queries)], (2, 1), dim)
    kind = step.q[0].dtype
    row = dim * kind.itemsize
    pieces = {side: [(block * stride, np.zeros(16 * row, np.uint8)) for block in range(6)] for side in "kv"}
    program, out, lse = Program(), np.zeros_like(step.q[0]), np.zeros(step.q[0].shape[:2], np.float32)
    sides = {}
    for side, numbers in (("k", step.k[0]), ("v", step.v[0])):
        sides[side] = Sparse(6 * stride, pieces[side])
        for i, block in enumerate(ids):
            part = numbers[16 * i : 16 * i + 16].reshape(-1).view(np.uint8)
            pieces[side][block][1][: len(part)] = part
        for block in (0, 1, 2):
            program.forbid(sides[side], block * stride, 16 * row)
    table, lengths = np.array([ids], np.int32), np.array([40], np.int32)
    starts, work = np.array([0, queries], np.int32), np.zeros(100, np.int32)
    rows = 16 if queries == 1 else 64
    common = {"work": work, "seq_lens": lengths, "query_start_loc": starts}
    program.call(
        PlanAttention(capacity=4, num_sequences=1, group=2, min_rows=1, max_rows=1000, tile_rows=rows,
                      tile_keys=TILE_KEYS[row, rows], window=0, extra=0, min_tiles=1), **common,
    )  # fmt: skip
    far = Storage(None, stride, row, row)
    program.call(
        Attention(q=tokens(step.q[0]), out=tokens(out), keys=far, values=far, table_stride=3, capacity=4,
                  dtype=DTYPES["bfloat16"][0], num_kv_heads=1, group=2, head_dim=dim, block_size=16,
                  tile_rows=rows, scale=dim**-0.5),
        q__data=step.q[0], out__data=out, lse=lse, block_table=table, **common,
        keys__data=sides["k"], values__data=sides["v"],
    )  # fmt: skip
    program.run(runner("asan"))
    assert_close(step, out, lse)


class TestWorkLists:
    def plan(
        self,
        runner,
        rows,
        group=4,
        extra=9,
        window=0,
        low=1,
        high=16,
        tile_rows=16,
        min_tiles=1,
        capacity=None,
    ):
        program = Program()
        starts = np.cumsum([0, *[n for _, n in rows]]).astype(np.int32)
        lengths = np.array([length for length, _ in rows], np.int32)
        taken = [i for i, (_, n) in enumerate(rows) if low <= n * group <= high]
        tiles = {i: -(-rows[i][1] * group // tile_rows) for i in taken}
        capacity = sum(tiles.values()) + extra if capacity is None else capacity
        work = np.full(4 + 5 * capacity, -1, np.int32)
        program.call(
            PlanAttention(capacity=capacity, num_sequences=len(rows), group=group, min_rows=low,
                          max_rows=high, tile_rows=tile_rows, tile_keys=64, window=window, extra=extra,
                          min_tiles=min_tiles),
            "shuffled", work=work, seq_lens=lengths, query_start_loc=starts,
        )  # fmt: skip
        program.run(runner)
        items = work[4 : 4 + 4 * capacity].reshape(-1, 4)[: work[0]]
        listed = [(s, t, c & 0xFFFF, c >> 16, p) for s, t, c, p in items.tolist()]
        return work[:4].tolist(), listed, work[4 + 4 * capacity :][: work[1]].tolist(), tiles

    @pytest.mark.parametrize("variant", ["asan", "tsan"])
    def test_every_tile_of_rows_has_all_its_chunks_once(self, runner, variant):
        random = np.random.default_rng(0)
        rows = [(int(length), int(random.integers(0, 6))) for length in random.integers(5, 3000, 600)]
        header, items, merges, tiles = self.plan(runner(variant), rows, extra=50)
        assert sorted({(s, t) for s, t, *_ in items}) == sorted(
            (s, t) for s, n in tiles.items() for t in range(n)
        )
        per_chunk, partials = header[2], []
        for sequence, tile in {(s, t) for s, t, *_ in items}:
            mine = [item for item in items if item[:2] == (sequence, tile)]
            assert [c for _, _, c, _, _ in mine] == list(range(len(mine)))
            assert all(n == len(mine) for *_, n, _ in mine)
            tiles_of_keys = math.ceil(rows[sequence][0] / 64)
            assert len(mine) == max(1, math.ceil(tiles_of_keys / per_chunk))
            assert (mine[0][4] == -1) == (len(mine) == 1)
            partials += [p for *_, p in mine if p >= 0]
        assert sorted(partials) == list(range(len(partials))) and len(partials) <= 100
        assert sorted(merges) == [i for i, item in enumerate(items) if item[3] > 1 and item[2] == 0]
        assert header[0] <= sum(tiles.values()) + 50 and header[3] == 0

    def test_one_long_sequence_is_cut_into_as_many_chunks_as_are_wanted(self, runner):
        header, items, _, _ = self.plan(runner("plain"), [(64 * 100, 1), (30, 1)], extra=19)
        assert header[2] == 5 and len(items) == 21
        header, items, _, _ = self.plan(runner("plain"), [(64 * 100, 1), (30, 1)], extra=19, min_tiles=30)
        assert header[2] == 30 and len(items) == 5

    def test_a_window_leaves_fewer_tiles(self, runner):
        header, items, _, _ = self.plan(runner("plain"), [(64 * 100, 1)], extra=19, window=128)
        assert header[2] == 1 and len(items) == 3  # 128 keys may lie in three tiles

    def test_sequences_of_other_sizes_are_left_to_the_other_list(self, runner):
        rows = [(100, 1), (100, 4), (100, 5), (100, 0), (100, 50)]
        assert {s for s, *_ in self.plan(runner("plain"), rows)[1]} == {0, 1}
        assert {s for s, *_ in self.plan(runner("plain"), rows, low=17, high=2**31 - 1, tile_rows=64)[1]} == {
            2,
            4,
        }

    def test_too_small_a_list_is_told_and_not_overrun(self, runner):
        header, items, _, _ = self.plan(runner("asan"), [(100, 1)] * 20, capacity=7)
        assert header[0] == 7 and header[3] == 1 and len(items) == 7

    def test_no_sequences(self, runner):
        assert self.plan(runner("asan"), [])[0][:2] == [0, 0]


def test_a_misaligned_head_is_refused_before_anything_is_launched(runner):
    step = Step([(10, 1)], (1, 1), 64)
    out = np.zeros((1, 1, 72), step.q[0].dtype)
    program = Program()
    arguments = Attention(
        q=tokens(step.q[0]),
        out=tokens(out),
        keys=Storage(),
        values=Storage(),
        capacity=1,
        head_dim=64,
        dtype=2,
    )
    program.call(arguments, q__data=step.q[0], out__data=Pointer(out, 4))
    with pytest.raises(Failed, match="attend returned -1"):
        program.run(runner("plain"))
