"""tests/gpu/run.py, all of it, with the CPU and its kernels in place of a GPU, and smaller."""

from __future__ import annotations

import importlib.util
import sys
import time
import types

import pytest
import toolchain

torch = pytest.importorskip("torch")

import attention_stand_ins  # noqa: E402
from kvfolio import ops  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class OnTheCpu(TorchFunctionMode):
    """Tensors that are to be made on a GPU, or brought there, are on the CPU."""

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        options = dict(options or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if str(options.get("device")) == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


class Graph(TorchDispatchMode):
    """A CUDA graph: what is called while it is captured is not run, but noted, and run in each replay."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        assert function.namespace == "kvfolio", f"{function} would allocate, or wait"
        self.calls.append((function, arguments, options or {}))

    def replay(self):
        assert len(self.calls) == 2
        for function, arguments, options in self.calls:
            function(*arguments, **options)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


@pytest.fixture
def script(monkeypatch):
    properties = types.SimpleNamespace(
        multi_processor_count=4, shared_memory_per_block_optin=99 << 10, name="a small GPU"
    )
    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_properties": lambda device: properties,
        "get_device_name": lambda: properties.name,
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": lambda graph: graph,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(ops, "load_cuda", lambda: None)
    for library in ("flashinfer", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, library, getattr(attention_stand_ins, library)())
    spec = importlib.util.spec_from_file_location("gpu_run", toolchain.ROOT / "tests" / "gpu" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    smaller = {"DECODE_BYTES": 1, "COPY_BYTES": 1 << 20, "FLUSH_BYTES": 1 << 20, "BATCHES": (1, 3)}
    smaller |= {"POOL_TOKENS": 200, "PROMPTS": (1, 70, 20, 3), "GRAPH_LENGTH": 100, "MIN_LENGTH": 40}
    for name, number in (smaller | {"REPETITIONS": 1}).items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, number)
    return module


def test_checks_and_benchmark(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with OnTheCpu():
        script.main()
    said = capsys.readouterr().out
    assert said.count("right: ") == 5 + 1, said  # dtypes and heads; a graph
    assert said.count("left out: ") == 4 and "99" in said  # what a small GPU has no room for
    rows = [line for line in said.splitlines() if line.startswith("group ")]
    assert len(rows) == 4 and "did not run" not in said, said
    for row in rows:
        assert all(f"{name} " in row for name in ("kvfolio", "FlashInfer", "FlashAttention", "planning")), row


def test_what_does_not_compute_the_same_is_not_timed(script, monkeypatch, capsys):
    wrong = attention_stand_ins.flash_attn_interface()
    right = wrong.flash_attn_with_kvcache
    wrong.flash_attn_with_kvcache = lambda *arguments, **options: right(*arguments, **options) + 1
    monkeypatch.setitem(sys.modules, "flash_attn_interface", wrong)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only-benchmark"])
    with OnTheCpu():
        script.main()
    assert (
        "FlashAttention did not run: ValueError: FlashAttention's result differs" in capsys.readouterr().out
    )
