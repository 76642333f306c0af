"""Exports for other libraries' kernels, beside a slow computation from each sequence's own blocks."""

import itertools
from dataclasses import dataclass

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of
from kvfolio import exports

BLOCK_SIZE = 4


@pytest.fixture
def step():
    pool = kv.BlockPool(60, BLOCK_SIZE)
    batch = batch_of(pool, 5)
    seqs = [pool.sequence(range(100 * i, 100 * i + length)) for i, length in enumerate((9, 1, 4, 16))]
    rows = [batch.add(seq) for seq in seqs]
    batch.plan(rows=rows[::2]).commit()
    batch.extend([rows[0]], [7])
    with batch.plan(rows=rows[::-1]) as plan:
        in_order = [seqs[rows.index(row)] for row in plan.rows]
        yield plan, [(seq.block_ids.tolist(), seq.num_tokens) for seq in in_order]


def slots(blocks, length):
    return [blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)]


def test_flash_attention(step):
    plan, rows = step
    out = exports.flash_attention(plan)
    assert {name: str(array.dtype) for name, array in out.items()} == dict.fromkeys(out, "int32")
    assert out["cache_seqlens"].tolist() == [length for _, length in rows]
    for cells, (blocks, _) in zip(out["block_table"].tolist(), rows, strict=True):
        assert cells == blocks + [0] * (len(cells) - len(blocks))
    assert out["block_table"].strides[1] == 4  # contiguous last dimension


def test_flash_attention_3_calls_it_a_page_table(step):
    plan, _ = step
    out = exports.flash_attention_3(plan)
    assert set(out) == {"page_table", "cache_seqlens", "cu_seqlens_q"}
    assert {str(array.dtype) for array in out.values()} == {"int32"}
    np.testing.assert_array_equal(out["page_table"], plan.block_table)
    np.testing.assert_array_equal(out["cache_seqlens"], plan.seq_lens)
    np.testing.assert_array_equal(out["cu_seqlens_q"], plan.query_start_loc)


def test_flash_attention_for_any_number_of_tokens_in_each_row(step):
    plan, rows = step
    out = exports.flash_attention_varlen(plan)
    assert set(out) == {"block_table", "cu_seqlens_q", "cu_seqlens_k"}
    assert {str(array.dtype) for array in out.values()} == {"int32"}
    assert out["cu_seqlens_k"].tolist() == [sum(n for _, n in rows[:i]) for i in range(len(rows) + 1)]
    assert out["cu_seqlens_q"].tolist() == plan.query_start_loc.tolist()


def test_flashinfer(step):
    plan, rows = step
    out = exports.flashinfer(plan)
    assert {str(array.dtype) for array in out.values()} == {"int32"}
    indptr, indices = out["paged_kv_indptr"].tolist(), out["paged_kv_indices"].tolist()
    assert [indices[a:b] for a, b in itertools.pairwise(indptr)] == [blocks for blocks, _ in rows]
    last = out["paged_kv_last_page_len"].tolist()
    assert last == [(length - 1) % BLOCK_SIZE + 1 for _, length in rows]
    assert out["qo_indptr"].tolist() == plan.query_start_loc.tolist()


def test_vllm(step):
    plan, rows = step
    out = exports.vllm(plan)
    dtypes = {name: str(array.dtype) for name, array in out.items()}
    assert dtypes == dict.fromkeys(out, "int32") | {"slot_mapping": "int64"}
    counts = np.diff(plan.query_start_loc)
    expected = [s for (b, n), count in zip(rows, counts, strict=True) for s in slots(b, n)[n - count :]]
    assert out["slot_mapping"].tolist() == expected


@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_sglang(step, indices):
    plan, rows = step
    out = exports.sglang(plan, BLOCK_SIZE, indices=indices)
    assert out["kv_indptr"].dtype == out["kv_last_page_len"].dtype == np.int32
    assert out["kv_indices"].dtype == indices
    indptr, indices = out["kv_indptr"].tolist(), out["kv_indices"].tolist()
    assert [indices[a:b] for a, b in itertools.pairwise(indptr)] == [slots(*row) for row in rows]
    assert out["kv_last_page_len"].tolist() == [1] * len(rows), "a page is a token"
    assert out["out_cache_loc"].dtype == np.int64
    np.testing.assert_array_equal(out["out_cache_loc"], plan.slot_mapping)


@pytest.mark.parametrize("kernel_block_size", [1, 2, 4])
def test_a_table_for_smaller_pages_names_the_same_slots(step, kernel_block_size):
    plan, rows = step
    table = exports.expanded_block_table(plan.block_table, BLOCK_SIZE, kernel_block_size)
    assert table.dtype == np.int32
    for cells, (blocks, length) in zip(table, rows, strict=True):
        here = [
            cells[t // kernel_block_size] * kernel_block_size + t % kernel_block_size for t in range(length)
        ]
        assert here == slots(blocks, length)
        assert not cells[len(blocks) * BLOCK_SIZE // kernel_block_size :].any()


def test_pages_that_do_not_divide_a_block_are_refused(step):
    with pytest.raises(ValueError, match="kernel_block_size must divide 4, the block size, not 3"):
        exports.expanded_block_table(step[0].block_table, BLOCK_SIZE, 3)


@dataclass
class OneBlockARow:
    """As much of a plan as `exports.sglang` reads."""

    block_table: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray

    @classmethod
    def of(cls, block):
        return cls(np.array([[1], [block]], np.int32), np.ones(2, np.int32), np.zeros(2, np.int64))


def test_slots_that_int32_cannot_hold_are_refused():
    last = 2**31 // BLOCK_SIZE - 1
    assert exports.sglang(OneBlockARow.of(last), BLOCK_SIZE)["kv_indices"].tolist() == [4, 4 * last]
    with pytest.raises(
        OverflowError, match=rf"kv_indices must be slots below 2\*\*31, not up to {2**31 + 3}"
    ):
        exports.sglang(OneBlockARow.of(last + 1), BLOCK_SIZE)
    wide = exports.sglang(OneBlockARow.of(last + 1), BLOCK_SIZE, indices=np.int64)
    assert wide["kv_indices"].tolist() == [4, 2**31]
    with pytest.raises(TypeError, match=r"indices must be numpy.int32 or numpy.int64, not 'int32'"):
        exports.sglang(OneBlockARow.of(1), BLOCK_SIZE, indices="int32")
