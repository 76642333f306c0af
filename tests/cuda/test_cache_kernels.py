"""Append, copies and table updates against numpy, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from harness import (
    Append,
    CopyBlocks,
    Failed,
    Pointer,
    Program,
    Sparse,
    Storage,
    Tokens,
    UpdateTable,
    storage,
    tokens,
)

VARIANTS = ["plain", "asan", "tsan"]
BLOCKS, BLOCK_SIZE, HEADS = 7, 4, 3


def layouts(head_dim, itemsize):
    """Memory, and K and V as [blocks, block_size, heads, head_dim] views of it, V's bytes behind K's."""
    shape = (BLOCKS, BLOCK_SIZE, HEADS, head_dim)
    kind = np.dtype(f"u{itemsize}")

    def fresh(*dims):
        return np.random.default_rng(7).integers(0, 2 ** (8 * itemsize), dims, kind)

    nhd, hnd = fresh(2, *shape), fresh(2, BLOCKS, HEADS, BLOCK_SIZE, head_dim)
    packed = fresh(BLOCKS, BLOCK_SIZE, HEADS, 2, head_dim)
    half = nhd[0].nbytes
    yield "NHD", nhd, (nhd[0], nhd[1]), half
    yield "HND", hnd, tuple(part.swapaxes(1, 2) for part in hnd), half
    yield "packed", packed, (packed[:, :, :, 0], packed[:, :, :, 1]), head_dim * itemsize


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 4), (6, 2), (3, 2)])
def test_append_puts_each_token_into_its_slot_and_touches_nothing_else(runner, variant, head_dim, itemsize):
    program, checks = Program(), []
    slots = np.array([5, -1, 27, 0, -7, 14], np.int64)
    for _, memory, (keys, values), offset in layouts(head_dim, itemsize):
        wide = np.random.default_rng(1).integers(0, 255, (len(slots), 2 * HEADS + 1, head_dim), keys.dtype)
        k, v = wide[:, :HEADS], wide[:, HEADS + 1 :]  # as a projection of Q, K and V in one leaves them
        expected = memory.copy()
        for token, slot in enumerate(slots):
            if slot >= 0:
                for view, new in ((keys, k), (values, v)):
                    view[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new[token]
        expected, memory[...] = memory.copy(), expected
        arguments = Append(
            tokens(k), tokens(v), storage(keys), storage(values), None, len(slots), HEADS,
            head_dim * itemsize, BLOCK_SIZE,
        )  # fmt: skip
        program.call(
            arguments, slots=slots, k__data=wide, v__data=Pointer(wide, (HEADS + 1) * head_dim * itemsize),
            keys__data=memory, values__data=Pointer(memory, offset),
        )  # fmt: skip
        checks.append((memory, expected))
    program.run(runner(variant))
    for memory, expected in checks:
        np.testing.assert_array_equal(memory, expected)


def test_append_reaches_slots_beyond_four_gibibytes(runner):
    """Block 5 begins at byte 5 * 2^30 of K, and 2^32 tokens' slots need 64 bits, too."""
    stride, row = 1 << 30, 128
    k = np.arange(2 * 64, dtype=np.uint16).reshape(2, 1, 64)
    keys, values = (
        Sparse(5 * stride + 4096, [(block * stride, np.zeros(4096, np.uint8)) for block in (0, 1, 4, 5)])
        for _ in range(2)
    )
    program = Program()
    slots = np.array([5 * 16 + 3, 1 * 16 + 1], np.int64)
    for array in (keys, values):
        for start, piece in array.pieces:  # all but the two slots
            mine = [slot % 16 * row for slot in slots.tolist() if slot // 16 * stride == start]
            for begin, end in zip([0, *(at + row for at in mine)], [*mine, len(piece)], strict=True):
                program.forbid(array, start + begin, end - begin)
    arguments = Append(
        Tokens(None, row, row), Tokens(None, row, row), Storage(None, stride, row, row),
        Storage(None, stride, row, row), None, 2, 1, row, 16,
    )  # fmt: skip
    program.call(arguments, slots=slots, k__data=k, v__data=k, keys__data=keys, values__data=values)
    program.run(runner("asan"))
    for array in (keys, values):
        pieces = dict(array.pieces)
        for token, slot in enumerate(slots):
            piece = pieces[slot // 16 * stride]
            assert (piece[slot % 16 * row :][:row] == k[token].reshape(-1).view(np.uint8)).all()
            piece[slot % 16 * row :][:row] = 0
        assert not any(piece.any() for piece in pieces.values())


def test_append_of_a_slot_outside_the_storage_is_loud(runner):
    memory = np.zeros((2, BLOCKS, BLOCK_SIZE, HEADS, 64), np.uint16)
    k = np.zeros((1, HEADS, 64), np.uint16)
    arguments = Append(
        tokens(k), tokens(k), storage(memory[0]), storage(memory[1]), None, 1, HEADS, 128, BLOCK_SIZE
    )
    program = Program()
    slots = np.array([2 * BLOCKS * BLOCK_SIZE], np.int64)
    program.call(arguments, slots=slots, k__data=k, v__data=k, keys__data=memory, values__data=memory)
    with pytest.raises(Failed, match=r"append\.cuh:\d+(.|\n)*that was thread \(0,0,0\) of block \(0,0,0\)"):
        program.run(runner("asan"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 4), (6, 2), (3, 2)])
def test_copies_move_whole_blocks_of_every_array_in_one_launch(runner, variant, head_dim, itemsize):
    program, checks = Program(), []
    pairs = np.array([[1, 4], [0, 0], [1, 6], [3, 2]], np.int32)
    for _, memory, (keys, _), offset in layouts(head_dim, itemsize):
        layers = [memory, memory.copy() + 1, memory.copy() + 2]
        for layer in layers:
            view = layer.reshape(-1)
            whole = [np.lib.stride_tricks.as_strided(view[start // itemsize :], keys.shape, keys.strides)
                     for start in (0, offset)]  # fmt: skip
            before = layer.copy()
            for part in whole:
                part[pairs[:, 1]] = part[pairs[:, 0]]
            expected, layer[...] = layer.copy(), before
            checks.append((layer, expected))
            for block in (0, 5):  # in no pair, but for the padding
                for token, head in np.ndindex(BLOCK_SIZE, HEADS):
                    within = np.dot((block, token, head), keys.strides[:3])
                    for start in (0, offset):
                        program.forbid(layer, int(start + within), head_dim * itemsize)
        arguments = CopyBlocks(
            (), *keys.strides[:3], None, len(pairs), 6, HEADS, head_dim * itemsize, BLOCK_SIZE
        )
        pointers = {f"arrays__{2 * i}": layer for i, layer in enumerate(layers)}
        pointers |= {f"arrays__{2 * i + 1}": Pointer(layer, offset) for i, layer in enumerate(layers)}
        program.call(arguments, pairs=pairs, **pointers)
    program.run(runner(variant))
    for layer, expected in checks:
        np.testing.assert_array_equal(layer, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_updates_change_the_cells_that_they_name(runner, variant):
    table = np.arange(300 * 9, dtype=np.int32).reshape(300, 9)
    random = np.random.default_rng(3)
    cells = random.permutation(300 * 5)[:500]
    updates = np.stack([cells // 5, cells % 5, random.integers(0, 1 << 24, 500)], axis=1).astype(np.int32)
    updates[::50, 0] = -1
    expected = table.copy()
    for row, block, new in updates:
        if row >= 0:
            expected[row, block] = new
    program = Program()
    program.call(UpdateTable(None, None, 9, len(updates)), table=table, updates=updates)
    program.run(runner(variant))
    np.testing.assert_array_equal(table, expected)
