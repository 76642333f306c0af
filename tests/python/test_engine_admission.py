"""Who runs, who waits, who gives way, who is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import kvfolio as kv
import tiny_models
from engine_helpers import assert_nothing_held, make_engine, tokens_of
from kvfolio.serving import FinishReason, RequestRefused, SamplingParams
from tiny_models import random_prompt
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


def test_what_can_never_be_finished_is_refused_at_the_door(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=8)
    assert engine.max_tokens_per_sequence == 32
    refusal = "exceed the engine's max_tokens_per_sequence, 32 "
    with pytest.raises(RequestRefused, match=f"20 prompt tokens and an answer of up to 13 {refusal}"):
        engine.submit(random_prompt(20, seed=1), SamplingParams(max_tokens=13))
    with pytest.raises(RequestRefused, match=refusal):
        engine.submit(random_prompt(32, seed=1))
    with pytest.raises(RequestRefused, match="5 samples exceed the engine's max_sequences, 4"):
        engine.submit([1], SamplingParams(n=5))
    assert not engine.has_work
    longest = engine.submit(random_prompt(20, seed=1), SamplingParams(max_tokens=12))
    filled = engine.submit(random_prompt(20, seed=2), SamplingParams())
    engine.run()
    assert [len(tokens_of(request)[0]) for request in (longest, filled)] == [12, 12]


@pytest.mark.parametrize("prompt", [[], [-1], [tiny_models.VOCABULARY]])
def test_bad_prompts_are_refused(model: PreTrainedModel, prompt: list[int]) -> None:
    engine = make_engine(model)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        engine.submit(prompt)
    assert not engine.has_work


def test_engine_options_that_contradict_each_other_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="max_sequences"):
        make_engine(model, max_sequences=33)
    with pytest.raises(ValueError, match="max_tokens_per_sequence"):
        make_engine(model, num_blocks=8, max_tokens_per_sequence=33)
    with pytest.raises(ValueError, match="max_tokens_per_sequence"):
        make_engine(model, num_blocks=100, max_tokens_per_sequence=257)


def test_thirty_requests_in_a_tiny_pool_all_end_without_thrashing(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=8, max_sequences=8, reserve_blocks=0)
    requests = [
        engine.submit(random_prompt(6 + i % 5, seed=i), SamplingParams(max_tokens=6 + i % 4))
        for i in range(30)
    ]
    steps = 0
    while engine.has_work and steps < 400:
        engine.step()
        steps += 1
    assert all(request.is_finished and request.error is None for request in requests)
    assert engine.stats().preemptions > 0
    assert requests[0].figures.preemptions == 0, "the oldest never gives way"
    assert max(request.figures.preemptions for request in requests) <= 8
    assert_nothing_held(engine)


def test_the_youngest_gives_way_and_comes_back_before_those_who_wait(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=9, max_sequences=3, reserve_blocks=0)
    requests = [
        engine.submit(random_prompt(8, seed=i), SamplingParams(max_tokens=n))
        for i, n in enumerate([6, 9, 8, 8])
    ]
    youngest, behind = requests[2], requests[3]
    while engine.has_work:
        engine.step()
        if (
            youngest.answers[0] in [work.answer for work in engine._schedule.waiting]
            and youngest.figures.preemptions
        ):
            assert behind.admitted_at is None
    assert [bool(request.figures.preemptions) for request in requests] == [False, False, True, False]


def test_blocks_that_running_prompts_have_yet_to_take_are_not_given_away(model: PreTrainedModel) -> None:
    """Two prompts of 32 tokens fit the 12 free blocks one after the other, not at once."""
    engine = make_engine(model, num_blocks=12, max_tokens_per_step=8, reserve_blocks=0)
    requests = [engine.submit(random_prompt(32, seed=i), SamplingParams(max_tokens=4)) for i in range(2)]
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    engine.run()
    assert all(request.error is None for request in requests)
    assert engine.stats().preemptions == 0


def test_the_reserve_is_kept_while_others_run_and_waived_while_nobody_does(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=12, reserve_blocks=6)
    first = engine.submit(random_prompt(40, seed=1), SamplingParams(max_tokens=4))
    engine.step()
    assert engine.stats().running == 1, "alone, it may take the reserve"
    while not first.is_finished:
        engine.step()
    two = [engine.submit(random_prompt(14, seed=i), SamplingParams(max_tokens=2)) for i in range(2)]
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1), "4 + 4 blocks would leave less than 6"
    engine.run()
    assert all(request.error is None for request in two)


def test_prompts_in_pieces_do_not_stop_those_who_decode(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=4, max_tokens_per_step=8)
    decoding = engine.submit([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    long = engine.submit(random_prompt(60, seed=1), SamplingParams(max_tokens=1))
    steps = 0
    while not long.is_finished:
        assert decoding in [event.request for event in engine.step()]
        steps += 1
    assert steps == 9, "60 tokens, 7 beside the decoding one in each step"


def test_who_fits_no_more_because_of_others_blocks_fails_and_does_not_hang(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=8)
    running = engine.submit(random_prompt(10, seed=1), SamplingParams(max_tokens=20))
    waiting = engine.submit(random_prompt(24, seed=2), SamplingParams(max_tokens=2))
    engine.step()
    taken = engine.pool.allocate(engine.pool.num_free)
    engine.run()
    for request in (running, waiting):
        assert isinstance(request.error, kv.OutOfBlocks)
        assert request.answers[0].finish_reason == FinishReason.ERROR
    engine.pool.release(taken)
    assert_nothing_held(engine)
