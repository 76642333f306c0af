"""Attention on the CPU beside torch, and beside a plain read of the same memory.

    python benches/attention.py decode prefill shared pages threads --json out.json
    python benches/attention.py figure --json out.json --svg docs/attention.svg    # needs matplotlib

32 query / 8 KV heads of 128, page 16, blocks scattered. What is compared runs in turn, call by call, in one
process; a time is the least of the calls: on a shared machine absolute times drift, and ratios within a run
are what counts. Bandwidth counts each byte of K and V once; "read" is a plain read of the very same buffers,
so on the same kind of pages, with as many threads. SDPA has contiguous memory, and in decode the group of
query heads as query rows (its fast way); in prefill the faster of its two ways, `enable_gqa` or K and V
repeated beforehand. With `--cpu` everything runs on one thread, and times are that thread's CPU time: other
people's work on the machine then spoils less.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from types import SimpleNamespace

import kvfolio as kv
import numpy as np
import torch
from kvfolio import _arrays, _native

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
DECODE = [(n, context) for n in (1, 8, 32) for context in (128, 2048, 8192)]
PREFILL = [(n, context) for n in (1, 8) for context in (128, 512, 2048)] + [(1, 8192)]
sdpa = torch.nn.functional.scaled_dot_product_attention


clock = time.perf_counter


def in_turn(*works, seconds=1.5, least=4):
    """Least and median seconds of each."""
    times = [[] for _ in works]
    for work in works:
        work()
    start = time.perf_counter()
    while len(times[0]) < least or (time.perf_counter() - start < seconds and len(times[0]) < 500):
        for work, own in zip(works, times, strict=True):
            before = clock()
            work()
            own.append(clock() - before)
    return [(min(own), float(np.median(own))) for own in times]


def fill(tensor):
    """Normal numbers, repeated: to draw 10^9 of them takes longer than all that is measured."""
    some = torch.randn(65_521).to(tensor.dtype)
    flat = tensor.view(-1)
    for start in range(0, len(flat), len(some)):
        piece = flat[start : start + len(some)]
        piece.copy_(some[: len(piece)])
    return tensor


def storage(shape, dtype):
    """Contiguous memory of the kind of pages that the cache has."""
    return fill(_arrays.zeros(shape, str(dtype).removeprefix("torch."), "torch"))


def as_bytes(tensor):
    return tensor.view(torch.uint8).view(-1).numpy()


class Step:
    """Sequences of one length, in scattered blocks, with the queries at their ends."""

    def __init__(self, sequences, context, queries, dtype, shared=0):
        blocks, common = -(-context // PAGE), shared // PAGE
        num_blocks = common + sequences * (blocks - common)
        pool = kv.BlockPool(num_blocks, PAGE)
        self.cache = kv.KVCache(pool, 1, KV_HEADS, DIM, dtype=dtype, array="torch")
        fill(self.cache.keys[0])
        fill(self.cache.values[0])
        ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks + 1, dtype=np.int32))
        table = np.empty((sequences, blocks), np.int32)
        table[:, :common] = ids[:common]
        table[:, common:] = ids[common:].reshape(sequences, -1)
        starts = np.arange(sequences + 1, dtype=np.int32) * queries
        self.plan = SimpleNamespace(
            num_tokens=sequences * queries,
            block_table=table,
            seq_lens=np.full(sequences, context, np.int32),
            query_start_loc=starts,
        )
        self.q = fill(torch.empty(sequences * queries, HEADS, DIM, dtype=self.cache.keys[0].dtype))
        self.bytes = [as_bytes(self.cache.keys[0]), as_bytes(self.cache.values[0])]
        self.size = 2 * sequences * context * KV_HEADS * DIM * self.q.itemsize

    def attend(self):
        return self.cache.attend(0, self.q, self.plan)

    def read(self):
        return _native.read_memory(self.bytes)

    def gather(self):
        """Pages brought together, then SDPA."""
        table = torch.from_numpy(self.plan.block_table).long()
        sequences, blocks = table.shape
        shape = (sequences, blocks * PAGE, KV_HEADS, DIM)
        k, v = (x[0][table].view(shape).transpose(1, 2) for x in (self.cache.keys, self.cache.values))
        return sdpa(self.q.view(sequences, KV_HEADS, HEADS // KV_HEADS, DIM), k, v)


def contiguous(sequences, context, queries, dtype):
    """SDPA on K and V of `[sequences, heads, context, head_dim]`; several ways, one is to be chosen."""
    k, v = (storage((sequences, KV_HEADS, context, DIM), dtype) for _ in range(2))
    if queries == 1:
        q = fill(torch.empty(sequences, KV_HEADS, HEADS // KV_HEADS, DIM, dtype=dtype))
        return [lambda: sdpa(q, k, v)]
    q = fill(torch.empty(sequences, HEADS, queries, DIM, dtype=dtype))
    rk, rv = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return [lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), lambda: sdpa(q, rk, rv, is_causal=True)]


def decode(dtype, shapes, seconds):
    for sequences, context in shapes:
        step = Step(sequences, context, 1, dtype)
        works = [step.attend, *contiguous(sequences, context, 1, step.q.dtype), step.read]
        ours, torchs, read = in_turn(*works, seconds=seconds)
        gather = in_turn(step.gather, seconds=0.3, least=2)[0]
        yield {
            "kind": "decode", "dtype": dtype, "shape": f"{sequences} x {context}", "ms": ours[0] * 1e3,
            "GB/s": step.size / ours[0] / 1e9, "read GB/s": step.size / read[0] / 1e9,
            "of read": read[0] / ours[0], "of read, medians": read[1] / ours[1],
            "sdpa ms": torchs[0] * 1e3, "ratio": torchs[0] / ours[0], "ratio of medians": torchs[1] / ours[1],
            "gather ms": gather[0] * 1e3, "bytes": step.size,
        }  # fmt: skip


def prefill(dtype, shapes, seconds):
    for sequences, context in shapes:
        step = Step(sequences, context, context, dtype)
        works = contiguous(sequences, context, context, step.q.dtype)
        times = in_turn(*works, seconds=0.2, least=1)
        best = works[int(np.argmin([least for least, _ in times]))]
        ours, torchs = in_turn(step.attend, best, seconds=seconds, least=3)
        products = 4 * sequences * HEADS * DIM * (context * (context + 1) // 2)
        yield {
            "kind": "prefill", "dtype": dtype, "shape": f"{sequences} x {context}", "ms": ours[0] * 1e3,
            "GFLOP/s": products / ours[0] / 1e9, "sdpa ms": torchs[0] * 1e3,
            "ratio": torchs[0] / ours[0], "ratio of medians": torchs[1] / ours[1],
        }  # fmt: skip


def shared(dtype, seconds, sequences=8, context=8192, part=0.9):
    """Sequences with nine tenths of their context in common, beside as many with nothing in common."""
    together = Step(sequences, context, 1, dtype, shared=int(part * context))
    apart = Step(sequences, context, 1, dtype)
    ours, without = in_turn(together.attend, apart.attend, seconds=seconds)
    yield {
        "kind": "shared", "dtype": dtype, "shape": f"{sequences} x {context}, {part:.0%} shared",
        "ms": ours[0] * 1e3, "apart ms": without[0] * 1e3, "speed-up": without[0] / ours[0],
        "speed-up of medians": without[1] / ours[1],
    }  # fmt: skip


def pages(dtype, seconds, sequences=8, context=8192):
    """What huge pages are worth: the same step in memory with and without them."""
    huge = Step(sequences, context, 1, dtype)
    unit, _arrays.HUGE_PAGE = _arrays.HUGE_PAGE, 1 << 62
    small = Step(sequences, context, 1, dtype)
    _arrays.HUGE_PAGE = unit
    times = in_turn(huge.attend, small.attend, huge.read, small.read, seconds=seconds)
    ours, others, read, other_read = (least for least, _ in times)
    yield {
        "kind": "pages", "dtype": dtype, "shape": f"{sequences} x {context}", "huge ms": ours * 1e3,
        "4 KiB ms": others * 1e3, "speed-up": others / ours, "speed-up of a read": other_read / read,
    }  # fmt: skip


def threads(dtype, seconds, sequences=1, context=8192):
    """One long sequence on one thread and on all."""
    step, all_of_them = Step(sequences, context, 1, dtype), kv.get_num_threads()

    def alone():
        kv.set_num_threads(1)
        step.attend()
        kv.set_num_threads(all_of_them)

    ours, one = in_turn(step.attend, alone, seconds=seconds)
    yield {
        "kind": "threads", "dtype": dtype, "shape": f"{sequences} x {context}", "threads": all_of_them,
        "ms": ours[0] * 1e3, "one thread ms": one[0] * 1e3, "speed-up": one[0] / ours[0],
    }  # fmt: skip


def figure(path, records):
    """Achieved bandwidth of decode over the size of K and V, with the plain read as the roof."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    found = [record for record in records if record["kind"] == "decode"]
    dtypes = list(dict.fromkeys(record["dtype"] for record in found))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.2 * len(dtypes), 3.2), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        own = sorted((r for r in found if r["dtype"] == dtype), key=lambda r: r["bytes"])
        sizes = [r["bytes"] / 2**20 for r in own]
        axis.plot(sizes, [r["read GB/s"] for r in own], "k--", label="plain read")
        axis.plot(sizes, [r["GB/s"] for r in own], "o-", label="kvfolio, pages of 16")
        axis.plot(sizes, [r["bytes"] / r["sdpa ms"] / 1e6 for r in own], "s-", label="torch SDPA, contiguous")
        axis.plot(sizes, [r["bytes"] / r["gather ms"] / 1e6 for r in own], "^-", label="gather, then SDPA")
        axis.set(xscale="log", title=dtype, xlabel="K and V of the step, MiB")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s of K and V")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def shown(record):
    def text(value):
        return value if isinstance(value, str) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"

    parts = [
        f"{name} {text(value)}"
        for name, value in record.items()
        if name not in ("kind", "dtype", "shape", "bytes")
    ]
    return f"{record['kind']:8}{record['dtype']:9} {record['shape']:10} " + ", ".join(parts)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ["decode", "prefill", "shared", "pages", "threads", "figure"]
    parser.add_argument("kinds", nargs="+", choices=kinds)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", help="such as 8x2048; all that are asked for by default")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each shape")
    parser.add_argument("--cpu", action="store_true", help="one thread, and its CPU time: for a busy machine")
    parser.add_argument("--json", help="where to add the figures")
    parser.add_argument("--svg", default="attention.svg")
    arguments = parser.parse_args()
    if arguments.cpu:
        global clock
        clock = time.thread_time
        torch.set_num_threads(1)
        kv.set_num_threads(1)
    records = []
    if arguments.json and os.path.exists(arguments.json):
        with open(arguments.json) as file:
            records = json.load(file)
    if "figure" in arguments.kinds:
        return figure(arguments.svg, records)
    chosen = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes or ()]
    print(
        f"torch {torch.__version__} on {torch.get_num_threads()} threads, kvfolio on {kv.get_num_threads()}"
    )
    for kind in arguments.kinds:
        for dtype in arguments.dtype:
            work = {
                "decode": decode,
                "prefill": prefill,
                "shared": shared,
                "pages": pages,
                "threads": threads,
            }[kind]
            shapes = {"decode": DECODE, "prefill": PREFILL}.get(kind)
            more = (chosen or shapes,) if shapes else ()
            for record in work(dtype, *more, seconds=arguments.seconds):
                print(shown(record), flush=True)
                same = ("kind", "dtype", "shape")
                records = [r for r in records if any(r[name] != record[name] for name in same)] + [record]
                if arguments.json:
                    with open(arguments.json, "w") as file:
                        json.dump(records, file, indent=1)
    return None


if __name__ == "__main__":
    main()
