"""`KVSpec`: bytes of K and V."""

from __future__ import annotations

import kvfolio as kv
import numpy as np
import pytest


def test_bytes_are_those_of_the_arrays():
    for dtype, block_size in (("float32", 16), ("float16", 1), ("bfloat16", 32)):
        pool = kv.BlockPool(9, block_size)
        cache = kv.KVCache(pool, 3, 2, 80, dtype=dtype)
        spec = kv.KVSpec(3, 2, 80, dtype, block_size)
        assert spec.bytes_per_block * pool.num_physical_blocks == cache.nbytes
        assert spec.bytes_per_token * block_size == spec.bytes_per_block


def test_a_known_model_takes_what_is_published():
    spec = kv.KVSpec(32, 8, 128, "bfloat16", 16)  # Llama 3 8B: 128 KiB a token
    assert (spec.bytes_per_token, spec.bytes_per_block) == (131_072, 2 * 2**20)


def test_alignment_rounds_a_block_up():
    spec = kv.KVSpec(1, 1, 8, "float16", 3, alignment=64)
    assert spec.bytes_per_token == 32
    assert spec.bytes_per_block == 128
    assert kv.KVSpec(1, 1, 8, "float16", 4, alignment=64).bytes_per_block == 128


def test_blocks_in_counts_whole_blocks():
    spec = kv.KVSpec(1, 1, 8, "float16", 4)
    assert [spec.blocks_in(n) for n in (0, 127, 128, 255, 256, 2**70)] == [0, 0, 1, 1, 2, 2**63]


def test_dtypes_go_by_name_or_object():
    assert kv.KVSpec(1, 1, 8, np.float16, 4) == kv.KVSpec(1, 1, 8, "float16", 4)
    assert kv.KVSpec(1, 1, 8, np.dtype("float32"), 4).dtype == "float32"
    torch = pytest.importorskip("torch")
    assert kv.KVSpec(1, 1, 8, torch.bfloat16, 4) == kv.KVSpec(1, 1, 8, "bfloat16", 4)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size", "alignment"])
def test_sizes_below_one_or_not_whole_are_refused_by_name(name):
    good = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "float16", "block_size": 4}
    for value, error in (
        (0, ValueError),
        (-1, ValueError),
        (1.0, TypeError),
        (True, TypeError),
        ("1", TypeError),
    ):
        with pytest.raises(error, match=f"{name} must be"):
            kv.KVSpec(**{**good, name: value})


def test_other_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, not 'int8'"):
        kv.KVSpec(1, 1, 8, "int8", 4)
    with pytest.raises(TypeError, match="dtype must be one of"):
        kv.KVSpec(1, 1, 8, None, 4)
    with pytest.raises(ValueError, match="num_bytes must be at least 0, not -1"):
        kv.KVSpec(1, 1, 8, "float16", 4).blocks_in(-1)
