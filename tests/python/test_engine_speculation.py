"""Drafts: the same answers in fewer steps, whatever is guessed, and nothing that stands in anybody's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import tiny_models
import torch
from engine_helpers import Letters, Oracle, assert_nothing_held, expected_answer, make_engine, run, tokens_of
from kvfolio.serving import FinishReason, PromptLookup, SamplingParams
from kvfolio.serving.flight import verify
from kvfolio.serving.sampling import sample
from tiny_models import random_prompt
from transformers import PreTrainedModel

PROMPT = random_prompt(10, seed=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[int]:
    return expected_answer(model, PROMPT, 24)


class Scripted:
    """Proposes the same again and again, or raises it."""

    def __init__(self, proposal: Any) -> None:
        self.proposal = proposal

    def propose(self, _token_ids: Any, _limit: int) -> Sequence[int]:
        if isinstance(self.proposal, BaseException):
            raise self.proposal
        return self.proposal


# Answers and steps


def test_right_drafts_come_out_of_one_step_together(model: PreTrainedModel, expected: list[int]) -> None:
    engine = make_engine(model, speculation=Oracle([PROMPT + expected]))
    request = engine.submit(PROMPT, SamplingParams(max_tokens=24))
    run(engine)
    assert tokens_of(request) == [expected]
    stats = engine.stats()
    assert stats.steps == 1 + 5, "the prompt, then four steps of 5 tokens, then one of 3"
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.acceptance_rate) == (4 * 4 + 2, 18, 1.0)
    assert stats.tokens_per_step == 24 / 6
    assert stats.computed_tokens == 10 + 4 * 5 + 3
    assert [event.token_id for event in request.events] == expected


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lie", range(4))
def test_a_wrong_draft_is_cut_with_all_behind_it_and_holds_no_block(
    model: PreTrainedModel, expected: list[int], block_size: int, lie: int
) -> None:
    engine = make_engine(
        model, block_size=block_size, speculation=Oracle([PROMPT + expected], lies=lambda _length: lie)
    )
    request = engine.submit(PROMPT, SamplingParams(max_tokens=24))
    while engine.has_work:
        engine.step()
        for work in engine._schedule.running:
            assert work.sequence.token_ids.tolist() == PROMPT + tokens_of(request)[0]
            assert work.sequence.num_pending == 1
            assert engine.pool.num_referenced == -(-work.sequence.num_computed // block_size)
        engine.pool.audit()
    assert tokens_of(request) == [expected]
    assert engine.stats().steps == 1 + -(-23 // (lie + 1))
    assert engine.stats().accepted_tokens == 24 - engine.stats().steps < engine.stats().drafted_tokens
    assert engine.pool.match(PROMPT + expected) == (10 + 23) // block_size * block_size
    assert_nothing_held(engine)


def test_samples_that_share_a_block_write_their_drafts_into_copies(model: PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=7, n=3)
    plain = make_engine(model)
    wanted = plain.submit(PROMPT, params)
    run(plain)
    texts = [PROMPT + answer for answer in tokens_of(wanted)]
    engine = make_engine(model, speculation=Oracle(texts, lies=lambda length: length % 5))
    family = engine.submit(PROMPT, params)
    run(engine)
    assert tokens_of(family) == tokens_of(wanted)
    assert engine.pool.stats()["copies"] == 3
    assert engine.stats().steps < plain.stats().steps


def test_no_draft_is_put_behind_a_prompt_that_is_to_be_forked(model: PreTrainedModel) -> None:
    """Of 9 tokens, 8 in the first step: one is left, as if it decoded."""
    params = SamplingParams(max_tokens=6, temperature=1.2, seed=7, n=3)
    plain = make_engine(model)
    wanted = plain.submit(PROMPT[:9], params)
    run(plain)
    texts = [PROMPT[:9] + answer for answer in tokens_of(wanted)]
    engine = make_engine(model, max_tokens_per_step=8, speculation=Oracle(texts))
    family = engine.submit(PROMPT[:9], params)
    run(engine)
    assert tokens_of(family) == tokens_of(wanted)
    assert engine.stats().accepted_tokens > 0


def test_prompt_lookup_finds_what_an_answer_repeats(model: PreTrainedModel) -> None:
    """A prompt that holds the answer already, as a text that is to be corrected would."""
    prompt = random_prompt(3, seed=3)
    answer = expected_answer(model, prompt, 16)
    again = [*prompt, *answer, *prompt]
    wanted = expected_answer(model, again, 20)
    engine = make_engine(model, speculation=PromptLookup(num_draft_tokens=3, max_ngram=2))
    request = engine.submit(again, SamplingParams(max_tokens=20))
    run(engine)
    assert tokens_of(request) == [wanted]
    assert engine.stats().drafted_tokens > 0


# Ends inside an accepted run


def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there(
    model: PreTrainedModel, expected: list[int]
) -> None:
    place = next(i for i in range(7, 20) if expected[i] not in expected[:i] and i % 5 in (2, 3))
    engine = make_engine(model, speculation=Oracle([PROMPT + expected]))
    request = engine.submit(PROMPT, SamplingParams(max_tokens=24, stop_token_ids=[expected[place]]))
    run(engine)
    assert tokens_of(request) == [expected[: place + 1]]
    assert request.answers[0].finish_reason == FinishReason.STOP
    assert engine.stats().output_tokens == place + 1


def test_a_stop_string_inside_an_accepted_run_ends_the_answer_there(
    model: PreTrainedModel, expected: list[int]
) -> None:
    text = Letters().decode(expected)
    engine = make_engine(model, tokenizer=Letters(), speculation=Oracle([PROMPT + expected]))
    request = engine.submit(PROMPT, SamplingParams(max_tokens=24, stop=[text[7:9]]))
    run(engine)
    assert request.answers[0].text == text[: text.index(text[7:9])]
    assert tokens_of(request) == [expected[: text.index(text[7:9]) + 2]]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_draft_goes_beyond_the_last_token_of_an_answer(
    model: PreTrainedModel, expected: list[int], max_tokens: int
) -> None:
    """In a pool of its length, so that a draft more would not have a place."""
    oracle = Oracle([PROMPT + expected], num_draft_tokens=9)
    engine = make_engine(model, num_blocks=5, max_tokens_per_sequence=10 + max_tokens, speculation=oracle)
    request = engine.submit(PROMPT, SamplingParams(max_tokens=max_tokens))
    run(engine)
    assert tokens_of(request) == [expected[:max_tokens]]
    assert oracle.limits == ([max_tokens - 2] if max_tokens > 2 else [])
    assert engine.stats().drafted_tokens == max(max_tokens - 2, 0)


def test_a_drafter_that_knows_no_limit_is_cut(model: PreTrainedModel, expected: list[int]) -> None:
    engine = make_engine(model, num_blocks=5, speculation=Scripted(np.array(expected[1:20])))
    request = engine.submit(PROMPT, SamplingParams(max_tokens=8))
    engine.step()
    engine.step()
    assert engine.stats().drafted_tokens == 6
    run(engine)
    assert tokens_of(request) == [expected[:8]]


# Room


def test_drafts_take_what_the_known_tokens_of_a_step_leave(model: PreTrainedModel) -> None:
    """A long prompt goes through as fast as without drafts, beside two that decode."""

    def steps_of_prompt(**options: Any) -> tuple[int, list[int]]:
        engine = make_engine(model, max_tokens_per_step=8, **options)
        decoding = [engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        engine.step()
        long = engine.submit(random_prompt(50, seed=9), SamplingParams(max_tokens=2))
        steps, drafted = 0, []
        while not tokens_of(long)[0]:
            engine.step()
            steps += 1
            drafted.append(engine.stats().drafted_tokens)
        run(engine, 200)
        assert [tokens_of(request)[0] for request in decoding] == answers
        return steps, drafted

    prompts = [random_prompt(3, seed=i) for i in range(2)]
    answers = [expected_answer(model, prompt, 40) for prompt in prompts]
    oracle = Oracle([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    plain, _ = steps_of_prompt()
    steps, drafted = steps_of_prompt(speculation=oracle)
    assert steps == plain == 9, "50 tokens, 6 beside the two that decode"
    assert drafted == [0] * 8 + [4], "what is left of the last step, 8 - 2 - 2, goes to drafts"


def test_nobody_gives_way_to_a_draft_and_no_draft_is_made_where_blocks_are_short(
    model: PreTrainedModel,
) -> None:
    prompts = [random_prompt(6, seed=20 + i) for i in range(3)]
    answers = [expected_answer(model, prompt, 10) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    engine = make_engine(
        model, num_blocks=12, block_size=4, reserve_blocks=0, speculation=Oracle(texts, num_draft_tokens=9)
    )
    requests = [engine.submit(prompt, SamplingParams(max_tokens=10)) for prompt in prompts]
    engine.step()
    taken = engine.pool.allocate(engine.pool.num_free - 2)
    engine.step()
    assert engine.stats().drafted_tokens == 8, "of the oldest, which takes two blocks for them"
    engine.pool.release(taken)
    run(engine)
    assert engine.stats().preemptions == 0
    assert engine.stats().drafted_tokens > 8
    assert [tokens_of(request)[0] for request in requests] == answers


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(model: PreTrainedModel) -> None:
    """Drafts behind it would make its last token one that can be found; then it would have no logits."""
    engine = make_engine(model, block_size=1, num_blocks=100, speculation=PromptLookup())
    first = engine.submit(PROMPT, SamplingParams(max_tokens=12))
    run(engine)
    prompt = PROMPT + tokens_of(first)[0][:6]
    oracle = Oracle([PROMPT + tokens_of(first)[0]])
    engine.speculation = oracle
    again = engine.submit(prompt, SamplingParams(max_tokens=6))
    run(engine)
    assert again.figures.cached_tokens == len(prompt) - 1
    assert engine.stats().failed_steps == 0
    assert tokens_of(again) == [tokens_of(first)[0][6:]]


# What raises


@pytest.mark.parametrize("error", [ZeroDivisionError(), [tiny_models.VOCABULARY], [-1], [1.5], 3])
def test_a_drafter_that_fails_ends_the_request_only(model: PreTrainedModel, error: Any) -> None:
    class Sometimes(Scripted):
        def propose(self, token_ids: Any, limit: int) -> Sequence[int]:
            return super().propose(token_ids, limit) if token_ids[0] == 1 else []

    engine = make_engine(model, speculation=Sometimes(error))
    bad = engine.submit([1, 2, 3], SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=1))
    good = engine.submit([4, 5], SamplingParams(max_tokens=6))
    run(engine)
    assert isinstance(bad.error, (ZeroDivisionError, ValueError, TypeError))
    if not isinstance(error, BaseException):
        assert "drafts" in str(bad.error)
    assert {answer.finish_reason for answer in bad.answers} == {FinishReason.ERROR}
    assert tokens_of(good) == [expected_answer(model, [4, 5], 6)]


def test_an_interrupt_in_the_drafter_leaves_no_draft_behind(
    model: PreTrainedModel, expected: list[int]
) -> None:
    class Interrupted(Oracle):
        def propose(self, token_ids: Any, limit: int) -> list[int]:
            if len(self.limits) in (1, 4):
                self.limits.append(0)
                raise KeyboardInterrupt
            return super().propose(token_ids, limit)

    other = [PROMPT[0], *PROMPT]
    texts = [PROMPT + expected, other + expected_answer(model, other, 24)]
    engine = make_engine(model, speculation=Interrupted(texts, lies=lambda _length: 1))
    requests = [engine.submit(prompt, SamplingParams(max_tokens=24)) for prompt in (PROMPT, other)]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    run(engine)
    assert [
        prompt + tokens_of(request)[0] for prompt, request in zip((PROMPT, other), requests, strict=True)
    ] == texts


def test_an_interrupt_before_the_plan_leaves_no_draft_behind(
    model: PreTrainedModel, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, speculation=Oracle([PROMPT + expected], lies=lambda _length: 0))
    request = engine.submit(PROMPT, SamplingParams(max_tokens=24))
    fly, calls = engine._fly, [0]

    def interrupt(drafts: Any, **request: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            assert drafts
            raise KeyboardInterrupt
        fly(drafts, **request)

    monkeypatch.setattr(engine, "_fly", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    assert tokens_of(request) == [expected]


@pytest.fixture
def refused(model: PreTrainedModel) -> Iterator[set[int]]:
    """Tokens that the model raises at."""
    tokens: set[int] = set()

    def refuse(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if tokens & set(kwargs["input_ids"][0].tolist()):
            raise RuntimeError("refused")

    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    yield tokens
    handle.remove()


@pytest.mark.parametrize("alone", [False, True])
def test_a_draft_that_the_model_chokes_on_is_nobodys_fault(
    model: PreTrainedModel, expected: list[int], refused: set[int], alone: bool
) -> None:
    poison = next(token for token in range(100) if token not in (*PROMPT, *expected, 4, 5))
    other = expected_answer(model, [4, 5], 6)
    assert poison not in other
    refused.add(poison)
    engine = make_engine(model, speculation=Scripted([poison]))
    requests = [engine.submit(PROMPT, SamplingParams(max_tokens=6))]
    if not alone:
        requests.append(engine.submit([4, 5], SamplingParams(max_tokens=6)))
    run(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    assert [tokens_of(request)[0] for request in requests] == [expected[:6], other][: len(requests)]
    assert engine.stats().failed_steps == 4, "each step that had a draft"


# Verification


def frequencies(tokens: list[int]) -> list[float]:
    return [tokens.count(token) / len(tokens) for token in range(4)]


@pytest.mark.parametrize("draft", range(4))
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_verified_tokens_follow_the_models_distribution_whatever_was_guessed(
    draft: int, top_p: float
) -> None:
    """20,000 draws: of the token at the draft's place, of its acceptance, and of the token behind it."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()
    params = SamplingParams(temperature=1.0, top_p=top_p)
    first = [0.5, 0.3, 0.15, 0.05] if top_p == 1 else [5 / 8, 3 / 8, 0, 0]
    second = [0.1, 0.2, 0.3, 0.4] if top_p == 1 else [0, 0, 3 / 7, 4 / 7]
    generator = torch.Generator().manual_seed(11)
    drawn = []
    for _ in range(20_000):
        token_ids, generator = verify(logits, [draft], params, generator)
        assert (len(token_ids) == 2) == (token_ids[0] == draft)
        drawn.append(token_ids)
    assert frequencies([tokens[0] for tokens in drawn]) == pytest.approx(first, abs=0.015)
    accepted = [tokens[1] for tokens in drawn if len(tokens) == 2]
    assert len(accepted) / len(drawn) == pytest.approx(first[draft], abs=0.015)
    if len(accepted) > 800:
        assert frequencies(accepted) == pytest.approx(second, abs=0.05)
    refused = [tokens[0] for tokens in drawn if len(tokens) == 1]
    rest = [0 if token == draft else share / (1 - first[draft]) for token, share in enumerate(first)]
    assert frequencies(refused) == pytest.approx(rest, abs=0.02), "the residual, renormalized"


def test_the_same_numbers_give_the_same_tokens_with_and_without_drafts() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.9, top_k=8)
    one_by_one = torch.Generator().manual_seed(5)
    expected = [sample(row, params, one_by_one) for row in logits]
    untouched = torch.Generator().manual_seed(5)
    token_ids, generator = verify(logits, expected[:5], params, untouched)
    assert token_ids == expected
    assert torch.equal(generator.get_state(), one_by_one.get_state())
    assert torch.equal(untouched.get_state(), torch.Generator().manual_seed(5).get_state())
    wrong = [*expected[:2], (expected[2] + 1) % 20, *expected[3:5]]
    assert verify(logits, wrong, params, untouched).token_ids == expected[:3]
