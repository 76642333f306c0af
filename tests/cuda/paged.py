"""Attention of a step over pages, through the emulated kernels; what the step does not own is poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from attention_reference import attention
from harness import Attention, PlanAttention, Pointer, Program, storage, tokens

DTYPES = {"float32": (0, np.dtype(np.float32)), "float16": (1, np.dtype(np.float16))}
DTYPES["bfloat16"] = (2, np.dtype(ml_dtypes.bfloat16))
TILE_KEYS = {  # of a tile, by bytes of a head and rows, as kvfolio_cuda_tile_keys has it
    (128, 16): 64, (256, 16): 64, (512, 16): 64, (1024, 16): 32,
    (128, 64): 32, (256, 64): 32, (512, 64): 32, (1024, 64): 16,
}  # fmt: skip
DEAD_IDS = (-1, 2**31 - 1, 0, -(2**31))


@dataclass
class Step:
    """`rows` are (length, queries) of each sequence."""

    rows: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 64
    dtype: str = "bfloat16"
    block_size: int = 16
    layout: str = "NHD"
    options: dict = field(default_factory=dict)
    extra: int = 6
    min_tiles: int = 1
    seed: int = 0
    spread: float = 1.0
    padding_rows: int = 0
    """Rows of no tokens at the end, as in a captured graph."""

    def __post_init__(self):
        random = np.random.default_rng(self.seed)
        kind, (num_heads, num_kv_heads) = DTYPES[self.dtype][1], self.heads

        def numbers(*shape):
            return (random.standard_normal(shape) * self.spread).astype(np.float32).astype(kind)

        pages = [-(-length // self.block_size) for length, _ in self.rows]
        num_blocks = sum(pages) + 5
        shape = (num_blocks, self.block_size, num_kv_heads, self.head_dim)
        nan = np.array(np.nan, kind)
        if self.layout == "HND":
            self.memory = np.full((2, num_blocks, num_kv_heads, self.block_size, self.head_dim), nan)
            self.keys, self.values = (part.swapaxes(1, 2) for part in self.memory)
        elif self.layout == "packed":
            self.memory = np.full((*shape[:3], 2, self.head_dim), nan)
            self.keys, self.values = self.memory[:, :, :, 0], self.memory[:, :, :, 1]
        else:
            self.memory = np.full((2, *shape), nan)
            self.keys, self.values = self.memory
        free = (random.permutation(num_blocks - 1) + 1).tolist()
        width = max([*pages, 1]) + 3
        self.block_table = np.array(DEAD_IDS, np.int32)[random.integers(0, 4, (len(self.rows), width))]
        self.k, self.v, self.q, self.owned = [], [], [], np.zeros((num_blocks, self.block_size), bool)
        for row, (length, queries) in enumerate(self.rows):
            ids = [free.pop() for _ in range(pages[row])]
            self.block_table[row, : len(ids)] = ids
            k, v = numbers(length, num_kv_heads, self.head_dim), numbers(length, num_kv_heads, self.head_dim)
            for position in range(length):
                block, offset = ids[position // self.block_size], position % self.block_size
                self.keys[block, offset], self.values[block, offset] = k[position], v[position]
                self.owned[block, offset] = True
            self.k.append(k), self.v.append(v), self.q.append(numbers(queries, num_heads, self.head_dim))
        counts = [queries for _, queries in self.rows] + [0] * self.padding_rows
        self.query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.seq_lens = np.array([length for length, _ in self.rows] + [0] * self.padding_rows, np.int32)

    def expected(self):
        """In float64."""
        outs, lses = [], []
        for (length, queries), q, k, v in zip(self.rows, self.q, self.k, self.v, strict=True):
            if length == 0:  # no keys, so zeros; the sinks are all of the denominator
                sinks = self.options.get("sinks", [-np.inf] * self.heads[0])
                outs.append(np.zeros((queries, *q.shape[1:]))), lses.append(np.tile(sinks, (queries, 1)))
                continue
            out, lse = attention(q, k, v, **self.options)
            outs.append(out), lses.append(lse)
        return np.concatenate(outs), np.concatenate(lses)

    def forbid_unowned(self, program):
        """Every head of every slot that no sequence owns."""
        for block, offset in zip(*np.nonzero(~self.owned), strict=True):
            for view in (self.keys, self.values):
                for head in range(self.heads[1]):
                    part = view[block, offset, head]
                    start = part.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
                    program.forbid(self.memory, start, part.nbytes)

    def run(self, runner, **schedule):
        """Out, lse, and the headers of both work lists, from the kernels."""
        code, kind = DTYPES[self.dtype]
        num_heads, num_kv_heads = self.heads
        group = num_heads // num_kv_heads
        program = Program()
        q = np.concatenate(self.q)
        fused = np.full((len(q), num_heads + 2, self.head_dim), np.array(np.nan, kind))  # Q among others
        fused[:, 1:-1] = q
        out = np.full(q.shape, np.array(np.nan, kind))
        lse = np.full(q.shape[:2], np.nan, np.float32)
        window = self.options.get("sliding_window") or 0
        options = {name: None if self.options.get(name) is None else np.array(self.options[name], np.float32)
                   for name in ("alibi_slopes", "sinks")}  # fmt: skip
        value_offset = self.values.__array_interface__["data"][0] - self.keys.__array_interface__["data"][0]
        headers = []
        for tile_rows, low, high in ((16, 1, 16), (64, 17, 2**31 - 1)):
            tiles = sum(-(-n * group // tile_rows) for _, n in self.rows if low <= n * group <= high)
            capacity = tiles + self.extra
            work = np.full(4 + 5 * capacity, -1, np.int32)
            headers.append(work[:4])
            program.call(
                PlanAttention(
                    capacity=capacity, num_sequences=len(self.seq_lens), group=group, min_rows=low,
                    max_rows=high,
                    tile_rows=tile_rows, tile_keys=TILE_KEYS[self.head_dim * kind.itemsize, tile_rows],
                    window=window, extra=self.extra, min_tiles=self.min_tiles,
                ),
                work=work, seq_lens=self.seq_lens, query_start_loc=self.query_start_loc, **schedule,
            )  # fmt: skip
            places = 2 * self.extra * num_kv_heads * tile_rows
            arguments = Attention(
                q=tokens(fused), out=tokens(out), keys=storage(self.keys), values=storage(self.values),
                table_stride=self.block_table.shape[1], capacity=capacity, dtype=code,
                num_kv_heads=num_kv_heads,
                group=group, head_dim=self.head_dim, block_size=self.block_size, tile_rows=tile_rows,
                window=window, extra=self.extra, scale=self.options.get("scale", self.head_dim**-0.5),
                soft_cap=self.options.get("logit_softcap") or 0,
            )  # fmt: skip
            program.call(
                arguments, q__data=Pointer(fused, self.head_dim * kind.itemsize), out__data=out,
                keys__data=self.memory, values__data=Pointer(self.memory, value_offset), lse=lse,
                block_table=self.block_table, seq_lens=self.seq_lens, query_start_loc=self.query_start_loc,
                work=work, partial_out=np.full((max(places, 1), self.head_dim), np.nan, np.float32),
                partial_lse=np.full(max(places, 1), np.nan, np.float32), **options, **schedule,
            )  # fmt: skip
        self.forbid_unowned(program)
        program.run(runner)
        for header in headers:
            assert header[3] == 0, "a work list is too small"
        return out, lse, headers
