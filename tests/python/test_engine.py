"""The loop: who runs, who waits, who gives way, what an end leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import kvfolio as kv
import tiny_models
from kvfolio.serving import (
    Engine,
    FinishReason,
    Request,
    RequestRefused,
    SamplingParams,
    compare_with_generate,
)
from tiny_models import random_prompt
from transformers import PreTrainedModel

POISON = tiny_models.VOCABULARY - 1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


@pytest.fixture
def poisoned(model: PreTrainedModel) -> Iterator[list[type[BaseException]]]:
    """The model raises what the list holds as long as the step has the poison among its tokens."""
    raised: list[type[BaseException]] = []

    def refuse(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if raised and bool((kwargs["input_ids"] == POISON).any()):
            raise raised[0]("poison")

    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    yield raised
    handle.remove()


def make_engine(model: PreTrainedModel, **changes: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_sequences": 4, "max_tokens_per_step": 32}
    return Engine(model, **{**options, **changes})


def expected_answer(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    return compare_with_generate(model, prompt, [], max_tokens=max_tokens).expected


def assert_nothing_held(engine: Engine) -> None:
    engine.pool.audit()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_work


def tokens_of(request: Request) -> list[list[int]]:
    return [answer.token_ids for answer in request.answers]


# Samples and seeds


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


# Admission and preemption


def test_what_can_never_be_finished_is_refused_at_the_door(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=8)
    assert engine.max_tokens_per_sequence == 32
    with pytest.raises(RequestRefused, match="32"):
        engine.submit(random_prompt(20, seed=1), SamplingParams(max_tokens=13))
    with pytest.raises(RequestRefused, match="32"):
        engine.submit(random_prompt(32, seed=1))
    with pytest.raises(RequestRefused, match="samples"):
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


# Failures


def test_a_failing_request_takes_nobody_with_it_and_loses_no_block(
    model: PreTrainedModel, poisoned: list[type[BaseException]]
) -> None:
    prompts = [random_prompt(7 + i, seed=60 + i) for i in range(4)]
    prompts[2] = [*prompts[2][:5], POISON, *prompts[2][5:]]
    expected = [expected_answer(model, prompt, 6) for prompt in prompts]
    assert not any(POISON in answer for answer in expected)
    poisoned.append(RuntimeError)
    engine = make_engine(model, max_tokens_per_step=64)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=6)) for prompt in prompts]
    events = engine.step()
    assert engine.stats().failed_steps == 3, "of four rows, then two, then the one"
    assert [event.request for event in events if event.finish_reason == FinishReason.ERROR] == [requests[2]]
    engine.run()
    for request, answer in zip(requests, expected, strict=True):
        if request is not requests[2]:
            assert tokens_of(request) == [answer]
    assert isinstance(requests[2].error, RuntimeError)
    assert tokens_of(requests[2]) == [[]]
    with pytest.raises(RuntimeError, match="poison"):
        list(engine.stream(requests[2]))
    assert_nothing_held(engine)


def test_a_family_that_fails_is_not_tried_again_by_its_other_samples(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(7 + i, seed=65 + i) for i in range(3)]
    expected = [expected_answer(model, prompt, 6) for prompt in prompts]
    engine = make_engine(model)
    family = engine.submit(prompts[0], SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=3))
    others = [engine.submit(prompt, SamplingParams(max_tokens=6)) for prompt in prompts[1:]]
    engine.step()
    rows = {work.row for work in engine._schedule.running if work.answer.request is family}
    assert len(rows) == 2
    forward = engine.model.forward

    def refuse(plan: Any, cache: Any, **options: Any) -> Any:
        if rows & set(plan.rows.tolist()):
            raise RuntimeError("family")
        return forward(plan, cache, **options)

    monkeypatch.setattr(engine.model, "forward", refuse)
    engine.step()
    assert [answer.finish_reason for answer in family.answers] == [FinishReason.ERROR] * 2
    engine.run()
    assert [tokens_of(other)[0] for other in others] == expected[1:]
    assert_nothing_held(engine)


def test_an_interrupt_in_the_model_goes_through_and_the_next_step_goes_on(
    model: PreTrainedModel, poisoned: list[type[BaseException]]
) -> None:
    prompt = [*random_prompt(9, seed=70), POISON, 3]
    expected = expected_answer(model, prompt, 5)
    engine = make_engine(model)
    request = engine.submit(prompt, SamplingParams(max_tokens=5))
    poisoned.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.pool.audit()
    poisoned.clear()
    engine.run()
    assert tokens_of(request) == [expected]
    assert_nothing_held(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failing_draw_ends_its_request_only(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    from kvfolio.serving import flight as module

    draw = module.sample
    engine = make_engine(model)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=n)
    bad, good = engine.submit([1, 2, 3], params), engine.submit([4, 5], SamplingParams(max_tokens=5))

    def fail_second_sample(logits: Any, of: SamplingParams, generator: Any) -> int:
        if of is params and generator.initial_seed() == bad.answers[-1].seed:
            raise FloatingPointError
        return draw(logits, of, generator)

    monkeypatch.setattr(module, "sample", fail_second_sample)
    engine.run()
    assert isinstance(bad.error, FloatingPointError)
    assert {answer.finish_reason for answer in bad.answers} == {FinishReason.ERROR}
    assert tokens_of(good) == [expected_answer(model, [4, 5], 5)]
    assert_nothing_held(engine)


def test_a_failing_callback_ends_its_request_only(model: PreTrainedModel) -> None:
    def complain(_event: Any) -> None:
        raise ZeroDivisionError

    engine = make_engine(model)
    bad = engine.submit([1, 2, 3], SamplingParams(max_tokens=5), on_token=complain)
    good = engine.submit([4, 5], SamplingParams(max_tokens=5))
    engine.run()
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.error is None
    assert len(tokens_of(good)[0]) == 5
    assert_nothing_held(engine)


# Ends


def test_cancelled_requests_hold_nothing_whether_they_wait_or_run(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=2)
    requests = [engine.submit(random_prompt(9, seed=i), SamplingParams(max_tokens=9)) for i in range(3)]
    engine.step()
    before = tokens_of(requests[1])
    requests[1].cancel()
    requests[2].cancel()
    requests[2].cancel()
    assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    assert tokens_of(requests[1]) == before != [[]]
    ends = {event.request.id: event.finish_reason for event in engine.step() if event.token_id is None}
    assert ends == {1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED}
    engine.run()
    assert requests[0].answers[0].finish_reason == FinishReason.LENGTH
    assert_nothing_held(engine)


def test_a_callback_may_cancel_and_submit(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    followers: list[Request] = []

    def on_token(event: Any) -> None:
        if event.token_id is not None and len(event.answer.token_ids) == 3:
            event.request.cancel()
            followers.append(engine.submit([9, 8], SamplingParams(max_tokens=2)))

    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=9), on_token=on_token)
    engine.run()
    assert len(tokens_of(request)[0]) == 3
    assert request.answers[0].finish_reason == FinishReason.CANCELLED
    assert [len(tokens_of(follower)[0]) for follower in followers] == [2]
    assert_nothing_held(engine)


def test_leaving_the_engine_cancels_what_is_left(model: PreTrainedModel) -> None:
    with make_engine(model, max_sequences=2) as engine:
        requests = [engine.submit([1, 2, 3, i], SamplingParams(max_tokens=9)) for i in range(3)]
        engine.step()
    assert {request.answers[0].finish_reason for request in requests} == {FinishReason.CANCELLED}
    assert_nothing_held(engine)


def test_stop_tokens_end_an_answer_and_stay_in_it(model: PreTrainedModel) -> None:
    expected = expected_answer(model, [1, 2, 3], 8)
    end = expected[4]
    first = expected.index(end)
    engine = make_engine(model)
    stopped = engine.submit([1, 2, 3], SamplingParams(max_tokens=8, stop_token_ids=[end]))
    full = engine.submit([1, 2, 3], SamplingParams(max_tokens=8))
    engine.run()
    assert tokens_of(stopped) == [expected[: first + 1]]
    assert stopped.answers[0].finish_reason == FinishReason.STOP
    assert tokens_of(full) == [expected]
    assert full.answers[0].finish_reason == FinishReason.LENGTH


def test_the_models_end_of_sequence_ends_an_answer_unless_ignored() -> None:
    end = expected_answer(tiny_models.llama(), [1, 2, 3], 8)[4]
    model = tiny_models.llama(eos_token_id=end)
    expected = expected_answer(model, [1, 2, 3], 8)
    assert 1 <= len(expected) <= 5
    engine = make_engine(model)
    stopped = engine.submit([1, 2, 3], SamplingParams(max_tokens=8))
    ignoring = engine.submit([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.run()
    assert tokens_of(stopped) == [expected]
    assert len(tokens_of(ignoring)[0]) == 8
    assert stopped.answers[0].finish_reason == FinishReason.STOP


class Letters:
    """Token 1 is "b", and so on; letters repeat."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def test_stop_strings_end_an_answer_and_its_text_before_them(model: PreTrainedModel) -> None:
    text = Letters().decode(expected_answer(model, [1, 2, 3], 12))
    engine = make_engine(model, tokenizer=Letters())
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=12, stop=[text[5:8]]))
    engine.run()
    answer = request.answers[0]
    assert answer.finish_reason == FinishReason.STOP
    assert answer.text == text[: text.index(text[5:8])]
    assert answer.text == "".join(event.text for event in request.events)
    assert len(answer.token_ids) == text.index(text[5:8]) + 3
    with pytest.raises(ValueError, match="tokenizer"):
        make_engine(model).submit([1], SamplingParams(stop=["x"]))


def test_streams_deliver_every_event_in_order_however_they_interleave(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    requests = [engine.submit([1, 2, 3 + i], SamplingParams(max_tokens=6)) for i in range(2)]
    streams = [engine.stream(request) for request in requests]
    got: list[list[int | None]] = [[], []]
    for _ in range(6):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream).token_id)
    assert got == [tokens_of(request)[0] for request in requests]
    assert all(next(stream, None) is None for stream in streams)
    assert [event.token_id for event in engine.stream(requests[0])] == got[0], "it can be read again"


# Figures


def test_cached_tokens_are_those_of_others_and_recovered_ones_its_own(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=12, reserve_blocks=0)
    strangers = [
        engine.submit(random_prompt(13, seed=80 + i), SamplingParams(max_tokens=16)) for i in range(3)
    ]
    engine.run()
    assert [request.figures.cached_tokens for request in strangers] == [0, 0, 0]
    assert sum(request.figures.preemptions for request in strangers) > 0
    assert sum(request.figures.recovered_tokens for request in strangers) > 0
    again = engine.submit(strangers[2].prompt_token_ids, SamplingParams(max_tokens=1))
    engine.run()
    assert (again.figures.cached_tokens, again.figures.recovered_tokens) == (12, 0)


def test_unequal_contexts_share_no_block(model: PreTrainedModel) -> None:
    engine, prompt = make_engine(model), random_prompt(20, seed=1)
    cached = []
    for tenant in ("a", "b", "a"):
        request = engine.submit(prompt, SamplingParams(max_tokens=1), context=kv.Context(tenant=tenant))
        engine.run()
        cached.append(request.figures.cached_tokens)
    assert cached == [0, 0, 16]


def test_the_three_speeds_are_three_figures(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=1)
    requests = [engine.submit([1, 2, 3], SamplingParams(max_tokens=5)) for _ in range(2)]
    engine.run()
    for request in requests:
        figures = request.figures
        assert figures.queue_time is not None
        assert figures.time_to_first_token is not None
        assert figures.time_per_output_token is not None
        assert 0 <= figures.queue_time < figures.time_to_first_token
        decoding = 4 * figures.time_per_output_token
        assert figures.latency == pytest.approx(figures.time_to_first_token + decoding)
    assert requests[0].answers[0].last_token_at is not None
    assert requests[1].admitted_at is not None
    assert requests[1].admitted_at > requests[0].answers[0].last_token_at, "one at a time"
    stats = engine.stats()
    assert stats.throughput == pytest.approx(10 / stats.busy_time)


def test_block_figures_are_those_of_the_pool(model: PreTrainedModel) -> None:
    """One sequence of 6 tokens, then 7, in blocks of 4: two blocks held, two slots empty, then one."""
    engine = make_engine(model, max_tokens_per_sequence=40)
    engine.submit(random_prompt(6, seed=1), SamplingParams(max_tokens=2))
    engine.run()
    stats = engine.stats()
    assert (stats.steps, stats.peak_blocks, stats.mean_blocks) == (2, 2, 2)
    assert stats.empty_share == pytest.approx((2 + 1) / (8 + 8))
    assert (stats.peak_reserved_blocks, stats.mean_reserved_blocks) == (10, 10)
    assert (stats.computed_tokens, stats.output_tokens, stats.finished_requests) == (7, 2, 1)
