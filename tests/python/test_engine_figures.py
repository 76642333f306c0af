"""What is counted and timed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import kvfolio as kv
import tiny_models
from engine_helpers import make_engine
from kvfolio.serving import SamplingParams
from tiny_models import random_prompt
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.llama()


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
