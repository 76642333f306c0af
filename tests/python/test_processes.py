"""Forks, start methods, exits with everything alive; each in an interpreter of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PRELUDE = """
    import gc, os, sys, threading, time
    import numpy as np
    import kvfolio as kv

    pool = kv.BlockPool(512, 16)
    cache = kv.KVCache(pool, 1, 4, 64)

    def step(length=2048, batch=None):
        "Compute a prompt, with a kernel that is large enough for all threads."
        batch = batch or kv.Batch(pool, max_sequences=4, max_tokens_per_sequence=4096)
        seq = pool.sequence([7] * length, read_cache=False, write_cache=False)
        row = batch.add(seq)
        with batch.plan(rows=[row]) as plan:
            q, k = np.ones((length, 8, 64), np.float32), np.ones((length, 4, 64), np.float32)
            cache.write(0, k, k, plan)
            out = cache.attend(0, q, plan)
        assert np.allclose(out, 1)
        return batch, seq

    def objects():
        "One of everything, with blocks and a plan in flight."
        batch, seq = step(20)
        seq.extend([1])
        table = pool.table()
        table.append(5)
        return batch, seq, seq.fork(), table, table.fork(), batch.plan()
"""


def run(program, *arguments, stderr=None, timeout=60):
    """Standard output of a program that must end well, and in time."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", code, *arguments]
    environment = {**os.environ, "RAYON_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    assert stderr is None or result.stderr == stderr
    return result.stdout


@pytest.mark.parametrize("started", ["before", "during", "never"])
@pytest.mark.parametrize("ends", ["exit", "_exit"])
def test_a_child_computes_with_threads_of_its_own(started, ends):
    """The parent's threads do not live on in it; kernels of other threads may be running at the fork."""
    program = """
        started, ends = sys.argv[1:]
        if started != "never":
            step()
        stop = threading.Event()
        def work():
            while not stop.is_set():
                step()[1].free()
        threads = [threading.Thread(target=work) for _ in range(2 if started == "during" else 0)]
        for thread in threads: thread.start()
        mine = objects()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                batch, seq, *_, plan = mine
                plan.commit()
                step()[1].free()
                pool.release(pool.allocate(8))
                os._exit(0) if ends == "_exit" else sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads: thread.join()
        mine[-1].commit()
        del mine
        gc.collect()
        pool.audit()
        assert pool.num_referenced == 0
        print("fine")
    """
    assert run(program, started, ends) == "fine\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_serve(method, tmp_path):
    (tmp_path / "worker.py").write_text(
        textwrap.dedent(PRELUDE)
        + textwrap.dedent("""
            def work(n):
                batch, seq = step(100 * n)
                seq.free()
                pool.audit()
                return pool.num_referenced, pool.match([7] * 32)
        """)
    )
    program = """
        import multiprocessing
        sys.path.insert(0, sys.argv[2])
        if __name__ == "__main__":
            import worker
            step()
            context = multiprocessing.get_context(sys.argv[1])
            with context.Pool(2) as workers:
                assert workers.map(worker.work, range(1, 9)) == [(0, 0)] * 8
                try:
                    workers.map(worker.work, [pool])
                except TypeError as error:
                    print(error)
                workers.close()
                workers.join()
            step()
    """
    said = run(program, method, str(tmp_path))
    assert said == "a BlockPool cannot be pickled or copied: its blocks live in this process\n"


@pytest.mark.parametrize("keep", ["module", "cycle", "thread", "atexit"])
def test_an_interpreter_ends_with_everything_alive(keep):
    program = """
        import atexit
        mine = objects()
        step()
        if sys.argv[1] == "cycle":
            class Holder: pass
            holder = Holder()
            holder.me, holder.mine = holder, mine
            del mine
        elif sys.argv[1] == "thread":
            local = threading.local()
            local.mine = mine
        elif sys.argv[1] == "atexit":
            def last(mine=mine):
                mine[-1].commit()
                step()[1].free()
            atexit.register(last)
        print("fine")
    """
    assert run(program, keep, stderr="") == "fine\n"


@pytest.mark.parametrize("what", ["kernel", "pool", "plans"])
def test_an_exit_does_not_wait_for_daemon_threads(what):
    """Nor does it end in a crash while they are inside of calls."""
    program = """
        def kernels():
            while True: step()[1].free()
        def blocks():
            while True: pool.release(pool.allocate(100))
        def plans():
            batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=64)
            while True:
                seq = pool.sequence(range(40))
                batch.add(seq)
                batch.plan()
                seq.free()
        target = {"kernel": kernels, "pool": blocks, "plans": plans}[sys.argv[1]]
        for _ in range(3): threading.Thread(target=target, daemon=True).start()
        time.sleep(0.3)
        print("fine", flush=True)
    """
    for _ in range(3):
        assert run(program, what) == "fine\n"
