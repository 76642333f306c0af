"""With tensors, kernels run on the threads that torch has anyway; in a forked child on their own."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks threads up in /proc")

PROGRAM = """
    import os, sys, traceback
    from pathlib import Path
    import kvfolio as kv, numpy as np, torch

    torch.set_num_threads(2)
    kv.set_num_threads(2)
    pool = kv.BlockPool(256, 16)
    batch = kv.Batch(pool, max_sequences=8, max_tokens_per_sequence=512)
    for i in range(8):
        batch.add(pool.sequence(np.arange(i, i + 500, dtype=np.int32)))
    plan = batch.plan()

    def attend(array):
        cache = kv.KVCache(pool, 1, 2, 64, array=array)
        q = np.random.default_rng(0).standard_normal((plan.num_tokens, 8, 64), np.float32)
        q = torch.from_numpy(q) if array == "torch" else q
        return np.asarray(cache.attend(0, q, plan))

    def own_threads():
        names = [(path / "comm").read_text() for path in Path("/proc/self/task").iterdir()]
        return [name for name in names if name.startswith("kvfolio")]

    def in_a_child(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def run(program: str) -> None:
    """In a process of its own, since which threads there are is the process's affair."""
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    environment = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    result = subprocess.run(
        [sys.executable, "-c", program],
        timeout=120,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_tensors_need_no_threads_of_our_own():
    run("""
        attend("torch")
        assert "backend: OpenMP" not in torch.__config__.parallel_info() or own_threads() == []
    """)


def test_arrays_have_threads_of_our_own():
    run("""
        attend("numpy")
        assert len(own_threads()) == 1
    """)


def test_a_child_of_a_process_that_used_those_of_torch_has_its_own():
    run("""
        before = attend("torch")
        def work():
            assert (attend("torch") == before).all()
            assert len(own_threads()) == 1
        in_a_child(work)
        assert (attend("torch") == before).all()
    """)
