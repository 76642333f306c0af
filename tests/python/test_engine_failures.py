"""The loop when something raises: whose request ends, what goes on, what is lost (nothing)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from engine_helpers import Letters, assert_nothing_held, expected_answer, run, tokens_of  # noqa: E402
from kvfolio.serving import Engine, Event, FinishReason, Request, SamplingParams  # noqa: E402
from kvfolio.serving import flight as flight_module  # noqa: E402
from tiny_models import random_prompt  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

POISON = tiny_models.VOCABULARY - 1
PARAMS = {"max_tokens": 6, "temperature": 1.2, "seed": 5}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


def make_engine(model: PreTrainedModel, **changes: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_sequences": 6, "max_tokens_per_step": 32}
    return Engine(model, **{**options, **changes})


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


def submit_all(engine: Engine) -> list[Request]:
    """A family and two singles."""
    return [
        engine.submit(random_prompt(7 + i, seed=20 + i), SamplingParams(n=3 if i == 1 else 1, **PARAMS))
        for i in range(3)
    ]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[list[int]]]:
    engine = make_engine(model)
    requests = submit_all(engine)
    run(engine)
    return [tokens_of(request) for request in requests]


@pytest.mark.parametrize("call", [1, 2, 6, 9])
def test_a_failing_tokenizer_ends_its_request_only(
    model: PreTrainedModel, expected: list[list[list[int]]], call: int
) -> None:
    tokenizer = Letters()
    engine = make_engine(model, tokenizer=tokenizer)
    requests = submit_all(engine)
    tokenizer.fails_at = call
    run(engine)
    failed = [request for request in requests if request.error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].error, ValueError)
    assert {answer.finish_reason for answer in failed[0].answers} == {FinishReason.ERROR}
    for request, tokens in zip(requests, expected, strict=True):
        if request is not failed[0]:
            assert tokens_of(request) == tokens
            letters = [Letters().decode(answer) for answer in tokens]
            assert [answer.text for answer in request.answers] == letters


def test_a_tokenizer_that_always_fails_keeps_no_block(model: PreTrainedModel) -> None:
    class Broken:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            raise ValueError

    tokenizer = Letters()
    with make_engine(model, tokenizer=tokenizer) as engine:
        broken = engine.submit([1, 2, 3], SamplingParams(max_tokens=9, stop=["zzz"]))
        engine.step()
        kept = broken.answers[0]._text_stream
        assert kept is not None
        kept._tokenizer = Broken()
        broken.cancel()
        assert broken.answers[0].finish_reason == FinishReason.CANCELLED
    run(engine)


@pytest.mark.parametrize("call", range(1, 14))
def test_an_interrupt_in_the_tokenizer_loses_no_token(
    model: PreTrainedModel, expected: list[list[list[int]]], call: int
) -> None:
    tokenizer = Letters()
    engine = make_engine(model, tokenizer=tokenizer)
    requests = submit_all(engine)
    tokenizer.error, tokenizer.fails_at = KeyboardInterrupt, call
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    assert [tokens_of(request) for request in requests] == expected
    for request in requests:
        assert [e.token_id for e in request.events if e.answer.index == 0] == request.answers[0].token_ids
        assert [a.text for a in request.answers] == [Letters().decode(a.token_ids) for a in request.answers]


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
@pytest.mark.parametrize("call", [1, 2, 5, 7])
def test_a_draw_that_does_not_count_moves_no_generator(
    model: PreTrainedModel,
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    call: int,
) -> None:
    draw, calls = flight_module.sample, [0]

    def fail_once(*arguments: Any) -> int:
        token = draw(*arguments)
        calls[0] += 1
        if calls[0] == call:
            raise error
        return token

    monkeypatch.setattr(flight_module, "sample", fail_once)
    engine = make_engine(model)
    requests = submit_all(engine)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    run(engine)
    assert [tokens_of(request) for request in requests] == expected


def test_an_interrupt_in_the_second_half_keeps_the_tokens_of_the_first(
    model: PreTrainedModel, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    requests = submit_all(engine)
    forward, raised = engine.model.forward, [RuntimeError, None, KeyboardInterrupt]

    def fail(plan: Any, cache: Any, **options: Any) -> Any:
        error = raised.pop(0) if raised else None
        if error is not None:
            raise error
        return forward(plan, cache, **options)

    monkeypatch.setattr(engine.model, "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.pool.audit()
    assert not raised
    run(engine)
    assert [tokens_of(request) for request in requests] == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["lm_head", "embed_tokens"])
def test_what_is_not_finite_is_not_published(value: float, where: str) -> None:
    """Of a prompt in pieces, too, whose first ones have no logits."""
    model = tiny_models.llama()
    prompts = [random_prompt(19, seed=40 + i) for i in range(3)]
    spoiled = {"lm_head": model.lm_head, "embed_tokens": model.model.embed_tokens}[where]
    bad = [True]

    def spoil(_module: Any, _arguments: Any, out: Any) -> Any:
        return torch.where(spoil_rows[None, : out.shape[1], None], value, out) if bad else out

    def find_rows(_module: Any, _arguments: Any, kwargs: dict[str, Any]) -> None:
        nonlocal spoil_rows
        ids = kwargs["input_ids"][0]
        spoil_rows = ids == prompts[1][2]
        if where == "lm_head" and bool(spoil_rows.any()):
            spoil_rows = torch.ones_like(ids, dtype=torch.bool)

    spoil_rows = torch.zeros(0, dtype=torch.bool)
    model.register_forward_pre_hook(find_rows, with_kwargs=True)
    spoiled.register_forward_hook(spoil)
    engine = make_engine(model, max_tokens_per_step=16 if where == "embed_tokens" else 64)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=1)) for prompt in prompts]
    run(engine)
    assert [isinstance(request.error, FloatingPointError) for request in requests] == [False, True, False]
    bad.clear()
    again = engine.submit(prompts[1], SamplingParams(max_tokens=6))
    run(engine)
    assert again.figures.cached_tokens == 0
    fresh = make_engine(tiny_models.llama())
    expected = fresh.submit(prompts[1], SamplingParams(max_tokens=6))
    run(fresh)
    assert tokens_of(again) == tokens_of(expected)


def test_a_request_of_another_engine_is_refused(model: PreTrainedModel) -> None:
    engine, other = make_engine(model), make_engine(model)
    request = other.submit([1, 2, 3], SamplingParams(max_tokens=3))
    for refuse in (engine.cancel, engine.stream):
        with pytest.raises(ValueError, match="request must be one of this engine's own"):
            refuse(request)
    assert not request.is_finished
    assert len(list(other.stream(request))) == 3


@pytest.mark.parametrize("leave", [False, True])
def test_the_end_of_the_last_request_is_delivered_though_it_was_cancelled(
    model: PreTrainedModel, leave: bool
) -> None:
    ends: list[FinishReason | None] = []
    with make_engine(model) as engine:
        request = engine.submit([1, 2], on_token=lambda event: ends.append(event.finish_reason))
        if not leave:
            request.cancel()
            engine.run()
            assert ends == [FinishReason.CANCELLED]
    assert ends == [FinishReason.CANCELLED]
    assert not engine.has_work


def test_an_interrupt_in_a_callback_drops_no_other_event(model: PreTrainedModel) -> None:
    got: list[Event] = []

    def interrupt_once(event: Event) -> None:
        got.append(event)
        if len(got) == 2:
            raise KeyboardInterrupt

    engine = make_engine(model)
    requests = [
        engine.submit([1, 2, 3 + i], SamplingParams(max_tokens=4), on_token=interrupt_once) for i in range(3)
    ]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run(engine)
    for request in requests:
        assert [event for event in got if event.request is request] == request.events


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
    draw = flight_module.sample
    engine = make_engine(model)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=n)
    bad, good = engine.submit([1, 2, 3], params), engine.submit([4, 5], SamplingParams(max_tokens=5))

    def fail_second_sample(logits: Any, of: SamplingParams, generator: Any) -> int:
        if of is params and generator.initial_seed() == bad.answers[-1].seed:
            raise FloatingPointError
        return draw(logits, of, generator)

    monkeypatch.setattr(flight_module, "sample", fail_second_sample)
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
