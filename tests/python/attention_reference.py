"""What attention should give, in float64 and without paging, and steps of a batch to hold against it."""

from __future__ import annotations

from dataclasses import dataclass, field

import kvfolio as kv
import numpy as np

try:
    import torch
except ImportError:
    torch = None

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


def attention(q, k, v, *, scale=None, sliding_window=None, logit_softcap=None, alibi_slopes=None, sinks=None):
    """Out and lse of one sequence's last queries: q [n, H, D], k and v [s, G, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    key, query = np.arange(len(k)), np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.einsum("nhd,shd->hns", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if logit_softcap is not None:
        scores = logit_softcap * np.tanh(scores / logit_softcap)
    if alibi_slopes is not None:
        scores = scores + np.asarray(alibi_slopes, np.float64)[:, None, None] * (key - query)
    seen = key <= query
    if sliding_window is not None:
        seen &= key > query - sliding_window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sink], axis=2)
    largest = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - largest)
    denominator = weights.sum(axis=2, keepdims=True)
    out = np.einsum("hns,shd->nhd", (weights / denominator)[:, :, : len(k)], v)
    return out, (largest + np.log(denominator))[:, :, 0].T


def numpy_dtype(name):
    """The numpy dtype under which kvfolio hands out a storage type."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16) if ml_dtypes else np.dtype(np.uint16)
    return np.dtype(name)


def to_float64(array):
    """The numbers of an array or tensor of any storage type."""
    if torch is not None and isinstance(array, torch.Tensor):
        return array.double().cpu().numpy()
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.asarray(array, np.float64)


def rounded(numbers, dtype, array="numpy"):
    """The numbers as an array or tensor of a storage type."""
    numbers = np.asarray(numbers, np.float32)
    if array == "torch":
        return torch.from_numpy(numbers.copy()).to(getattr(torch, dtype))
    if dtype == "bfloat16" and not ml_dtypes:
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return numbers.astype(numpy_dtype(dtype))


def fill(array, number):
    """Set all of an array or tensor, or the part that an index chose."""
    array[...] = 0x7FC0 if array.dtype == np.uint16 and np.isnan(number) else number


def poison_unowned(cache, plan):
    """NaN in every slot that no row of the plan owns; the plan must have all rows."""
    owned = np.zeros(cache.pool.num_physical_blocks * cache.block_size, bool)
    for table, length in zip(plan.block_table, plan.seq_lens, strict=True):
        positions = np.arange(length)
        owned[
            table[positions // cache.block_size].astype(np.int64) * cache.block_size
            + positions % cache.block_size
        ] = 1
    for block, offset in zip(*np.nonzero(~owned.reshape(-1, cache.block_size)), strict=True):
        for array in (*cache.keys, *cache.values):
            fill(array[int(block), int(offset)], np.nan)


@dataclass(eq=False)
class HandMadePlan:
    """A plan of one row that nobody checked."""

    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    slot_mapping: np.ndarray
    copies: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))

    @classmethod
    def of(cls, blocks, block_size, length, queries):
        """Of `length` positions in the blocks, the last `queries` are this step's."""
        positions = np.arange(length - queries, length)
        blocks = np.array(blocks, np.int64)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        starts = np.array([0, queries], np.int32)
        return cls(blocks.astype(np.int32)[None], np.array([length], np.int32), starts, slots)

    @property
    def num_tokens(self):
        return int(self.query_start_loc[-1])


class Bench:
    """Sequences in a batch whose true K and V are kept beside the cache."""

    def __init__(self, cache, lengths, seed=0):
        self.cache, self.random = cache, np.random.default_rng(seed)
        self.array = "numpy" if isinstance(cache.keys[0], np.ndarray) else "torch"
        self.batch = kv.Batch(cache.pool, max_sequences=len(lengths) + 4, max_tokens_per_sequence=4096)
        self.truth = {}  # row -> K and V so far, [s, G, D] each
        for number, length in enumerate(lengths):
            self.add(range(number * 10_000, number * 10_000 + length))

    def add(self, tokens):
        """A new sequence; nothing of it is expected to be cached."""
        row = self.batch.add(self.cache.pool.sequence(list(tokens), read_cache=False))
        empty = np.empty((0, self.cache.num_kv_heads, self.cache.head_dim))
        self.truth[row] = (empty, empty)
        return row

    def numbers(self, *shape):
        """Random values of the cache's type."""
        return rounded(self.random.standard_normal(shape), self.cache.dtype, self.array)

    def step(self, num_heads, max_tokens=None, layer=0, num_tokens=None, **options):
        """Plan, write and attend; returns the plan, what came out, and what should have."""
        cache, plan = self.cache, self.batch.plan(max_tokens, num_tokens=num_tokens)
        k, v = (self.numbers(plan.num_tokens, cache.num_kv_heads, cache.head_dim) for _ in range(2))
        q = self.numbers(plan.num_tokens, num_heads, cache.head_dim)
        cache.apply_copies(plan)
        cache.write(layer, k, v, plan)
        if len(plan.rows) == len(self.truth):
            poison_unowned(cache, plan)
        out, lse = cache.attend(layer, q, plan, return_lse=True, **options)
        self.q, expected = q, []
        for index, row in enumerate(plan.rows.tolist()):
            span = slice(*plan.query_start_loc[index : index + 2].tolist())
            old = self.truth[row]
            self.truth[row] = tuple(
                np.concatenate([a, to_float64(b[span])]) for a, b in zip(old, (k, v), strict=True)
            )
            expected.append(attention(to_float64(q[span]), *self.truth[row], **options))
        true_out, true_lse = (np.concatenate(parts) for parts in zip(*expected, strict=True))
        plan.commit()
        plan.extend(self.random.integers(0, 1000, len(plan.logits_rows)).astype(np.int32))
        return plan, (out, lse), (true_out, true_lse)


def assert_close(got, expected, dtype="float32"):
    """Within 2e-5 of the true result; half types within twice the error of its own rounding, and 1e-5."""
    (out, lse), (true_out, true_lse) = got, expected
    assert tuple(out.shape) == true_out.shape and tuple(lse.shape) == true_lse.shape
    tolerance = 2e-5
    if dtype != "float32":
        tolerance = 2 * np.abs(to_float64(rounded(true_out, dtype)) - true_out).max() + 1e-5
    np.testing.assert_allclose(to_float64(out), true_out, rtol=0, atol=tolerance)
    np.testing.assert_allclose(to_float64(lse), true_lse, rtol=0, atol=2e-5)
