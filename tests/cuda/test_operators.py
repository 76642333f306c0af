"""`cuda/ops.cpp`, executed: a cache on a device, which is the CPU, with the kernels in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import toolchain

torch = pytest.importorskip("torch")

from attention_reference import Bench, assert_close  # noqa: E402
from kvfolio import ops  # noqa: E402
from test_ops import OPTIONS, make_cache  # noqa: E402
from torch.utils.cpp_extension import include_paths, library_paths  # noqa: E402


@pytest.fixture(scope="module")
def emulated():
    """The operators, under another name so that those of the wheel's own kernels stay."""
    library = torch.library.Library("kvfolio_emulated", "DEF")
    for schema in ops.SCHEMAS:
        library.define(schema)
    torch.ops.load_library(str(toolchain.operators(include_paths(), library_paths())))
    yield torch.ops.kvfolio_emulated
    library._destroy()


def cache_of(emulated, extra=6, **shape):
    cache = make_cache(**shape)
    cache._storage._ops, cache._storage._extra = emulated, extra
    return cache


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("names", [[], ["sliding_window"], list(OPTIONS)])
def test_prefill_and_decode_through_a_cache(emulated, dtype, names):
    bench = Bench(cache_of(emulated, dtype=dtype, block_size=8), [1, 200, 90])
    options = {name: OPTIONS[name] for name in names}
    for step in range(3):
        _, (out, lse), expected = bench.step(8, max_tokens=120, **options)
        # Weights are rounded before they meet V, which the CPU's kernels do not do: twice as much is allowed.
        half = expected[0] + (out.double().numpy() - expected[0]) / (1 if dtype == "float32" else 2)
        assert_close((half, lse), expected, dtype)
        assert step < 2 or out.shape[0] < 120


def test_all_layers_are_copied_and_written(emulated):
    bench = Bench(cache_of(emulated, block_size=4, layers=3), [6, 9])
    bench.step(8)
    bench.batch.reorder([0, 0], rows=[0, 1])
    plan = bench.batch.plan()
    cache, source = bench.cache, plan.copies[0, 0]
    assert (
        len(plan.copies) == 2 and (plan.copies[:, 0] == source).all()
    )  # both rows write into what they share
    for layer in range(3):
        cache.keys[layer][source] = layer + 1.0
        cache.values[layer][source] = -layer - 1.0
    cache.apply_copies(plan)
    k, v = bench.numbers(2, 2, 64), bench.numbers(2, 2, 64)
    cache.write(1, k, v, plan)
    for target in plan.copies[:, 1]:
        written = plan.slot_mapping[plan.slot_mapping // 4 == target] % 4
        assert len(written) == 1
        for layer in range(3):
            for storage, number in ((cache.keys, layer + 1.0), (cache.values, -layer - 1.0)):
                rest = np.setdiff1d(np.arange(4), written if layer == 1 else [])
                assert (storage[layer][int(target)][rest] == number).all()
    for token, slot in enumerate(plan.slot_mapping.tolist()):
        torch.testing.assert_close(cache.keys[1][slot // 4, slot % 4], k[token])
        torch.testing.assert_close(cache.values[1][slot // 4, slot % 4], v[token])
    plan.rollback()


def test_a_table_takes_updates(emulated):
    table = torch.zeros(5, 9, dtype=torch.int32)
    updates = torch.tensor([[1, 2, 9], [-1, 0, 5], [4, 8, 7]], dtype=torch.int32)
    emulated.update_table(table, updates)
    assert table.nonzero().tolist() == [[1, 2], [4, 8]] and (table[1, 2], table[4, 8]) == (9, 7)


class TestWhatIsRefused:
    @pytest.fixture
    def arguments(self):
        storage = torch.zeros(2, 5, 4, 2, 64)
        integers = {"dtype": torch.int32}
        return {
            "q": torch.zeros(3, 4, 64), "keys": storage[0], "values": storage[1],
            "block_table": torch.zeros(2, 2, **integers), "seq_lens": torch.tensor([6, 3], **integers),
            "query_start_loc": torch.tensor([0, 1, 3], **integers), "out": torch.zeros(3, 4, 64),
            "lse": torch.zeros(3, 4),
            "workspace": torch.zeros(ops.workspace_bytes(2, 3, 4, 2, 64, 1), dtype=torch.uint8),
            "scale": 1.0, "window": 0, "soft_cap": 0.0, "alibi_slopes": None, "sinks": None,
            "max_query_len": 2, "extra": 1,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"workspace": torch.zeros(64, dtype=torch.uint8)}, "workspace must have [0-9]+ bytes, not 64"),
            ({"extra": -1}, "extra must be in 0..65534, not -1"),
            ({"q": torch.zeros(3, 4, 64).half()}, "q is of the wrong dtype"),
            ({"q": torch.zeros(3, 64)}, "q must have 3 dimensions, not 2"),
            ({"q": torch.zeros(3, 3, 64)}, "num_heads must be a multiple"),
            ({"out": torch.zeros(2, 4, 64)}, "q and out must be"),
            ({"seq_lens": torch.zeros(2).long()}, "seq_lens is of the wrong dtype"),
            ({"sinks": torch.zeros(3)}, "sinks must have one number for each query head"),
            ({"lse": torch.zeros(3, 5)}, "lse must be contiguous"),
            ({"out": torch.zeros(3 * 4 * 64 + 1)[1:].view(3, 4, 64)}, "a shape, dtype or alignment"),
        ],
    )
    def test_attend(self, emulated, arguments, changes, words):
        with pytest.raises(RuntimeError, match=words):
            emulated.attend(*(arguments | changes).values())

    def test_append_and_copies(self, emulated, arguments):
        keys, values = arguments["keys"], arguments["values"]
        k = torch.zeros(2, 2, 64)
        with pytest.raises(RuntimeError, match="k and v must be"):
            emulated.append(k, k, keys, values, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="slot_mapping is of the wrong dtype"):
            emulated.append(k, k, keys, values, torch.zeros(2, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="pairs must be contiguous"):
            emulated.copy_blocks([keys, values], torch.zeros(1, 3, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="head_dim must be 64, 128 or 256, not 80"):
            emulated.plan_attention(
                arguments["seq_lens"], arguments["query_start_loc"],
                arguments["workspace"].new_zeros(100_000), 3, 4, torch.zeros(5, 4, 2, 80), 0, 1,
            )  # fmt: skip
