"""Requests that come and go as they like: the loop may run in any way, the answers are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_models
from engine_helpers import Letters, Oracle, assert_nothing_held, make_engine, tokens_of
from kvfolio.serving import Engine, FinishReason, PromptLookup, Request, SamplingParams
from transformers import PreTrainedModel

LOOPS: dict[str, dict[str, Any]] = {
    "step by step": {},
    "one ahead": {"run_ahead": 1},
    "three ahead": {"run_ahead": 3},
    "prompt lookup": {"speculation": PromptLookup(num_draft_tokens=5, max_ngram=2)},
    "oracle": {},
}


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_models.FAMILIES[request.param]()


class Script:
    """What is asked for, when, and when it is cancelled; made of a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        heads = [tiny_models.random_prompt(12, seed=1000 + i) for i in range(2)]
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        for i in range(14):
            head = rng.choice([[], *heads])[: rng.randint(0, 12)]
            self.prompts.append(head + tiny_models.random_prompt(rng.randint(1, 14), seed=seed * 100 + i))
            sampled = {"temperature": rng.choice([0.7, 1.3]), "n": rng.choice([1, 1, 2, 3])}
            self.params.append(
                SamplingParams(
                    max_tokens=rng.randint(1, 14),
                    seed=i,
                    stop_token_ids=rng.sample(range(tiny_models.VOCABULARY), rng.choice([0, 0, 6])),
                    stop=rng.choice([(), (), ("a", "qu")]),
                    **(sampled if rng.random() < 0.5 else {}),
                )
            )
        self.arrivals = sorted(rng.randint(0, 12) for _ in self.prompts)
        self.cancels = {rng.randrange(14): rng.randint(0, 30) for _ in range(4)}
        self.cancels_in_callback = {rng.randrange(14): rng.randint(1, 6) for _ in range(2)}

    def play(self, engine: Engine) -> list[Request]:
        requests: list[Request] = []
        for step in range(400):
            while len(requests) < 14 and self.arrivals[len(requests)] <= step:
                i = len(requests)

                def on_token(event: Any, most: int | None = self.cancels_in_callback.get(i)) -> None:
                    if len(event.answer.token_ids) == most:
                        event.request.cancel()

                requests.append(engine.submit(self.prompts[i], self.params[i], on_token=on_token))
            for i, at in self.cancels.items():
                if at == step and i < len(requests):
                    requests[i].cancel()
            if len(requests) == 14 and not engine.has_work:
                break
            step_in_little_room(engine) if step % 3 == 0 else engine.step()
            if step % 7 == 0:
                engine.pool.audit()
        return requests


def step_in_little_room(engine: Engine) -> None:
    """All free blocks are taken from outside meanwhile, if somebody can give way who shares none."""
    running = engine._schedule.running
    decoding = [
        w.answer.token_ids and w.sequence.num_pending - engine._num_in_flight(w) <= 1 for w in running
    ]
    may = len(running) > 1 and all(decoding) and all(w.answer.request.params.n == 1 for w in running)
    taken = engine.pool.allocate(engine.pool.num_free if may else 0)
    engine.step()
    engine.pool.release(taken)


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_however_the_loop_goes(model: PreTrainedModel, seed: int) -> None:
    script, block_size = Script(seed), [1, 4, 8][seed % 3]
    alone = make_engine(
        model,
        num_blocks=400,
        max_sequences=3,
        max_tokens_per_step=64,
        prefix_cache=False,
        tokenizer=Letters(),
    )
    wanted = []
    for prompt, params in zip(script.prompts, script.params, strict=True):
        wanted.append(alone.submit(prompt, params))
        alone.run()
    texts = [[*request.prompt_token_ids, *tokens] for request in wanted for tokens in tokens_of(request)]
    totals = {"preemptions": 0, "wasted_slots": 0, "accepted_tokens": 0}
    for name, options in LOOPS.items():
        if name == "oracle":
            options = {"speculation": Oracle(texts, lies=lambda length: length % 6)}
        engine = make_engine(
            model,
            num_blocks=48 // block_size,
            block_size=block_size,
            max_tokens_per_step=script.rng.choice([6, 17, 40]),
            reserve_blocks=script.rng.choice([0, 2]),
            tokenizer=Letters(),
            **options,
        )
        requests = script.play(engine)
        assert_nothing_held(engine)
        for request, other in zip(requests, wanted, strict=True):
            assert request.error is None, (name, request, request.error)
            for answer, whole in zip(request.answers, other.answers, strict=True):
                if answer.finish_reason == FinishReason.CANCELLED:
                    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)], (name, answer)
                else:
                    assert answer.token_ids == whole.token_ids, (name, answer)
                    assert answer.text == whole.text, (name, answer)
                    assert answer.finish_reason == whole.finish_reason
            events = [event.token_id for event in request.events if event.answer.index == 0]
            assert [token for token in events if token is not None] == request.answers[0].token_ids
        stats = engine.stats()
        assert stats.failed_steps == 0
        for figure in totals:
            totals[figure] += getattr(stats, figure)
    assert totals["preemptions"] > 0
    assert totals["wasted_slots"] > 0
    assert totals["accepted_tokens"] > 0
