"""The loop when something raises: whose request ends, what goes on, what is lost (nothing)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from kvfolio.serving import Engine, Event, FinishReason, Request, SamplingParams  # noqa: E402
from kvfolio.serving import flight as flight_module  # noqa: E402
from tiny_models import random_prompt  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

PARAMS = {"max_tokens": 6, "temperature": 1.2, "seed": 5}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


class Letters:
    """Token 1 is "b", and so on. Raises `error` at the call that `fails_at` counts down to."""

    def __init__(self) -> None:
        self.error: type[BaseException] = ValueError
        self.fails_at = -1

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise self.error("letters")
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def make_engine(model: PreTrainedModel, **changes: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_sequences": 6, "max_tokens_per_step": 32}
    return Engine(model, **{**options, **changes})


def run(engine: Engine) -> None:
    """Like `engine.run()`, but without end only where the test would wait for ever."""
    for _ in range(60):
        if not engine.has_work:
            break
        engine.step()
    engine.pool.audit()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_work


def tokens_of(request: Request) -> list[list[int]]:
    return [answer.token_ids for answer in request.answers]


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
