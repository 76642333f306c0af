"""Samples of one prompt: by fork, and each as if it were alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import tiny_models
from engine_helpers import assert_nothing_held, make_engine, tokens_of
from kvfolio.serving import FinishReason, SamplingParams
from tiny_models import random_prompt
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


def test_samples_share_one_computed_prompt_and_draw_as_if_they_were_alone(model: PreTrainedModel) -> None:
    engine, prompt = make_engine(model), random_prompt(18, seed=1)
    params = {"max_tokens": 8, "temperature": 1.5, "top_p": 0.95}
    family = engine.submit(prompt, SamplingParams(n=3, seed=40, **params))
    engine.run()
    assert engine.stats().forks == 2
    assert engine.stats().computed_tokens == 18 + 3 * 7
    assert engine.pool.stats()["copies"] == 3, "each writer copies the partial block, which the step holds"
    assert len({tuple(tokens) for tokens in tokens_of(family)}) == 3

    alone = make_engine(model, prefix_cache=False)
    singles = [alone.submit(prompt, SamplingParams(seed=40 + i, **params)) for i in range(3)]
    alone.run()
    assert [tokens_of(single)[0] for single in singles] == tokens_of(family)


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(model: PreTrainedModel) -> None:
    prompt, params = (
        random_prompt(13, seed=2),
        SamplingParams(max_tokens=16, temperature=1.2, top_k=20, seed=9),
    )
    alone = make_engine(model)
    single = alone.submit(prompt, params)
    alone.run()
    crowd = make_engine(model, num_blocks=16, reserve_blocks=0)
    others = [
        crowd.submit(random_prompt(9 + i, seed=10 + i), SamplingParams(max_tokens=20)) for i in range(3)
    ]
    same = crowd.submit(prompt, params)
    crowd.run()
    assert tokens_of(same) == tokens_of(single)
    assert same.figures.preemptions > 0, "the youngest of a crowd in 16 blocks gives way"
    assert all(other.is_finished for other in others)


def test_a_chosen_seed_is_told_and_repeats_the_answer(model: PreTrainedModel) -> None:
    engine, params = make_engine(model), {"max_tokens": 10, "temperature": 2.0}
    first, second = (engine.submit([5, 6, 7], SamplingParams(**params)) for _ in range(2))
    engine.run()
    again = engine.submit([5, 6, 7], SamplingParams(seed=first.seed, **params))
    engine.run()
    assert tokens_of(again) == tokens_of(first) != tokens_of(second)


def test_a_preempted_family_goes_on_one_by_one_and_finds_its_prompt_again(model: PreTrainedModel) -> None:
    prompt = random_prompt(19, seed=3)
    params = SamplingParams(n=3, seed=1, max_tokens=20, temperature=1.0)
    roomy, tight = make_engine(model), make_engine(model, num_blocks=12, reserve_blocks=0)
    free, squeezed = roomy.submit(prompt, params), tight.submit(prompt, params)
    roomy.run()
    tight.run()
    assert tokens_of(squeezed) == tokens_of(free)
    assert squeezed.figures.preemptions > 0
    assert squeezed.figures.recovered_tokens >= 16
    assert_nothing_held(tight)


def test_a_family_is_admitted_only_with_a_row_for_each_of_its_samples(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=3)
    first = engine.submit(random_prompt(4, seed=1), SamplingParams(max_tokens=6))
    family = engine.submit(random_prompt(40, seed=2), SamplingParams(n=3, max_tokens=3, temperature=1.0))
    last = engine.submit(random_prompt(4, seed=3), SamplingParams(max_tokens=3))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    while not first.is_finished:
        engine.step()
    engine.step()  # the family's prompt takes two steps; its rows are not given away meanwhile
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    engine.run()
    assert [len(tokens) for tokens in tokens_of(family)] == [3, 3, 3]
    assert last.answers[0].finish_reason == FinishReason.LENGTH
