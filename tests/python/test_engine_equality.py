"""Greedy answers are the model's own, whatever the batch, the block size and the room."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_models
import torch
from engine_helpers import Oracle, assert_nothing_held, expected_answer, tokens_of
from kvfolio.serving import Engine, Request, SamplingParams, compare_with_generate
from transformers import PreTrainedModel

MAX_TOKENS = 14
SHARED = tiny_models.random_prompt(33, seed=100)
# A whole prompt again, a prompt that begins another, one token, more than a window, more than a step's
# tokens.
PROMPTS = [
    SHARED,
    tiny_models.random_prompt(1, seed=1),
    SHARED + tiny_models.random_prompt(7, seed=2),
    tiny_models.random_prompt(21, seed=3),
    SHARED,
    SHARED[:16] + tiny_models.random_prompt(12, seed=4),
    tiny_models.random_prompt(40, seed=5),
    tiny_models.random_prompt(5, seed=6),
]
# Enough for the longest sequence (54 tokens), not for the five that run at once.
TIGHT_POOL = {1: 88, 4: 24, 16: 7, 32: 4}


@pytest.fixture(scope="module", params=list(tiny_models.FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_models.FAMILIES[request.param]()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return [expected_answer(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


def loop_options(mode: str, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """What the loop does besides; drafts are wrong at the first, second, third, fourth or no place."""
    if mode != "drafts":
        return {"run_ahead": int(mode.removeprefix("ahead "))}
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return {"speculation": Oracle(texts, lies=lambda length: length % 5)}


def squeeze(engine: Engine) -> None:
    """Step until nothing is left to do, and take the room from outside until somebody gives way."""
    while engine.has_work:
        # With windows everywhere sequences stop growing by themselves.
        decoding = [bool(work.answer.token_ids) for work in engine._schedule.running]
        wanted = len(decoding) > 1 and all(decoding) and engine.stats().preemptions == 0
        taken = engine.pool.allocate(engine.pool.num_free if wanted else 0)
        engine.step()
        engine.pool.release(taken)
    assert engine.stats().preemptions >= 1
    assert engine.stats().failed_steps == 0
    assert_nothing_held(engine)


@pytest.mark.parametrize("mode", ["ahead 0", "ahead 1", "drafts"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_greedy_answers_equal_generate_in_mixed_batches_with_preemption(
    model: PreTrainedModel, expected: list[list[int]], block_size: int, mode: str
) -> None:
    engine = Engine(
        model,
        num_blocks=TIGHT_POOL[block_size],
        block_size=block_size,
        max_sequences=5,
        max_tokens_per_step=24,
        max_tokens_per_sequence=54,
        reserve_blocks=0,
        **loop_options(mode, PROMPTS, expected),
    )
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS[:5]]
    for _ in range(4):  # the others arrive while these decode
        engine.step()
    requests += [engine.submit(prompt, params) for prompt in PROMPTS[5:]]
    squeeze(engine)

    for request, answer in zip(requests, expected, strict=True):
        # These models and prompts were chosen to have no near ties: they would hide errors.
        assert tokens_of(request) == [answer]
        assert len(answer) == MAX_TOKENS
    stats = engine.stats()
    assert stats.pool["hit_tokens"] > 0
    assert stats.wasted_slots == 0, "the length of an answer is known ahead"
    if mode == "drafts":
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.acceptance_rate == stats.accepted_tokens / stats.drafted_tokens


@pytest.mark.parametrize("mode", ["ahead 1", "ahead 2", "drafts"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_seeded_answers_do_not_depend_on_how_the_loop_goes(
    model: PreTrainedModel, block_size: int, mode: str
) -> None:
    """Families of samples that share blocks, preempted; drafts of one sample are tried on the others, too."""
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[4]]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=t, top_p=0.95, seed=3, n=n)
        for t, n in ((0.7, 2), (1.0, 2), (1.3, 1))
    ]

    def submit(engine: Engine) -> list[Request]:
        return [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    plain = Engine(model, num_blocks=400, block_size=block_size, max_sequences=5, prefix_cache=False)
    wanted = [tokens_of(request) for request in submit(plain) if plain.run() is None]
    texts = [(prompt, answer) for prompt, own in zip(prompts, wanted, strict=True) for answer in own]
    engine = Engine(
        model,
        num_blocks=TIGHT_POOL[block_size],
        block_size=block_size,
        max_sequences=5,
        max_tokens_per_step=24,
        max_tokens_per_sequence=54,
        reserve_blocks=0,
        **loop_options(mode, *map(list, zip(*texts, strict=True))),
    )
    requests = submit(engine)
    squeeze(engine)
    assert [tokens_of(request) for request in requests] == wanted
    if mode == "drafts":
        assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def test_generate_still_works_on_the_model_between_steps() -> None:
    model = tiny_models.gemma2()
    before = model.config._attn_implementation
    engine = Engine(model, num_blocks=32, block_size=4)
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=MAX_TOKENS))
    engine.step()
    assert model.config._attn_implementation == before
    expected = compare_with_generate(model, PROMPTS[0], [], max_tokens=MAX_TOKENS).expected
    engine.run()
    assert request.answers[0].token_ids == expected


def test_windows_on_every_layer_let_blocks_behind_them_go() -> None:
    """A window of 9 keys spans at most 3 blocks of 4, plus those of the tokens in the step."""
    engine = Engine(
        tiny_models.mistral(), num_blocks=64, block_size=4, max_sequences=1, max_tokens_per_step=4
    )
    engine.submit(PROMPTS[6], SamplingParams(max_tokens=60))
    engine.run()
    assert 3 <= engine.stats().peak_blocks <= 4


def test_a_difference_is_excused_only_where_the_reference_is_in_doubt() -> None:
    model = tiny_models.llama()
    expected = compare_with_generate(model, PROMPTS[3], [], max_tokens=6).expected
    exact = compare_with_generate(model, PROMPTS[3], expected, max_tokens=6)
    assert (exact.agrees, exact.tie_at, exact.differs_at) == (True, None, None)
    wrong = [*expected[:3], (expected[3] + 1) % tiny_models.VOCABULARY, *expected[4:]]
    different = compare_with_generate(model, PROMPTS[3], wrong, max_tokens=6)
    assert (different.agrees, different.tie_at, different.differs_at) == (False, None, 3)
    short = compare_with_generate(model, PROMPTS[3], expected[:-1], max_tokens=6)
    assert (short.agrees, short.differs_at) == (False, 5)
    # Two tokens with the same embedding are equally likely everywhere.
    twin = expected[3]
    other = (twin + 1) % tiny_models.VOCABULARY
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[twin]
    first = compare_with_generate(model, PROMPTS[3], [], max_tokens=6).expected
    doubtful = [other + twin - token if token in (twin, other) else token for token in first]
    tied = compare_with_generate(model, PROMPTS[3], doubtful, max_tokens=6)
    assert tied.agrees
    assert tied.tie_at == next(i for i, token in enumerate(first) if token in (twin, other))
