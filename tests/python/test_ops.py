"""`torch.ops.kvfolio.*` and a cache whose storage is on a device, here with the CPU as the device."""

from __future__ import annotations

import sys
import types

import kvfolio as kv
import numpy as np
import pytest
from attention_reference import Bench, HandMadePlan, assert_close, fill

torch = pytest.importorskip("torch")

import attention_stand_ins  # noqa: E402
from kvfolio import _device_cache, ops  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16"]
OPTIONS = {
    "scale": 0.3,
    "sliding_window": 21,
    "logit_softcap": 1.5,
    "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, -0.03, 0.0, 1.0, 0.01],
    "sinks": [0.0, 1.0, -1.0, 3.0, -np.inf, 5.0, 0.5, -20.0],
}


def on_device(cache, backend="kvfolio"):
    """The cache, working through operators, as it does where its storage is on a GPU."""
    storage = _device_cache.DeviceStorage(cache.keys, cache.values, cache.dtype, backend)
    cache._adopt(cache.pool, cache.keys, cache.values, cache.dtype, storage)
    return cache


def make_cache(block_size=16, heads=2, head_dim=64, dtype="float32", layers=1, backend="kvfolio"):
    pool = kv.BlockPool(1024 // block_size, block_size)
    cache = kv.KVCache(pool, layers, heads, head_dim, dtype=dtype, array="torch")
    for storage in (*cache.keys, *cache.values):
        fill(storage, np.nan)
    return on_device(cache, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [[], ["sinks"], ["sliding_window"], list(OPTIONS)])
def test_a_cache_on_a_device_gives_what_one_on_the_cpu_gives(dtype, names):
    bench = Bench(make_cache(dtype=dtype), [1, 50, 90])
    for _ in range(3):
        _, got, expected = bench.step(8, **{name: OPTIONS[name] for name in names})
        assert_close(got, expected, dtype)


def test_forks_are_copied_before_they_are_written():
    bench = Bench(make_cache(block_size=4, layers=2), [6, 9])
    bench.step(8)
    row = bench.batch.add(bench.cache.pool.sequence([1]))  # a place for the fork
    bench.batch.remove(row).free()
    bench.batch.reorder([0, 0], rows=[0, 1])
    bench.truth[1] = bench.truth[0]
    plan, got, expected = bench.step(8)
    assert len(plan.copies) and kv.block_layout(7, 4)[0] == 2
    assert_close(got, expected)


def test_a_plan_is_brought_to_the_device_once(monkeypatch):
    bench, brought = Bench(make_cache(layers=2), [20, 3]), []
    original = _device_cache.DeviceStorage._bring
    monkeypatch.setattr(
        _device_cache.DeviceStorage, "_bring", lambda self, plan: brought.append(1) or original(self, plan)
    )
    plan = bench.batch.plan()
    k, q = bench.numbers(plan.num_tokens, 2, 64), bench.numbers(plan.num_tokens, 8, 64)
    for layer in range(2):
        bench.cache.write(layer, k, k, plan)
        bench.cache.attend(layer, q, plan)
    assert brought == [1]
    plan.rollback()


def one_row(blocks, length, queries=1):
    return HandMadePlan.of(blocks, 16, length, queries)


class TestBadInput:
    @pytest.fixture
    def cache(self):
        return make_cache()

    @pytest.mark.parametrize(
        ("value", "error", "words"),
        [
            (np.zeros((1, 8, 64), np.float32), TypeError, "q must be a torch tensor, not ndarray"),
            (torch.zeros(1, 8, 64, dtype=torch.float16), TypeError, "q must be of dtype torch.float32"),
            (torch.zeros(1, 8, 64, device="meta"), ValueError, "q must be on cpu, .* not on meta"),
            (torch.zeros(1, 64), ValueError, "q must have 3 dimensions"),
            (torch.zeros(2, 8, 64), ValueError, r"q must be of shape \[1 "),
            (torch.zeros(1, 7, 64), ValueError, "q must have a multiple of 2"),
        ],
    )
    def test_queries(self, cache, value, error, words):
        with pytest.raises(error, match=words):
            cache.attend(0, value, one_row([1], 1))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"logit_softcap": 0.0}, "logit_softcap must be above 0"),
            ({"sinks": [1.0]}, r"sinks must have shape \(8,\)"),
            ({"alibi_slopes": torch.zeros(9)}, r"alibi_slopes must have shape \(8,\)"),
        ],
    )
    def test_options(self, cache, options, words):
        with pytest.raises(ValueError, match=words):
            cache.attend(0, torch.zeros(1, 8, 64), one_row([1], 1), **options)

    def test_slots_outside_write_nothing(self, cache):
        plan = one_row([10_000], 1)
        with pytest.raises(IndexError, match=r"plan\.slot_mapping must have 1 slots below"):
            cache.write(0, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), plan)
        with pytest.raises(ValueError, match="k must have 2 heads"):
            cache.write(0, torch.zeros(1, 3, 64), torch.zeros(1, 2, 64), one_row([1], 1))
        assert cache.keys[0].isnan().all()

    @pytest.mark.parametrize(
        ("copies", "error", "words"),
        [
            ([[1, 9999]], IndexError, "must name blocks in 0..64"),
            ([[-1, 2]], IndexError, "must name blocks in"),
            ([[1, 2], [2, 3]], ValueError, r"both source and target: \[2\]"),
        ],
    )
    def test_copies(self, cache, copies, error, words):
        plan = one_row([1], 1)
        plan.copies = np.array(copies, np.int32)
        with pytest.raises(error, match=words):
            cache.apply_copies(plan)
        with pytest.raises(kv.CopiesNotApplied):
            cache.write(0, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), plan)

    def test_a_discarded_block_in_sight(self, cache):
        plan = one_row([0, 0, 3, 4], 60, queries=3)
        q = torch.zeros(3, 8, 64)
        for window in (None, 27):
            with pytest.raises(ValueError, match=r"block_table\[0, [01]\] is the null block: positions"):
                cache.attend(0, q, plan, sliding_window=window)
        cache.attend(0, q, plan, sliding_window=26)  # the first query, at 57, sees 32 and on

    @pytest.mark.parametrize("backend", ["flashinfer", "flash_attn"])
    def test_a_backend_that_is_not_installed(self, backend):
        with pytest.raises(ImportError, match=f"backend '{backend}' needs the package flash"):
            make_cache(backend=backend)
        with pytest.raises(ValueError, match="backend must be one of kvfolio, flashinfer, flash_attn"):
            make_cache(backend="xformers")

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda t: t[:-1], ValueError, r"values\[0\] must be of shape \[5 "),
            (lambda t: t.half(), TypeError, r"values\[0\] must be a tensor of torch.float32"),
            (lambda t: t.cpu() if t.is_meta else t.to("meta"), TypeError, r"values\[0\] must be a tensor"),
            (lambda t: torch.empty(5, 4, 2, 65)[..., :64], ValueError, "multiples of 4"),
            (lambda t: torch.empty(5, 4, 64, 2).transpose(2, 3), ValueError, "adjacent elements"),
            (lambda t: torch.empty(1, 4, 2, 64).expand(5, 4, 2, 64), ValueError, "not 0"),
            (lambda t: torch.empty(5 * 4 * 2 * 64 + 1)[1:].view(5, 4, 2, 64), ValueError, "16 bytes"),
        ],
    )
    def test_storage(self, change, error, words):
        whole = torch.empty(5, 4, 2, 64)
        _device_cache.check_storage([("keys[0]", whole), ("values[0]", whole.clone())], (5, 4))
        with pytest.raises(error, match=words):
            _device_cache.check_storage([("keys[0]", whole), ("values[0]", change(whole))], (5, 4))


def test_a_gpu_of_too_little_shared_memory_is_refused():
    small = types.SimpleNamespace(name="a small GPU", shared_memory_per_block_optin=99 << 10)
    _device_cache.check_room(small, 128, "bfloat16")
    _device_cache.check_room(small, 64, "float32")
    for head_dim, dtype in ((256, "float16"), (128, "float32")):
        with pytest.raises(ValueError, match=r"needs 138 KiB .* a small GPU has 99"):
            _device_cache.check_room(small, head_dim, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(kv.CudaUnavailable) as caught:
        kv.KVCache(kv.BlockPool(4, 4), 1, 1, 64, device="cuda")
    assert caught.value.missing in ("GPU", "torch")


def arguments(name):
    """Of each operator, as opcheck takes them."""
    keys, values = torch.zeros(5, 4, 2, 64), torch.zeros(5, 4, 2, 64)
    ints = {"dtype": torch.int32}
    lengths, starts = torch.tensor([6, 3], **ints), torch.tensor([0, 1, 3], **ints)
    workspace, q = torch.zeros(0, dtype=torch.uint8), torch.randn(3, 4, 64)
    return {
        "append": (torch.randn(2, 2, 64), torch.randn(2, 2, 64), keys, values, torch.tensor([7, -1])),
        "copy_blocks": ([keys, values], torch.tensor([[1, 2], [0, 0]], **ints)),
        "update_table": (torch.zeros(3, 4, **ints), torch.tensor([[1, 2, 9], [-1, 0, 5]], **ints)),
        "plan_attention": (lengths, starts, workspace, 3, 4, keys, 0, 0),
        "attend": (
            q, keys, values, torch.tensor([[1, 2], [3, 0]], **ints), lengths, starts, torch.zeros_like(q),
            torch.zeros(3, 4), workspace, 0.1, 0, 0.0, None, torch.zeros(4), 2, 0,
        ),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["append", "copy_blocks", "update_table", "plan_attention", "attend"])
def test_operators_are_what_their_schemas_say(name):
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.kvfolio, name).default, arguments(name), test_utils=tests)


def test_updates_change_the_cells_that_they_name():
    table, updates = arguments("update_table")
    torch.ops.kvfolio.update_table(table, updates)
    assert table.nonzero().tolist() == [[1, 2]] and table[1, 2] == 9


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_gives_what_the_plain_one_gives():
    def step(q, k, v, keys, values, table, lengths, starts, slots, workspace):
        torch.ops.kvfolio.append(k * 2, v, keys, values, slots)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        torch.ops.kvfolio.plan_attention(lengths, starts, workspace, 3, 4, keys, 0, 0)
        torch.ops.kvfolio.attend(
            q * 0.5, keys, values, table, lengths, starts, out, lse, workspace, 0.1, 0, 0.0, None, None, 2, 0
        )
        return out + 1, lse

    def inputs():
        torch.manual_seed(0)
        q, keys, values, table, lengths, starts, *_ = arguments("attend")
        k, v = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        slots = torch.tensor([2 * 4 + 1, 3 * 4 + 1, 3 * 4 + 2])
        return q, k, v, keys, values, table, lengths, starts, slots, torch.zeros(0, dtype=torch.uint8)

    plain, compiled = inputs(), inputs()
    expected = step(*plain)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    for a, b in zip((*expected, *plain[3:5]), (*got, *compiled[3:5]), strict=True):
        torch.testing.assert_close(a, b)
    assert plain[3].any()


def test_the_workspace_grows_with_what_it_has_to_hold():
    few = ops.workspace_bytes(4, 4, 32, 8, 128, 16)
    assert few < ops.workspace_bytes(4, 512, 32, 8, 128, 16) < ops.workspace_bytes(4, 512, 32, 8, 128, 32)
    assert ops.workspace_bytes(256, 256, 32, 8, 128, 0) < 20_000


@pytest.mark.parametrize("names", [[], ["scale", "sliding_window", "logit_softcap"]])
@pytest.mark.parametrize("backend", ["flashinfer", "flash_attn"])
def test_other_libraries_get_a_plans_arrays_as_they_want_them(monkeypatch, backend, names):
    monkeypatch.setitem(sys.modules, backend, getattr(attention_stand_ins, backend)())
    bench = Bench(make_cache(backend=backend), [1, 50, 90])
    for _ in range(2):
        _, got, expected = bench.step(8, **{name: OPTIONS[name] for name in names})
        assert_close(got, expected)
    plan = bench.batch.plan()
    q = bench.numbers(plan.num_tokens, 8, 64)
    with pytest.raises(ValueError, match="sinks must be None with backend"):
        bench.cache.attend(0, q, plan, sinks=OPTIONS["sinks"])
    plan.rollback()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_engine_works_on_a_cache_on_a_device(monkeypatch, family):
    pytest.importorskip("transformers")
    import tiny_models
    from kvfolio.serving import Engine, SamplingParams
    from kvfolio.serving.hf_model import PagedModel

    model, shared = tiny_models.FAMILIES[family](), tiny_models.random_prompt(33, seed=100)
    prompts = [shared, shared + tiny_models.random_prompt(7, seed=2), tiny_models.random_prompt(21, seed=3)]

    def answers():
        engine = Engine(model, num_blocks=24, block_size=4, max_sequences=3, max_tokens_per_step=24)
        requests = [engine.submit(prompt, SamplingParams(max_tokens=14)) for prompt in prompts]
        while engine.has_work:
            engine.step()
        return [[answer.token_ids for answer in request.answers] for request in requests]

    expected, made, original = answers(), [], PagedModel.make_cache
    monkeypatch.setattr(
        PagedModel, "make_cache", lambda self, pool: made.append(on_device(original(self, pool))) or made[-1]
    )
    assert answers() == expected
    assert len(made) == 1 and len(expected[0][0]) == 14
