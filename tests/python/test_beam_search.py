"""Beams over shared blocks find what transformers' own beam search finds, and copy no more than they must."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import kvfolio as kv
import numpy as np
import tiny_models
import torch
from kvfolio.serving import BeamSearchResult, Engine, RequestRefused, SamplingParams, beam_search
from kvfolio.serving.hf_model import PagedModel
from kvfolio.serving.hypotheses import Beam, BeamParams, Hypotheses
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

MAX_TOKENS = 14
PROMPTS = [tiny_models.random_prompt(length, seed=length) for length in (13, 5, 22)]


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: build() for name, build in tiny_models.FAMILIES.items()}


def generate(
    model: Any, prompts: list[list[int]], eos: list[int], *, num_beams: int, returned: int, **how: Any
) -> list[list[tuple[list[int], float]]]:
    """transformers' answers, each up to its end, and their scores; prompts are padded on the left."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    output = model.generate(
        torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=returned,
        eos_token_id=eos or None,
        output_scores=True,
        return_dict_in_generate=True,
        **(how if num_beams > 1 else {}),
    )
    answers = []
    for i, row in enumerate(output.sequences[:, longest:].tolist()):
        end = next((at + 1 for at, token in enumerate(row) if token in eos), len(row))
        if num_beams > 1:
            score = float(output.sequences_scores[i])
        else:  # a greedy search has logits only
            log_probabilities = [step[i].log_softmax(-1)[row[at]] for at, step in enumerate(output.scores)]
            score = float(sum(log_probabilities[:end])) / end ** how["length_penalty"]
        answers.append((row[:end], score))
    return [answers[i : i + returned] for i in range(0, len(answers), returned)]


def assert_equal(result: BeamSearchResult, expected: list[list[tuple[list[int], float]]]) -> None:
    found = [[beam.token_ids for beam in beams] for beams in result.beams]
    assert found == [[token_ids for token_ids, _ in beams] for beams in expected]
    scores = [beam.score for beams in result.beams for beam in beams]
    assert scores == pytest.approx([score for beams in expected for _, score in beams], rel=1e-4)


def ends(name: str, models: dict[str, PreTrainedModel]) -> list[int]:
    """Two tokens that best answers have in their middle: answers end with them when they end a text."""
    result = beam_search(models[name], PROMPTS[:2], num_beams=2, max_tokens=8, eos_token_ids=[])
    return [beams[0].token_ids[at] for beams, at in zip(result.beams, (2, 4), strict=True)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("name", list(tiny_models.FAMILIES))
def test_answers_and_scores_are_those_of_generate(name: str, early_stopping: Any, models: Any) -> None:
    lengths: Counter[bool] = Counter()
    two = ends(name, models)
    thorough = name == "llama"
    for num_beams, penalty, eos in itertools.product(
        (1, 2, 4, 5) if thorough else (2, 5),
        (-1.0, 0.0, 1.0, 2.0) if thorough else (0.0, 2.0),
        (two[:1], two),
    ):
        how: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early_stopping}
        returned = (num_beams + 1) // 2
        result = beam_search(
            models[name],
            PROMPTS,
            num_beams=num_beams,
            max_tokens=MAX_TOKENS,
            num_return_sequences=returned,
            eos_token_ids=eos,
            block_size=4,
            **how,
        )
        expected = generate(models[name], PROMPTS, eos, num_beams=num_beams, returned=returned, **how)
        assert_equal(result, expected)
        lengths.update(len(beam.token_ids) < MAX_TOKENS for beams in result.beams for beam in beams)
    assert lengths[True] and lengths[False], "some answers must end by themselves, some be cut"


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.2, 0.5, 2.0])
def test_answers_are_those_of_generate_where_ends_are_likely(early_stopping: Any, penalty: float) -> None:
    """Few tokens, no sharp choices, two ends among the likeliest: beams end all the time."""
    model = tiny_models.llama(vocab_size=24, initializer_range=0.12)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(24))
    prompts = [[(7 * i + j * j) % 24 for j in range(i + 2)] for i in range(9)]
    for likely in (0.3, 0.8, 1.6):
        with torch.no_grad():
            model.lm_head.bias[[3, 5]] = likely
        for num_beams in (2, 3, 5):
            how: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early_stopping}
            expected = generate(model, prompts, [3, 5], num_beams=num_beams, returned=num_beams, **how)
            result = beam_search(
                model,
                prompts,
                num_beams=num_beams,
                max_tokens=MAX_TOKENS,
                num_return_sequences=num_beams,
                eos_token_ids=[3, 5],
                **how,
            )
            assert_equal(result, expected)


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_prompt_is_done_when_transformers_takes_it_for_hopeless(early_stopping: Any) -> None:
    """Its own rule, asked about the same scores: for rare cases, such as a negative penalty with "never"."""
    random = np.random.default_rng(11)
    outcomes: Counter[bool] = Counter()
    for _ in range(400):
        num_beams, num_tokens = int(random.integers(2, 5)), int(random.integers(1, 20))
        penalty = float(random.choice([-1.0, -0.3, 0.0, 0.7, 2.0]))
        params = BeamParams(
            num_beams=num_beams,
            max_tokens=20,
            length_penalty=penalty,
            early_stopping=early_stopping,
            eos_token_ids=frozenset([3]),
        )
        totals = -np.sort(random.uniform(0.1, 30, num_beams))
        scores = (-np.sort(random.uniform(0.1, 60, num_beams))).tolist()
        if penalty == 0.0:  # no better than the worst, by numbers that float32 has
            totals = np.round(totals)
            scores = [*(max(score, totals[0]) for score in scores[1:]), float(totals[0])]
        hypotheses = Hypotheses(params)
        hypotheses.running = [Beam([], 0.0, float(total)) for total in totals]
        hypotheses.ended = [Beam([], score, 0.0) for score in scores]
        hypotheses._num_tokens = num_tokens
        hopeful = GenerationMixin._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=torch.ones((1, 1), dtype=torch.bool),
            running_beam_scores=torch.tensor([[beam.log_probability for beam in hypotheses.running]]),
            beam_scores=torch.tensor([scores]),
            is_sent_finished=torch.ones((1, num_beams), dtype=torch.bool),
            cur_len=50 + num_tokens,
            max_length=50 + 20,
            decoder_prompt_len=50,
            early_stopping=early_stopping,
            length_penalty=penalty,
        )
        assert hypotheses._is_settled() == (not bool(hopeful))
        outcomes[bool(hopeful)] += 1
    assert min(outcomes[True], outcomes[False]) > 50


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("max_tokens_per_step", [7, 512])
def test_neither_the_block_size_nor_the_pieces_of_prompts_change_an_answer(
    block_size: int, max_tokens_per_step: int, models: Any
) -> None:
    for name in ("gemma2", "mistral"):
        how: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
        model = Recorder(models[name])
        result = beam_search(
            model,
            PROMPTS,
            num_beams=4,
            max_tokens=MAX_TOKENS,
            num_return_sequences=4,
            block_size=block_size,
            max_tokens_per_step=max_tokens_per_step,
        )
        assert_equal(result, generate(models[name], PROMPTS, [], num_beams=4, returned=4, **how))
        pieces = [sum(plan.query_lens) for plan in model.plans[: -result.num_steps]]
        assert max(pieces) <= max_tokens_per_step and sum(pieces) == sum(map(len, PROMPTS))


class Recorded(NamedTuple):
    rows: list[int]
    seq_lens: list[int]
    query_lens: list[int]
    num_copies: int
    block_table: Any
    num_referenced: int


class Recorder(PagedModel):
    """Keeps what each plan asked for."""

    def forward(self, plan: kv.Plan, cache: kv.KVCache) -> torch.Tensor:
        self.plans = getattr(self, "plans", [])
        self.plans.append(
            Recorded(
                plan.rows.tolist(),
                plan.seq_lens.tolist(),
                np.diff(plan.query_start_loc).tolist(),
                len(plan.copies),
                plan.block_table,
                cache.pool.num_referenced,
            )
        )
        return super().forward(plan, cache)


class RecordedBatch:
    """A batch that keeps what its rows were reordered to."""

    Batch = kv.Batch
    reorders: list[dict[int, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batch = self.Batch(*args, **kwargs)
        RecordedBatch.reorders = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def reorder(self, parents: list[int], rows: list[int]) -> None:
        self.reorders.append(dict(zip(rows, parents, strict=True)))
        self._batch.reorder(parents, rows)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_one_reorder_a_step_copies_a_partial_block_for_each_sharer(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "Batch", RecordedBatch)
    model = Recorder(tiny_models.llama())
    num_beams = 5
    result = beam_search(
        model, PROMPTS, num_beams=num_beams, max_tokens=MAX_TOKENS, block_size=block_size, eos_token_ids=[]
    )
    prefill, *steps = model.plans
    assert prefill.num_copies == 0 and len(prefill.rows) == len(PROMPTS), "a prompt is computed once"
    assert len(RecordedBatch.reorders) == len(model.plans) == result.num_steps + 1
    # Before the first step the beams are forks of their prompt's first row.
    forks = [{row: i // num_beams for i, row in enumerate(steps[0].rows)}, *RecordedBatch.reorders[1:]]
    assert not any(row != parent for row, parent in RecordedBatch.reorders[0].items() if row < len(PROMPTS))
    total = 0
    for step, parents in zip(steps, forks, strict=False):
        children = Counter(
            parents[row]
            for row, length in zip(step.rows, step.seq_lens, strict=True)
            if (length - 1) % block_size
        )
        assert step.num_copies == sum(count for count in children.values() if count > 1)
        total += step.num_copies
    assert result.num_copies == total
    assert (total == 0) == (block_size == 1), "blocks of one token are never written twice"


def test_the_result_tells_what_sharing_saves(models: Any) -> None:
    model = Recorder(models["llama"])
    result = beam_search(model, PROMPTS, num_beams=4, max_tokens=MAX_TOKENS, block_size=4, eos_token_ids=[])
    steps = [[set(row[row > 0].tolist()) for row in plan.block_table] for plan in model.plans[1:]]
    held = [len(set.union(*rows)) for rows in steps]
    copied = [sum(map(len, rows)) for rows in steps]
    assert (result.peak_blocks, result.block_steps) == (max(held), sum(held))
    assert result.unshared_block_steps == sum(copied)
    assert result.sharing == 1 - sum(held) / sum(copied)
    assert 0.5 < result.sharing < 0.75, "four beams share their prompt, and most of their answers"
    alone = beam_search(model, PROMPTS, num_beams=1, max_tokens=MAX_TOKENS, block_size=4, eos_token_ids=[])
    assert alone.sharing == 0
    assert beam_search(model, PROMPTS, num_beams=4, max_tokens=1).sharing == 0


def test_a_prompt_that_is_done_leaves_the_batch(models: Any) -> None:
    model = Recorder(models["llama"])
    eos = ends("llama", models)
    how: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": True}
    result = beam_search(model, PROMPTS, num_beams=2, max_tokens=MAX_TOKENS, eos_token_ids=eos, **how)
    assert_equal(
        BeamSearchResult([beams[:1] for beams in result.beams]),
        generate(models["llama"], PROMPTS, eos, num_beams=2, returned=1, **how),
    )
    for plan in model.plans:
        assert plan.num_referenced == len(np.unique(plan.block_table[plan.block_table > 0]))
    rows = [len(plan.rows) for plan in model.plans[1:]]
    assert rows == sorted(rows, reverse=True) and rows[0] == 6 and rows[-1] < 6


def test_windows_on_every_layer_let_blocks_behind_them_go(models: Any) -> None:
    for num_beams in (1, 3):
        result = beam_search(
            models["mistral"],
            [PROMPTS[2]],
            num_beams=num_beams,
            max_tokens=60,
            block_size=4,
            eos_token_ids=[],
        )
        # A window of 9 keys spans 3 blocks of 4 at most.
        assert 3 <= result.peak_blocks <= 3 * num_beams


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_pool_that_is_made_is_large_enough(max_tokens: int, models: Any) -> None:
    for num_beams in (1, 2, 7):
        beam_search(
            models["llama"],
            [PROMPTS[1], PROMPTS[2][:4]],
            num_beams=num_beams,
            max_tokens=max_tokens,
            block_size=4,
            eos_token_ids=[],
        )


def test_too_few_blocks_leave_nothing_held_and_enough_give_the_same_answer(models: Any) -> None:
    model = PagedModel(models["qwen3"])
    how: dict[str, Any] = {"num_beams": 4, "max_tokens": 9, "block_size": 4, "eos_token_ids": []}
    expected = beam_search(model, PROMPTS, **how)
    del how["block_size"]
    outcomes, errors = [], []  # what keeps an error keeps all that its frames refer to
    for num_blocks in range(1, expected.peak_blocks + 4):
        pool = kv.BlockPool(num_blocks, 4)
        cache = model.make_cache(pool)
        try:
            assert beam_search(model, PROMPTS, cache=cache, **how).beams == expected.beams
            outcomes.append(num_blocks)
        except kv.OutOfBlocks as error:
            errors.append(error)
        assert pool.num_free == num_blocks and pool.num_quarantined == 0
        pool.audit()
    assert outcomes[0] in (expected.peak_blocks, expected.peak_blocks + 1), "no more than the beams hold"
    assert len(outcomes) + len(errors) == expected.peak_blocks + 3 and outcomes[-1] == len(outcomes) + len(
        errors
    )


def test_a_model_that_fails_leaves_nothing_held(models: Any) -> None:
    class Failing(PagedModel):
        def forward(self, plan: kv.Plan, cache: kv.KVCache) -> torch.Tensor:
            if plan.max_seq_len > 25:
                raise FloatingPointError("the model's output is not finite")
            return super().forward(plan, cache)

    model = Failing(models["llama"])
    cache = model.make_cache(kv.BlockPool(100, 4))
    with pytest.raises(FloatingPointError) as error:
        beam_search(model, PROMPTS, num_beams=3, max_tokens=MAX_TOKENS, cache=cache)
    assert error.tb is not None  # and so its frames are alive
    assert cache.pool.num_referenced == 0
    cache.pool.audit()


def test_a_search_beside_an_engine_finds_its_prompts(models: Any) -> None:
    engine = Engine(models["llama"], num_blocks=60, block_size=4)
    request = engine.submit(PROMPTS[2], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    before = engine.pool.stats()["hit_tokens"]
    held = engine.pool.num_referenced
    result = beam_search(
        engine.model, [PROMPTS[2]], num_beams=4, max_tokens=MAX_TOKENS, eos_token_ids=[], cache=engine.cache
    )
    assert engine.pool.stats()["hit_tokens"] - before == 20, "the full blocks of 22 tokens"
    assert engine.pool.num_referenced == held
    how: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
    expected = generate(models["llama"], [PROMPTS[2]], [], num_beams=4, returned=1, **how)
    assert_equal(result, expected)
    engine.run()
    assert len(request.answers[0].token_ids) == 20
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.pool.audit()


def test_prompts_of_any_kind_and_none(models: Any) -> None:
    model = PagedModel(models["llama"])
    how: dict[str, Any] = {"num_beams": 2, "max_tokens": 3}
    lists = beam_search(model, PROMPTS, **how).beams
    assert beam_search(model, [np.array(prompt) for prompt in PROMPTS], **how).beams == lists
    assert beam_search(model, [torch.tensor(prompt) for prompt in PROMPTS], **how).beams == lists
    assert beam_search(model, [], **how).beams == []


def test_what_ends_a_text_is_the_models_own_by_default() -> None:
    eos = tiny_models.random_prompt(1, seed=3)
    model = tiny_models.llama(eos_token_id=eos[0])
    bias = torch.zeros(tiny_models.VOCABULARY)
    bias[eos] = 4.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    beams = beam_search(model, PROMPTS, num_beams=2, max_tokens=MAX_TOKENS).beams
    assert all(answer[0].token_ids[-1:] == eos and len(answer[0].token_ids) < MAX_TOKENS for answer in beams)
    assert {
        len(b.token_ids)
        for b in beam_search(model, PROMPTS, num_beams=2, max_tokens=9, eos_token_ids=[]).beams[0]
    } == {9}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams must be at least 1, not 0"),
        ({"num_beams": 2.0}, TypeError, "num_beams must be an integer, not float"),
        ({"num_beams": 65}, ValueError, "num_beams must be such that the vocabulary, 128 tokens, has 130"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, not 0"),
        ({"length_penalty": "1"}, TypeError, "length_penalty must be a number, not str"),
        ({"length_penalty": float("nan")}, ValueError, "length_penalty must be finite"),
        ({"length_penalty": -99}, ValueError, "length_penalty must be finite, and 3 .max_tokens. to its"),
        (
            {"early_stopping": "always"},
            ValueError,
            "early_stopping must be True, False or 'never', not 'always'",
        ),
        (
            {"num_return_sequences": 3},
            ValueError,
            "num_return_sequences must be from 1 to num_beams, which is 2",
        ),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences must be at least 1, not 0"),
        ({"eos_token_ids": [128]}, ValueError, "eos_token_ids must be from 0 to 127, not 128"),
        ({"prompts": 3}, TypeError, "prompts must be a sequence of prompts, not int"),
        ({"prompts": [1, 2]}, TypeError, r"prompts\[0\] must be a flat sequence of integers, not int"),
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\] must hold at least one token"),
        ({"prompts": [[1], [-1]]}, ValueError, r"prompts\[1\]\[0\] must be at least 0, not -1|from 0 to 127"),
        ({"prompts": [[1] * 254]}, RequestRefused, r"prompts\[0\] has 254 tokens, and an answer of up to 3"),
        ({"max_tokens_per_step": 0}, ValueError, "max_tokens_per_step must be at least 1, not 0"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, not 0"),
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, not 0"),
        ({"cache": 3}, TypeError, "cache must be a KVCache, not int"),
        ({"model": 3}, TypeError, "model must be a transformers PreTrainedModel, not int"),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception], message: str, models: Any
) -> None:
    arguments: dict[str, Any] = {
        "model": models["llama"],
        "prompts": PROMPTS,
        "num_beams": 2,
        "max_tokens": 3,
        **change,
    }
    with pytest.raises(error, match=message):
        beam_search(**arguments)


def test_a_pool_is_given_or_made(models: Any) -> None:
    model = PagedModel(models["llama"])
    cache = model.make_cache(kv.BlockPool(9, 4))
    with pytest.raises(ValueError, match="num_blocks must be left to the cache's pool, not 9"):
        beam_search(model, PROMPTS, num_beams=2, max_tokens=3, cache=cache, num_blocks=9)
