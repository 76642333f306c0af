"""For who has a GPU: the CUDA kernels against float64, and beside the memory's bandwidth. Under five minutes.

    pip install kvfolio[torch] nvidia-cuda-nvcc==$CUDA.* ... (the first error says which) ninja
    python tests/gpu/run.py [--no-benchmark | --only-benchmark]

Tests are those of `KVCache`, run on the device: the options of attention, prefill in chunks, forks, NaN in
all that no sequence owns; then a captured graph that is replayed for other lengths. The benchmark is decode
at page 16 with 8 KV heads of 128 in bfloat16, groups of 4 and 8, 1 to 256 sequences, at least half a gigabyte
of K and V, scattered blocks; its measure is a copy on the device in the same run. FlashInfer and
FlashAttention-3 run beside it where they are installed, and have to give the same. tests/cuda runs all of
this with a CPU in place of the GPU, and smaller.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

PAGE, KV_HEADS, HEAD_DIM = 16, 8, 128
POOL_TOKENS, PROMPTS, GRAPH_LENGTH = 4096, (1, 700, 90, 33), 3000
MIN_LENGTH, DECODE_BYTES = 1024, 512 << 20  # of a sequence; of K and V
COPY_BYTES = 2 << 30
BATCHES = (1, 8, 64, 256)
REPETITIONS = 20
# More than any cache; writing them takes longer than Python takes to queue what is timed.
FLUSH_BYTES = 1 << 30


def skip(why):
    print(f"skipped: {why}. Nothing about speed on a GPU is known from this machine.")
    sys.exit(0)


try:
    import torch
except ImportError:
    skip("torch is not installed")
if not torch.cuda.is_available():
    skip("no GPU is visible to torch")

import kvfolio as kv  # noqa: E402
from attention_reference import Bench, attention, to_float64  # noqa: E402
from kvfolio._device_cache import check_room  # noqa: E402

OPTIONS = {
    "sliding_window": 70,
    "logit_softcap": 1.5,
    "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, -0.03, 0.0, 0.1, 0.01],
    "sinks": [0.0, 1.0, -1.0, 3.0, -np.inf, 5.0, 0.5, -20.0],
}


class DeviceBench(Bench):
    """`Bench` with numbers made on the CPU and sent to the device."""

    def numbers(self, *shape):
        return super().numbers(*shape).cuda()

    def step(self, *arguments, **options):
        plan, (out, lse), true = super().step(*arguments, **options)
        return plan, (out.cpu(), lse.cpu()), true


def check(dtype, head_dim, block_size, options):
    """Prefill in chunks, decode, a fork; returns the worst error, in roundings of the type."""
    pool = kv.BlockPool(POOL_TOKENS // block_size, block_size)
    cache = kv.KVCache(pool, 1, 2, head_dim, dtype=dtype, device="cuda")
    for storage in (*cache.keys, *cache.values):
        storage.fill_(float("nan"))
    bench = DeviceBench(cache, PROMPTS, seed=1)
    worst = 0.0
    for step in range(7):
        if step == 4:
            bench.batch.reorder([1, 1], rows=[1, 2])
            bench.truth[2] = bench.truth[1]
        _, (out, lse), (true_out, true_lse) = bench.step(8, max_tokens=400, **options)
        epsilon = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        error = np.abs(to_float64(out) - true_out).max() / (np.abs(true_out).max() * epsilon + 5e-6)
        assert error < 4, (
            f"{dtype} {head_dim} {block_size} {list(options)} step {step}: {error:.1f} roundings"
        )
        assert np.abs(lse.double().numpy() - true_lse).max() < 1e-3
        worst = max(worst, float(error))
    return worst


def check_all():
    for dtype in ("bfloat16", "float16", "float32"):
        for head_dim, block_size in ((64, 16), (128, 16), (256, 5)):
            shape = f"{dtype}, head dim {head_dim}, page {block_size}"
            try:
                check_room(torch.cuda.get_device_properties(0), head_dim, dtype)
            except ValueError as error:
                print(f"left out: {shape}: {error}")
                continue
            worst = max(
                check(dtype, head_dim, block_size, options)
                for options in ({}, {"sliding_window": 70}, OPTIONS)
            )
            print(f"right: {shape}; worst error {worst:.1f} roundings")


class Decode:
    """Operators of one decode step of `batch` sequences of `length` tokens, on fixed addresses."""

    def __init__(self, batch, length, group, dtype=torch.bfloat16):
        from kvfolio import ops

        torch.manual_seed(0)
        self.batch, self.group = batch, group
        pages = -(-length // PAGE)
        blocks = batch * pages + 1
        shape = (blocks, PAGE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        order = torch.randperm(blocks - 1)[: batch * pages] + 1
        self.table = order.view(batch, pages).int().cuda()
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, KV_HEADS * group, HEAD_DIM, device="cuda", dtype=dtype)
        self.out = torch.empty_like(self.q)
        heads = KV_HEADS * group
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.extra = max(1, 3 * multiprocessors // KV_HEADS)
        size = ops.workspace_bytes(batch, batch, heads, KV_HEADS, HEAD_DIM, self.extra)
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.bytes = 2 * batch * length * KV_HEADS * HEAD_DIM * self.keys.element_size()

    def plan(self):
        torch.ops.kvfolio.plan_attention(
            self.lengths, self.starts, self.workspace, self.batch, KV_HEADS * self.group,
            self.keys, 0, self.extra,
        )  # fmt: skip

    def attend(self):
        torch.ops.kvfolio.attend(
            self.q, self.keys, self.values, self.table, self.lengths, self.starts, self.out, None,
            self.workspace, HEAD_DIM**-0.5, 0, 0.0, None, None, 1, self.extra,
        )  # fmt: skip

    def error(self, row, length):
        positions = torch.arange(length, device="cuda")
        cells = self.table[row][positions // PAGE].long(), positions % PAGE
        k, v = (to_float64(side[cells].cpu()) for side in (self.keys, self.values))
        true, _ = attention(to_float64(self.q[row : row + 1].cpu()), k, v)
        return float(np.abs(to_float64(self.out[row : row + 1].cpu()) - true).max())


def check_graph():
    """Captured once, replayed for other lengths, and right."""
    longest = GRAPH_LENGTH
    step = Decode(8, longest, 4)
    step.plan(), step.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.plan(), step.attend()
    for length in (longest, 17, 1):
        step.lengths.copy_(torch.arange(8) % 2 * (longest - length) + length)
        step.out.fill_(float("nan"))
        graph.replay()
        for row in (0, 1):
            assert step.error(row, int(step.lengths[row])) < 0.02, (length, row)
    print("right: a captured graph, replayed for other lengths")


def seconds(function):
    """The median of single runs, each after the caches were written over.

    What is timed is queued while the device is still busy with that, so Python's own time does not count.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(3 + REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times[3:]))


def copy_bandwidth():
    """Bytes read and written by a copy on the device, a second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def peers(step, length):
    """Other libraries' decode of the same step, by name; instead of one that is not there, why."""
    found = {}
    try:
        import flashinfer

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
        )
        pages = step.table.shape[1]
        wrapper.plan(
            torch.arange(step.batch + 1, dtype=torch.int32) * pages, step.table.flatten(),
            torch.full((step.batch,), (length - 1) % PAGE + 1, dtype=torch.int32),
            KV_HEADS * step.group, KV_HEADS, HEAD_DIM, PAGE,
            q_data_type=step.q.dtype, kv_data_type=step.q.dtype,
        )  # fmt: skip
        found["FlashInfer"] = lambda: wrapper.run(step.q, (step.keys, step.values))
    except Exception as error:
        found["FlashInfer"] = f"{type(error).__name__}: {error}"
    try:
        from flash_attn_interface import flash_attn_with_kvcache

        found["FlashAttention"] = lambda: flash_attn_with_kvcache(
            step.q, step.keys, step.values, cache_seqlens=step.lengths, page_table=step.table,
            cu_seqlens_q=step.starts, max_seqlen_q=1, causal=True,
        )  # fmt: skip
    except Exception as error:  # version 2 has no pages of 16
        found["FlashAttention"] = f"{type(error).__name__}: {error}"
    return found


def check_peer(name, out, ours):
    """That it computes what we do; ValueError if not. Our own operator returns nothing."""
    if out is None:
        return
    difference = float((out.float() - ours.float()).abs().max())
    if not difference < 0.02:
        raise ValueError(f"{name}'s result differs by {difference:.3f}")


def benchmark():
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e12:.2f} TB/s; percentages are of that")
    reasons = {}
    for group in (4, 8):
        for batch in BATCHES:
            length = max(MIN_LENGTH, -(-DECODE_BYTES // (batch * 4096)))
            step = Decode(batch, length, group)
            step.plan(), step.attend()
            assert step.error(batch - 1, length) < 0.02, (batch, length)
            row = f"group {group}, {batch:3} x {length:6} ({step.bytes / 2**30:.1f} GiB):"
            for name, run in {"kvfolio": step.attend, **peers(step, length)}.items():
                if isinstance(run, str):
                    reasons[name] = run
                    continue
                try:
                    check_peer(name, run(), step.out)
                    rate = step.bytes / seconds(run)
                except Exception as error:  # a shape that a peer does not have
                    if name == "kvfolio":
                        raise
                    reasons[name] = f"{type(error).__name__}: {error}"
                    continue
                row += f"  {name} {rate / 1e12:.2f} TB/s {rate / copy:4.0%}"
            print(f"{row}  planning {seconds(step.plan) * 1e6:.0f} us")
            del step
    for name, reason in reasons.items():
        print(f"{name} did not run: {reason.splitlines()[0]}")


def main():
    parser = argparse.ArgumentParser(description="Check and time the CUDA kernels.")
    parser.add_argument("--no-benchmark", action="store_true")
    parser.add_argument("--only-benchmark", action="store_true")
    options = parser.parse_args()
    from kvfolio import ops

    ops.load_cuda()
    if not options.only_benchmark:
        check_all()
        check_graph()
    if not options.no_benchmark:
        benchmark()


if __name__ == "__main__":
    main()
