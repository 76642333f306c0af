"""What an engine, a prompt and its parameters may be, and that the message names what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from kvfolio.serving import Engine, PromptLookup, SamplingParams  # noqa: E402


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_models.llama(), num_blocks=32, block_size=4)


@pytest.mark.parametrize(
    ("name", "value", "came"),
    [
        ("max_tokens", 2.5, "float"),
        ("max_tokens", "5", "str"),
        ("n", True, "bool"),
        ("n", None, "NoneType"),
        ("top_k", 2.5, "float"),
        ("top_p", "1", "str"),
        ("seed", 1.5, "float"),
        ("temperature", "1", "str"),
        ("temperature", None, "NoneType"),
        ("ignore_eos", "no", "str"),
        ("stop_token_ids", 3, "int"),
        ("stop_token_ids", "3", "str"),
        ("stop_token_ids", [1.0], "float"),
        ("stop", [3], "int"),
        ("stop", 3, "int"),
        ("stop", None, "NoneType"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused_by_name(name: str, value: object, came: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.* must be .*{came}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_parameters_may_be_numbers_of_numpy_and_are_kept_as_plain_ones() -> None:
    stop = ["a"]
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int32(4), stop_token_ids=[1], stop=stop
    )
    stop.append("b")
    assert (params.max_tokens, params.temperature, params.seed) == (3, 0.5, 4)
    assert {type(params.max_tokens), type(params.seed)} == {int}
    assert (params.stop_token_ids, params.stop) == ((1,), ("a",))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_blocks": "8"}, TypeError, "num_blocks must be an integer, not str"),
        ({"block_size": 1.5}, TypeError, "block_size must be an integer, not float"),
        ({"eviction": "fifo"}, ValueError, 'eviction must be one of "lru", "adaptive", not "fifo"'),
        ({"reserve_blocks": -1}, ValueError, "reserve_blocks must be at least 0, not -1"),
        ({"reserve_blocks": 1.5}, TypeError, "reserve_blocks must be an integer, not float"),
        ({"max_sequences": "2"}, TypeError, "max_sequences must be an integer, not str"),
        ({"max_sequences": 0}, ValueError, "max_sequences must be at least 1, not 0"),
        ({"max_tokens_per_step": 2.0}, TypeError, "max_tokens_per_step must be an integer, not float"),
        ({"max_tokens_per_sequence": "9"}, TypeError, "max_tokens_per_sequence must be an integer, not str"),
        ({"tokenizer": object()}, TypeError, "tokenizer must have a method decode, which object has not"),
        ({"run_ahead": -1}, ValueError, "run_ahead must be at least 0, not -1"),
        ({"run_ahead": True}, TypeError, "run_ahead must be an integer, not bool"),
        ({"run_ahead": 1.0}, TypeError, "run_ahead must be an integer, not float"),
        ({"speculation": 4}, TypeError, "speculation must have a method propose, which int has not"),
        (
            {"speculation": PromptLookup(), "run_ahead": 2},
            ValueError,
            "run_ahead must be 0 with speculation, not 2: a draft goes on from the last token",
        ),
    ],
)
def test_engine_options_are_refused_by_name(
    engine: Engine, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(engine.model._model, **{"num_blocks": 8, **options})


def test_the_pool_evicts_as_the_engine_was_told(engine: Engine) -> None:
    assert engine.pool.eviction == "lru"
    assert Engine(engine.model._model, num_blocks=8, eviction="adaptive").pool.eviction == "adaptive"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "not str: a tokenizer"),
        ({"input_ids": [1, 2]}, "not dict: pass its .'input_ids'."),
        ([[1, 2]], "not list: pass one sequence at a time"),
        (np.ones((1, 2), dtype=int), r"not of shape \(1, 2\): pass one sequence at a time"),
        (torch.ones(1, 2, dtype=torch.long), r"not of shape \(1, 2\): pass one sequence at a time"),
        (torch.tensor(3), r"not of shape \(\)"),
        (torch.ones(2), "must be an integer, not float"),
        ([1, 2.0], r"prompt_token_ids\[1\] must be an integer, not float"),
        ([True], "must be an integer, not bool"),
        (iter([1]), "must be a flat sequence of integers, not list_iterator"),
        (7, "must be a flat sequence of integers, not int"),
    ],
)
def test_prompts_that_are_no_flat_integers_are_refused(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"prompt_token_ids.*{message}|{message}"):
        engine.submit(prompt)
    assert not engine.has_work


@pytest.mark.parametrize(
    "prompt",
    [(1, 2, 3), range(1, 4), np.arange(1, 4, dtype=np.int32), torch.arange(1, 4), [np.int64(1), 2, 3]],
)
def test_prompts_may_be_tuples_arrays_and_tensors(engine: Engine, prompt: Any) -> None:
    request = engine.submit(prompt, SamplingParams(max_tokens=1))
    engine.run()
    assert request.prompt_token_ids == [1, 2, 3]
    assert {type(token) for token in request.prompt_token_ids} == {int}


def test_what_goes_with_a_prompt_is_checked_too(engine: Engine) -> None:
    with pytest.raises(TypeError, match="params must be SamplingParams, not dict"):
        engine.submit([1], {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_token must be callable, which int is not"):
        engine.submit([1], on_token=3)  # type: ignore[arg-type]
    for token in (-1, tiny_models.VOCABULARY):
        with pytest.raises(ValueError, match=f"stop_token_ids.* must be .*not {token}"):
            engine.submit([1], SamplingParams(stop_token_ids=[token]))
    assert not engine.has_work


def test_only_requests_can_be_streamed_and_cancelled(engine: Engine) -> None:
    for call in (engine.stream, engine.cancel):
        with pytest.raises(TypeError, match="request must be a Request, as submit returns it, not int"):
            call(0)  # type: ignore[arg-type]
