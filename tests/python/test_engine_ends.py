"""How answers end, and what an end leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_models
from engine_helpers import Letters, assert_nothing_held, expected_answer, make_engine, tokens_of
from kvfolio.serving import FinishReason, Request, SamplingParams
from tiny_models import random_prompt
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


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
