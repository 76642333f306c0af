"""The KV cache of public models, checked by hand: bytes are written as products, in the order of the text."""

from __future__ import annotations

from typing import Any

import kvfolio as kv
import model_configs as models
import pytest
from kvfolio.sizing import Deployment, ModelShape, SizingPlan, estimate_parameters, plan

GIB = 2**30


def size(config: dict[str, Any], lengths: list[int] | None = None, **options: Any) -> SizingPlan:
    if "memory" not in options:
        options.setdefault("kv_memory", 64 * GIB)
    return plan(ModelShape.from_config(config), Deployment(**options), lengths or [8192])


# K and V, KV heads, head_dim, 2 bytes of bfloat16: times the layers that keep all tokens.
UNIFORM = [
    ("LLAMA_8B", 32 * (2 * 8 * 128 * 2), 131_072),
    ("LLAMA_70B", 80 * (2 * 8 * 128 * 2), 327_680),
    ("LLAMA_1B", 16 * (2 * 8 * 64 * 2), 32_768),
    ("MIXTRAL", 32 * (2 * 8 * 128 * 2), 131_072),
    ("QWEN2_7B", 28 * (2 * 4 * 128 * 2), 57_344),  # a window is given, and not used
    ("QWEN3_8B", 36 * (2 * 8 * 128 * 2), 147_456),
    ("DEEPSEEK_V3", 61 * ((512 + 64) * 2), 70_272),  # one latent for K, V and all heads
    ("FALCON_7B", 32 * (2 * 1 * 64 * 2), 8_192),  # one head for all, whatever num_kv_heads says
    ("SMOLLM2_135M", 30 * (2 * 3 * 64 * 2), 23_040),
]


@pytest.mark.parametrize(("name", "product", "per_token"), UNIFORM)
def test_bytes_of_models_that_keep_all_tokens(name: str, product: int, per_token: int) -> None:
    (group,) = size(getattr(models, name)).groups
    assert product == per_token
    assert group.window is None
    assert group.bytes_per_token == (per_token,)
    assert group.bytes_per_block == (16 * per_token,)


# For each group, that of all tokens first: layers, window, bytes a token, most blocks of 16 tokens:
# the window rounded up to blocks, and one more since it seldom begins where a block does.
WINDOWED = [
    ("MISTRAL_7B", [(32, 4096, 32 * (2 * 8 * 128 * 2), 4096 // 16 + 1)]),
    ("PHI3_MINI", [(32, 2047, 32 * (2 * 32 * 96 * 2), 128 + 1)]),  # MHA: 12,288 a layer; 2047 / 16 = 127.9
    ("GEMMA2_9B", [(21, None, 21 * 8192, None), (21, 4096, 21 * 8192, 257)]),  # 2 * 8 * 256 * 2 = 8192
    ("GEMMA3_27B", [(10, None, 10 * 8192, None), (52, 1024, 52 * 8192, 65)]),  # 2 * 16 * 128 * 2 = 8192
    ("GPT_OSS_20B", [(12, None, 12 * 2048, None), (12, 128, 12 * 2048, 9)]),  # 2 * 8 * 64 * 2 = 2048
]


@pytest.mark.parametrize(("name", "groups"), WINDOWED)
def test_layers_with_windows_are_a_group_of_their_own(name: str, groups: list[tuple[Any, ...]]) -> None:
    found = size(getattr(models, name)).groups
    assert [(g.num_layers, g.window, g.bytes_per_token[0], g.most_blocks) for g in found] == groups


def test_which_layers_of_gemma_keep_all_tokens() -> None:
    shape = ModelShape.from_config(models.GEMMA3_27B)
    full = [number for number, (cache,) in enumerate(shape.layers) if cache.window is None]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]  # five with a window, then one without
    shape = ModelShape.from_config(models.GEMMA2_9B)
    assert [cache.window for (cache,) in shape.layers[:4]] == [4096, None, 4096, None]


def test_a_window_is_not_taken_for_linear() -> None:
    """Mistral-7B-v0.1 at 32,768 tokens: 257 blocks of 2 MiB, not 2,048."""
    row = size(models.MISTRAL_7B, [100, 4096, 4097, 4112, 4113, 32768]).lengths
    assert [r.blocks_per_sequence for r in row] == [(7,), (256,), (257,), (257,), (257,), (257,)]
    assert row[-1].bytes_per_sequence == (257 * 2**21,)
    assert row[-1].sequences == (64 * GIB - 2**21) // (257 * 2**21) == 127
    ignored = size(models.MISTRAL_7B, [32768], ignore_windows=True).lengths[0]
    assert ignored.blocks_per_sequence == (2048,)
    assert ignored.sequences == (64 * GIB - 2**21) // 2**32 == 15


def test_a_mixed_layout_adds_up() -> None:
    """gpt-oss-20b at 8,192 tokens: 512 blocks of all tokens and 9 of the window.

    Each takes 12 * 2,048 * 16 = 393,216 bytes.
    """
    found = size(models.GPT_OSS_20B, [8192], kv_memory=GIB)
    (row,) = found.lengths
    assert row.blocks_per_sequence == (512, 9)
    assert row.bytes_per_sequence == (521 * 393_216,)
    # 2,730 blocks in all, two of them null: 5 times 521 are 2,605, and 123 are left for the first group.
    assert GIB // 393_216 == 2730
    assert row.sequences == 5
    assert row.num_blocks == (1 + 5 * 512 + 123, 1 + 5 * 9)


def test_states_are_per_sequence_and_not_per_token() -> None:
    """Qwen3-Next: 12 of 48 layers attend.

    36 keep (2 * 16 * 128 + 32 * 128) * 3 inputs and 32 * 128 * 128 floats.
    """
    found = size(models.QWEN3_NEXT_80B, [1024, 32768])
    state = (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4
    assert state == 2_146_304
    assert found.stages[0].state_bytes == 36 * state == 77_266_944
    assert found.groups[0].bytes_per_token == (12 * (2 * 2 * 256 * 2),)
    short, long = found.lengths
    assert short.bytes_per_sequence == (64 * 16 * 24_576 + 77_266_944,)
    assert long.bytes_per_sequence == (2048 * 16 * 24_576 + 77_266_944,)
    halved = size(models.QWEN3_NEXT_80B, tensor_parallel=2)
    assert halved.stages[0].state_bytes == 77_266_944 // 2
    # 4 ranks: 2 KV heads on 2 ranks each, 4 and 8 heads of the states.
    assert size(models.QWEN3_NEXT_80B, tensor_parallel=4).stages[0].state_bytes == 77_266_944 // 4


def test_jamba_attends_in_4_of_32_layers() -> None:
    """28 keep 8,192 channels (2 * 4,096) of 3 inputs in bfloat16 and 16 floats."""
    found = size(models.JAMBA)
    assert found.groups[0].bytes_per_token == (4 * 4096,)
    assert found.stages[0].state_bytes == 28 * (8192 * 3 * 2 + 8192 * 16 * 4) == 16_056_320


def test_a_model_of_states_alone_has_no_blocks() -> None:
    config = {
        "model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "state_size": 16,
        "conv_kernel": 4, "expand": 2, "vocab_size": 65024, "torch_dtype": "bfloat16",
    }  # fmt: skip
    found = size(config, [100, 100_000], kv_memory=GIB)
    each = 64 * (8192 * 3 * 2 + 8192 * 16 * 4)
    assert [row.sequences for row in found.lengths] == [GIB // each] * 2
    assert found.groups == () and found.lengths[0].num_blocks == ()


@pytest.mark.parametrize(
    ("ranks", "per_token", "replicas"),
    # 8 KV heads: 80 layers * 2 * heads * 128 * 2; beyond 8 ranks each head is on several.
    [(1, 327_680, 1), (2, 163_840, 1), (8, 40_960, 1), (16, 40_960, 2), (64, 40_960, 8)],
)
def test_kv_heads_are_split_over_ranks(ranks: int, per_token: int, replicas: int) -> None:
    found = size(models.LLAMA_70B, tensor_parallel=ranks)
    assert found.groups[0].bytes_per_token == (per_token,)
    assert found.replicas == replicas


def test_a_latent_is_whole_on_every_rank() -> None:
    found = size(models.DEEPSEEK_V3, tensor_parallel=8)
    assert found.groups[0].bytes_per_token == (70_272,)
    assert found.replicas == 8


def test_one_kv_head_for_all_is_on_every_rank() -> None:
    config = {**models.FALCON_7B, "hidden_size": 4096, "num_attention_heads": 64}
    assert size(config, tensor_parallel=4).groups[0].bytes_per_token == (8_192,)


def test_the_tightest_stage_decides() -> None:
    """Llama-3.1-8B cut into 8 and 24 layers, with 16 and 32 GiB: 4,096 bytes a layer and token."""
    found = size(
        models.LLAMA_8B, pipeline_parallel=2, layers_per_stage=[8, 24], kv_memory=[16 * GIB, 32 * GIB]
    )
    (group,), (row,) = found.groups, found.lengths
    assert group.bytes_per_token == (8 * 4096, 24 * 4096)
    assert group.bytes_per_block == (2**19, 3 * 2**19)
    # 2^34 / 2^19 = 32,768 blocks in the first stage, 2^35 / (3 * 2^19) = 21,845 in the second.
    assert row.num_blocks == (21_845,)
    assert row.tightest_stage == 1
    assert row.sequences == 21_844 // 512 == 42


def test_stages_are_as_equal_as_can_be() -> None:
    found = size(models.LLAMA_8B, pipeline_parallel=5)
    assert [len(stage.layers) for stage in found.stages] == [7, 7, 6, 6, 6]
    assert [layer for stage in found.stages for layer in stage.layers] == list(range(32))


@pytest.mark.parametrize(
    ("scales", "per_token", "fixed"),
    [
        ("none", 32 * 2 * 8 * 128, 0),
        (None, 32 * 2 * 8 * 128, 32 * 2 * 4),  # by default one float32 for each layer's K, one for its V
        ("per-tensor", 32 * 2 * 8 * 128, 32 * 2 * 4),
        ("per-token-head", 32 * 2 * 8 * (128 + 4), 0),
    ],
)
def test_eight_bits_and_their_scales(scales: Any, per_token: int, fixed: int) -> None:
    found = size(models.LLAMA_8B, kv_dtype="float8_e4m3fn", scales=scales)
    assert found.groups[0].bytes_per_token == (per_token,)
    assert found.stages[0].scale_bytes == fixed


def test_scales_of_a_latent() -> None:
    found = size(models.DEEPSEEK_V3, kv_dtype="float8_e4m3fn", scales="per-token-head")
    assert found.groups[0].bytes_per_token == (61 * (576 + 4),)
    assert size(models.DEEPSEEK_V3, kv_dtype="int8").stages[0].scale_bytes == 61 * 4


def test_blocks_are_aligned_and_tokens_are_not() -> None:
    """SmolLM2-135M: 16 * 23,040 = 368,640 bytes; the next multiple of 65,536 is 6 * 65,536."""
    (group,) = size(models.SMOLLM2_135M, alignment=65_536).groups
    assert group.bytes_per_token == (23_040,)
    assert group.bytes_per_block == (6 * 65_536,)


@pytest.mark.parametrize("name", ["LLAMA_8B", "LLAMA_1B", "QWEN2_7B", "SMOLLM2_135M"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_kv_spec_says(name: str, dtype: str) -> None:
    """The library's own arithmetic, where it has one."""
    config = getattr(models, name)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    spec = kv.KVSpec(
        num_layers=config["num_hidden_layers"], num_kv_heads=config["num_key_value_heads"], head_dim=head_dim,
        dtype=dtype, block_size=32, alignment=4096,
    )  # fmt: skip
    found = size(config, kv_dtype=dtype, block_size=32, alignment=4096, kv_memory=10 * GIB + 1)
    assert found.groups[0].bytes_per_token == (spec.bytes_per_token,)
    assert found.groups[0].bytes_per_block == (spec.bytes_per_block,)
    assert found.lengths[0].num_blocks == (spec.blocks_in(10 * GIB + 1),)


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("LLAMA_8B", 8.030e9, 0.005), ("LLAMA_70B", 70.55e9, 0.005), ("LLAMA_1B", 1.236e9, 0.005),
        ("MISTRAL_7B", 7.242e9, 0.005), ("MIXTRAL", 46.70e9, 0.005), ("QWEN2_7B", 7.616e9, 0.005),
        ("QWEN3_8B", 8.191e9, 0.005), ("GEMMA2_9B", 9.242e9, 0.005), ("GEMMA3_27B", 27.0e9, 0.01),
        ("PHI3_MINI", 3.821e9, 0.005), ("GPT_OSS_20B", 20.9e9, 0.01), ("DEEPSEEK_V3", 671e9, 0.005),
        ("FALCON_7B", 6.92e9, 0.005), ("SMOLLM2_135M", 134.5e6, 0.005), ("QWEN3_NEXT_80B", 80e9, 0.02),
        ("JAMBA", 51.6e9, 0.02),
    ],
)  # fmt: skip
def test_estimates_of_parameters_are_near_what_is_published(
    name: str, published: float, within: float
) -> None:
    estimated = estimate_parameters(ModelShape.from_config(getattr(models, name))).total
    assert estimated == pytest.approx(published, rel=within)


def test_memory_less_reserve_is_for_the_kv() -> None:
    """80 GiB, 90% of it used; 16 GiB of weights on 2 ranks, 1 GiB of activations: 63 GiB are left."""
    found = size(models.LLAMA_8B, memory=80 * GIB, weights=16 * GIB, activations=GIB, tensor_parallel=2)
    (stage,) = found.stages
    assert stage.reserve is not None
    assert (stage.reserve.weights, stage.reserve.activations) == (8 * GIB, GIB)
    assert (stage.reserve.weights_origin, stage.reserve.activations_origin) == ("given", "given")
    assert stage.kv_bytes == 72 * GIB - 9 * GIB
    assert found.lengths[0].num_blocks == (63 * 1024,)  # 1 MiB a block and rank


def test_estimates_say_that_they_are() -> None:
    (stage,) = size(models.LLAMA_8B, memory=80 * GIB).stages
    assert stage.reserve is not None
    # 2,048 tokens * (4 * 4,096 + 2 * 14,336) * 2 bytes, and 256 rows of 128,256 float32.
    assert stage.reserve.activations == 2048 * (4 * 4096 + 2 * 14336) * 2 + 256 * 128256 * 4
    assert (stage.reserve.weights_origin, stage.reserve.activations_origin) == ("estimated", "estimated")
    shape = ModelShape.from_config(models.LLAMA_8B)
    assert stage.reserve.weights == 2 * estimate_parameters(shape).total
    assert any("states is an estimate" in note for note in size(models.JAMBA).notes)
    assert any("mxfp4" in note for note in size(models.GPT_OSS_20B).notes)
    assert any("fp8" in note for note in size(models.DEEPSEEK_V3).notes)


def test_weights_of_stages_sum_up_to_the_whole() -> None:
    found = size(models.LLAMA_8B, pipeline_parallel=3, tensor_parallel=4, weights=16 * GIB)
    total = sum(4 * stage.reserve.weights for stage in found.stages if stage.reserve)
    assert 16 * GIB <= total < 16 * GIB + 3 * 4


def test_what_lies_beside_the_kv() -> None:
    row = size(models.LLAMA_8B, [8192], kv_memory=16 * GIB).lengths[0]
    assert row.num_blocks == (8192,)
    assert row.sequences == 15
    assert row.table_bytes == 15 * 512 * 4  # an int32 for each block of a table
    assert row.bookkeeping_bytes == 8192 * 88
    row = size(models.GPT_OSS_20B, [8192], block_size=32, kv_memory=GIB).lengths[0]
    # Two tables of the full length: what a window has left behind is null in them.
    assert row.table_bytes == row.sequences * 2 * 256 * 4


def test_waste_by_block_size() -> None:
    found = size(models.LLAMA_8B, [100, 1000], kv_memory=16 * GIB)
    rows = {row.block_size: row for row in found.block_sizes}
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [row.empty_slots for row in rows.values()] == [0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 63.5]
    assert rows[16].empty_share == (7.5 / 107.5, 7.5 / 1007.5)
    assert rows[128].bytes_per_block == 128 * 131_072
    # 1,024 blocks of 128, one of them null: 8 hold 1,000 tokens.
    assert rows[128].sequences[1] == 1023 // 8
    assert rows[1].bookkeeping_bytes == 131_072 * 88


def test_the_expected_waste_is_that_of_all_remainders() -> None:
    for row in size(models.LLAMA_8B).block_sizes:
        lengths = range(1000, 1000 + row.block_size)
        empty = [kv.block_layout(length, row.block_size)[0] * row.block_size - length for length in lengths]
        assert sum(empty) / len(empty) == row.empty_slots


def test_layers_that_share_kv_keep_none() -> None:
    config = {**models.LLAMA_8B, "num_kv_shared_layers": 12}
    assert [len(layer) for layer in ModelShape.from_config(config).layers] == [1] * 20 + [0] * 12
    assert size(config).groups[0].bytes_per_token == (20 * 4096,)


def test_layers_that_attend_beside_a_state_keep_both() -> None:
    config = {
        **models.LLAMA_8B, "model_type": "falcon_h1", "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    }  # fmt: skip
    found = size(config)
    assert found.groups[0].bytes_per_token == (131_072,)
    # 24 * 64 channels and 2 * 256 of B and C, 3 inputs each; 24 heads of 64 * 256 floats.
    assert found.stages[0].state_bytes == 32 * ((24 * 64 + 2 * 256) * 3 * 2 + 24 * 64 * 256 * 4)


def test_a_window_of_qwen_is_used_only_if_told_so_and_from_some_layer_on() -> None:
    told = {**models.QWEN2_7B, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20}
    assert [(g.num_layers, g.window) for g in size(told).groups] == [(20, None), (8, 4096)]
    assert [cache.window for (cache,) in ModelShape.from_config(told).layers][19:21] == [None, 4096]
    del told["use_sliding_window"]
    assert [(g.num_layers, g.window) for g in size(told).groups] == [(28, None)]


def test_falcon_has_one_kv_head_unless_told_otherwise() -> None:
    silent = {name: value for name, value in models.FALCON_7B.items() if name != "multi_query"}
    assert size(silent).groups[0].bytes_per_token == (8_192,)
    assert size({**silent, "multi_query": False}).groups[0].bytes_per_token == (71 * 8_192,)
    newer = {**silent, "new_decoder_architecture": True, "num_attention_heads": 64, "num_kv_heads": 8}
    assert size({**newer, "hidden_size": 4096}).groups[0].bytes_per_token == (8 * 8_192,)


def test_the_first_stage_has_the_embedding_and_the_last_the_output() -> None:
    """Llama-3.1-8B: both are 128,256 * 4,096 weights, the layers are alike."""
    first, middle, last = size(models.LLAMA_8B, pipeline_parallel=3, layers_per_stage=[8, 16, 8]).stages
    assert first.reserve is not None
    assert middle.reserve is not None
    assert last.reserve is not None
    assert first.reserve.weights == last.reserve.weights
    assert first.reserve.weights - middle.reserve.weights // 2 == 128_256 * 4096 * 2
