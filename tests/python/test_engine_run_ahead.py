"""Steps in flight: what overlaps, what is wasted, what happens to them when something ends or raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_models
from engine_helpers import Letters, assert_nothing_held, expected_answer, make_engine, run, tokens_of
from kvfolio.serving import Event, FinishReason, SamplingParams
from kvfolio.serving import flight as flight_module
from tiny_models import random_prompt
from transformers import PreTrainedModel

PATIENCE = 20.0  # seconds; a test that waits for so long fails


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


@pytest.fixture
def raised_at(model: PreTrainedModel) -> Iterator[dict[int, BaseException]]:
    """The model raises what is said for a token, where it is among its inputs."""
    errors: dict[int, BaseException] = {}

    def refuse(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        for token_id in kwargs["input_ids"][0].tolist():
            if token_id in errors:
                raise errors[token_id]

    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    yield errors
    handle.remove()


# What overlaps


def test_a_step_is_planned_while_the_one_before_computes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the callbacks of the one before that are called."""
    engine = make_engine(model, run_ahead=1)
    happened = {name: threading.Event() for name in ("planned", "delivered")}
    forward, plans, threads = engine.model.forward, [0], set()

    def compute(plan: Any, cache: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        if len(plans) == 3:  # the third step
            assert all(event.wait(PATIENCE) for event in happened.values())
        plans.append(plan.num_tokens)
        return forward(plan, cache, **options)

    def note_token(event: Event) -> None:
        if len(event.answer.token_ids) == 2:
            happened["delivered"].set()

    fly = engine._fly

    def note_plan(*arguments: Any, **request: Any) -> None:
        fly(*arguments, **request)
        if len(plans) >= 3 and engine._flights[-1].plan.token_ids.tolist() == [-1]:
            happened["planned"].set()

    monkeypatch.setattr(engine.model, "forward", compute)
    monkeypatch.setattr(engine, "_fly", note_plan)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=6), on_token=note_token)
    run(engine)
    assert tokens_of(request) == [expected_answer(model, [1, 2, 3], 6)]
    assert threading.current_thread() not in threads


def test_run_ahead_0_computes_in_the_callers_thread(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = make_engine(model), set()
    forward = engine.model.forward

    def compute(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return forward(*arguments, **options)

    monkeypatch.setattr(engine.model, "forward", compute)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
    run(engine)
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_so_many_steps_are_in_flight_between_two_calls(model: PreTrainedModel, run_ahead: int) -> None:
    engine = make_engine(model, run_ahead=run_ahead)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=8))
    got = []
    for step in range(8 + run_ahead):
        got += engine.step()
        assert len(engine._flights) == min(step + 1, run_ahead, 8 + run_ahead - 1 - step)
    assert [event.token_id for event in got] == expected_answer(model, [1, 2, 3], 8)
    assert engine.stats().steps == len(tokens_of(request)[0]) == 8
    assert_nothing_held(engine)


# What is wasted


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_an_end_that_nobody_foresaw_wastes_its_own_slots_only(model: PreTrainedModel, run_ahead: int) -> None:
    expected = expected_answer(model, [1, 2, 3], 8)
    first = next(i for i, token in enumerate(expected) if token not in expected[:i] and i >= 3)
    engine = make_engine(model, run_ahead=run_ahead)
    stopped = engine.submit([1, 2, 3], SamplingParams(max_tokens=30, stop_token_ids=[expected[first]]))
    other = engine.submit([4, 5], SamplingParams(max_tokens=12))
    run(engine)
    assert tokens_of(stopped) == [expected[: first + 1]]
    assert tokens_of(other) == [expected_answer(model, [4, 5], 12)]
    stats = engine.stats()
    assert stats.wasted_slots == run_ahead
    assert stats.computed_tokens == (3 + first) + (2 + 11) + run_ahead
    assert stats.steps == 12, "the other one was not held up"


def test_the_last_token_of_an_answer_is_known_ahead_and_wastes_nothing(model: PreTrainedModel) -> None:
    engine = make_engine(model, run_ahead=2)
    requests = [engine.submit([1, 2, 3 + n], SamplingParams(max_tokens=n)) for n in (1, 2, 3, 5)]
    run(engine)
    assert [len(tokens_of(request)[0]) for request in requests] == [1, 2, 3, 5]
    assert (engine.stats().wasted_slots, engine.stats().computed_tokens) == (0, 4 * 3 + 0 + 1 + 2 + 4)


def test_the_longest_sequence_allowed_is_filled_to_the_last_token(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=8, run_ahead=3)
    request = engine.submit(random_prompt(20, seed=1))
    run(engine)
    assert len(tokens_of(request)[0]) == 12 == engine.max_tokens_per_sequence - 20


# Forks, cancels, room


def test_a_prompt_waits_for_its_own_step_before_it_is_forked(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, run_ahead=1)
    fly, rows = engine._fly, []

    def note_plan(*arguments: Any, **request: Any) -> None:
        fly(*arguments, **request)
        rows.append(sorted(engine._flights[-1].plan.rows.tolist()))

    monkeypatch.setattr(engine, "_fly", note_plan)
    family = engine.submit(
        random_prompt(9, seed=4), SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=2)
    )
    other = engine.submit([1, 2], SamplingParams(max_tokens=5))
    run(engine)
    assert rows[:4] == [[0, 1], [1], [0, 1, 2, 3], [0, 1, 2, 3]], "one step without the family"
    assert [len(tokens) for tokens in tokens_of(family)] == [4, 4, 4]
    assert tokens_of(other) == [expected_answer(model, [1, 2], 5)]
    assert engine.stats().forks == 2


def test_who_is_cancelled_in_flight_keeps_its_blocks_quarantined_until_the_step_ends(
    model: PreTrainedModel,
) -> None:
    engine = make_engine(model, run_ahead=1)
    requests = [engine.submit(random_prompt(9, seed=i), SamplingParams(max_tokens=9)) for i in range(2)]
    for _ in range(3):
        engine.step()
    requests[1].cancel()
    assert engine.pool.num_quarantined == 3
    before = tokens_of(requests[1])
    engine.step()
    assert engine.pool.num_quarantined == 0
    assert tokens_of(requests[1]) == before
    assert engine.stats().wasted_slots == 1
    run(engine)
    assert tokens_of(requests[0]) == [expected_answer(model, random_prompt(9, seed=0), 9)]


def test_a_piece_of_a_prompt_that_was_cancelled_is_wasted_whole(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_tokens_per_step=8, run_ahead=1)
    request = engine.submit(random_prompt(20, seed=1), SamplingParams(max_tokens=2))
    engine.step()
    request.cancel()
    run(engine)
    assert (engine.stats().wasted_slots, engine.stats().computed_tokens) == (8, 8)


def test_cancelling_everything_leaves_the_step_in_flight_to_be_ended(model: PreTrainedModel) -> None:
    engine = make_engine(model, run_ahead=1)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    request.cancel()
    engine.step()
    assert_nothing_held(engine)
    again = engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
    run(engine)
    assert tokens_of(again) == [expected_answer(model, [1, 2, 3], 3)]


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_leaving_the_engine_ends_what_is_in_flight(model: PreTrainedModel, run_ahead: int) -> None:
    with make_engine(model, max_sequences=2, run_ahead=run_ahead) as engine:
        requests = [engine.submit([1, 2, 3, i], SamplingParams(max_tokens=9)) for i in range(3)]
        engine.step()
        engine.step()
    assert {request.answers[0].finish_reason for request in requests} == {FinishReason.CANCELLED}
    assert_nothing_held(engine)


def test_nobody_gives_way_while_an_end_in_flight_makes_room(model: PreTrainedModel) -> None:
    """Two of 3 blocks each fill a pool of 6; one ends with the step in flight, the other wants a fourth."""
    engine = make_engine(model, num_blocks=6, max_sequences=2, reserve_blocks=0, run_ahead=1)
    ending = engine.submit(random_prompt(10, seed=1), SamplingParams(max_tokens=3))
    growing = engine.submit(random_prompt(10, seed=2), SamplingParams(max_tokens=8))
    run(engine)
    assert ending.error is growing.error is None
    assert engine.stats().preemptions == 0
    assert tokens_of(growing) == [expected_answer(model, random_prompt(10, seed=2), 8)]


def test_a_waiting_request_is_not_failed_while_blocks_come_back(model: PreTrainedModel) -> None:
    engine = make_engine(model, num_blocks=4, max_sequences=1, run_ahead=1)
    first = engine.submit(random_prompt(12, seed=1), SamplingParams(max_tokens=4))
    second = engine.submit(random_prompt(13, seed=2), SamplingParams(max_tokens=3))
    engine.step()
    first.cancel()  # nobody runs now, and all blocks are quarantined
    run(engine)
    assert second.error is None
    assert tokens_of(second) == [expected_answer(model, random_prompt(13, seed=2), 3)]


def test_windows_let_blocks_go_while_a_step_is_in_flight() -> None:
    engine = make_engine(tiny_models.mistral(), max_sequences=1, max_tokens_per_step=4, run_ahead=1)
    request = engine.submit(random_prompt(40, seed=5), SamplingParams(max_tokens=60))
    run(engine, 90)
    assert engine.stats().peak_blocks <= 4
    assert tokens_of(request) == [expected_answer(tiny_models.mistral(), random_prompt(40, seed=5), 60)]


def test_a_prompt_is_found_in_the_cache_though_its_tokens_were_told_late(model: PreTrainedModel) -> None:
    engine = make_engine(model, run_ahead=1)
    first = engine.submit(random_prompt(6, seed=1), SamplingParams(max_tokens=9))
    run(engine)
    again = engine.submit(first.prompt_token_ids + tokens_of(first)[0], SamplingParams(max_tokens=1))
    run(engine)
    assert again.figures.cached_tokens == 12, "of 6 + 9 tokens 14 were computed"


# What raises


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_failing_step_voids_those_behind_it_and_ends_the_culprit_only(
    model: PreTrainedModel, raised_at: dict[int, BaseException], run_ahead: int
) -> None:
    """The model chokes on a token that one of four draws; the others stand in the same steps."""
    prompts = [random_prompt(5 + i, seed=60 + i) for i in range(4)]
    expected = [expected_answer(model, prompt, 12) for prompt in prompts]
    others = [token for i, answer in enumerate(expected) if i != 2 for token in (*prompts[i], *answer)]
    place = next(i for i, token in enumerate(expected[2]) if i >= 3 and token not in (*others, *prompts[2]))
    raised_at[expected[2][place]] = RuntimeError("choked")
    engine = make_engine(model, run_ahead=run_ahead)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
    run(engine)
    assert [str(request.error) for request in requests] == ["None", "None", "choked", "None"]
    assert tokens_of(requests[2]) == [expected[2][: place + 1]]
    assert [tokens_of(requests[i])[0] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
    assert engine.stats().failed_steps == 3


def test_no_plan_is_rolled_back_while_its_step_computes(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a prompt does not need the step before, and begins although that one failed."""
    engine = make_engine(model, max_tokens_per_step=8, run_ahead=2)
    forward, plans, ends, began = engine.model.forward, [], [], threading.Event()

    def compute(plan: Any, cache: Any, **options: Any) -> Any:
        plans.append(plan)
        if len(plans) == 1:
            assert began.wait(PATIENCE)
            raise RuntimeError("once")
        logits = forward(plan, cache, **options)
        if len(plans) == 2:
            time.sleep(0.2)
        ends.append(plan.is_rolled_back)
        return logits

    monkeypatch.setattr(engine.model, "forward", compute)
    request = engine.submit(random_prompt(30, seed=1), SamplingParams(max_tokens=2))
    other = engine.submit(random_prompt(30, seed=2), SamplingParams(max_tokens=2))
    engine.step()
    engine.step()
    began.set()
    time.sleep(0.05)  # so that the second begins
    run(engine)
    assert not any(ends)
    assert isinstance(request.error, RuntimeError), "it was alone in the step that failed"
    assert tokens_of(other) == [expected_answer(model, random_prompt(30, seed=2), 2)]


def test_a_request_that_was_cancelled_is_not_blamed_for_the_step(
    model: PreTrainedModel, raised_at: dict[int, BaseException]
) -> None:
    raised_at[99] = RuntimeError("choked")
    engine = make_engine(model, run_ahead=1)
    request = engine.submit([1, 99], SamplingParams(max_tokens=4))
    engine.step()
    request.cancel()
    run(engine)
    assert request.error is None
    assert request.answers[0].finish_reason == FinishReason.CANCELLED


def test_an_interrupt_in_the_model_goes_through_and_the_next_step_goes_on(
    model: PreTrainedModel, raised_at: dict[int, BaseException]
) -> None:
    expected = [expected_answer(model, [1, 2, 3 + i], 9) for i in range(2)]
    raised_at[expected[0][4]] = KeyboardInterrupt()
    engine = make_engine(model, run_ahead=2)
    requests = [engine.submit([1, 2, 3 + i], SamplingParams(max_tokens=9)) for i in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    engine.pool.audit()
    raised_at.clear()
    run(engine)
    assert [tokens_of(request)[0] for request in requests] == expected


@pytest.mark.parametrize("call", range(1, 9))
def test_an_interrupt_while_waiting_for_the_model_loses_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    engine = make_engine(model, run_ahead=1)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=9, temperature=1.0, seed=4))
    family = engine.submit([4, 5], SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=2))
    wait, calls = flight_module.wait, [0]

    def interrupt(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return wait(*arguments)

    monkeypatch.setattr(flight_module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    plain = make_engine(model)
    again = [plain.submit(r.prompt_token_ids, r.params) for r in (request, family)]
    run(plain)
    assert [tokens_of(r) for r in (request, family)] == [tokens_of(r) for r in again]
    assert engine.stats().computed_tokens == plain.stats().computed_tokens, "nothing was computed twice"


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_an_interrupt_at_a_launch_loses_no_plan(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, run_ahead: int, place: str
) -> None:
    """A plan that is made and in no queue would still have its tokens in the batch."""
    launch, calls = flight_module.Flight.launch, [0]

    def interrupt(*arguments: Any) -> None:
        calls[0] += 1
        if place == "behind":
            launch(*arguments)
        if calls[0] == 4:
            raise KeyboardInterrupt
        if place == "before":
            launch(*arguments)

    monkeypatch.setattr(flight_module.Flight, "launch", interrupt)
    engine = make_engine(model, run_ahead=run_ahead)
    requests = [engine.submit([1, 2, 3 + i], SamplingParams(max_tokens=9)) for i in range(2)]
    with pytest.raises(KeyboardInterrupt) as kept:  # so are the frames, and the plan in them
        run(engine)
    run(engine)
    assert [tokens_of(request)[0] for request in requests] == [
        expected_answer(model, [1, 2, 3 + i], 9) for i in range(2)
    ]
    assert all(request.error is None for request in requests)
    del kept


@pytest.mark.parametrize("call", range(1, 14, 2))
def test_an_interrupt_in_the_tokenizer_loses_no_token(model: PreTrainedModel, call: int) -> None:
    tokenizer = Letters()
    engine = make_engine(model, tokenizer=tokenizer, run_ahead=1)
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=4, n=n) for n in (1, 3)]
    requests = [engine.submit([1, 2, 3], own) for own in params]
    tokenizer.error, tokenizer.fails_at = KeyboardInterrupt, call
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    plain = make_engine(model)
    again = [plain.submit([1, 2, 3], own) for own in params]
    run(plain)
    assert [tokens_of(request) for request in requests] == [tokens_of(request) for request in again]
    for request in requests:
        assert [a.text for a in request.answers] == [Letters().decode(a.token_ids) for a in request.answers]


def test_a_failing_callback_ends_its_request_and_not_the_step_in_flight(model: PreTrainedModel) -> None:
    def complain(event: Event) -> None:
        if len(event.answer.token_ids) == 3:
            raise ZeroDivisionError

    engine = make_engine(model, run_ahead=1)
    bad = engine.submit([1, 2, 3], SamplingParams(max_tokens=9), on_token=complain)
    good = engine.submit([4, 5], SamplingParams(max_tokens=9))
    run(engine)
    assert isinstance(bad.error, ZeroDivisionError)
    assert tokens_of(good) == [expected_answer(model, [4, 5], 9)]
    assert (engine.stats().wasted_slots, engine.stats().failed_steps) == (1, 0)


def test_flights_keep_none_of_those_before_them(model: PreTrainedModel) -> None:
    engine = make_engine(model, run_ahead=1)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=30))
    for _ in range(20):
        engine.step()
    flight = engine._flights[-1]
    flight.wait()
    assert all(draw.source is None for draw in flight.draws.values())
    run(engine)
