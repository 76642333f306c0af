"""What an engine takes in, and what it refuses at the door because it could never finish it."""

from __future__ import annotations

import kvfolio as kv
from kvfolio import _checks

from .errors import RequestRefused
from .sampling import SamplingParams
from .speculation import Drafter
from .text import Tokenizer
from .token_ids import token_ids


def check_step(max_sequences: object, max_tokens_per_step: object) -> tuple[int, int]:
    """The most rows and the most tokens of a step."""
    rows = _checks.integer("max_sequences", max_sequences, 1)
    tokens = _checks.integer("max_tokens_per_step", max_tokens_per_step, 1)
    if rows > tokens:
        raise ValueError(
            f"max_sequences must be from 1 to max_tokens_per_step, which is {tokens}, not {rows}"
        )
    return rows, tokens


def check_loop(run_ahead: object, speculation: Drafter | None) -> tuple[int, Drafter | None]:
    """How many steps run ahead, and who guesses tokens, if anybody does."""
    steps = _checks.integer("run_ahead", run_ahead, 0)
    if speculation is None:
        return steps, None
    if not callable(getattr(speculation, "propose", None)):
        raise TypeError(f"speculation must have a method propose, which {type(speculation).__name__} has not")
    if steps:
        raise ValueError(
            f"run_ahead must be 0 with speculation, not {steps}: a draft goes on from the last token, which "
            "a step that runs ahead is planned without"
        )
    return steps, speculation


def check_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer | None:
    """It, if it is one as far as can be seen."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer must have a method decode, which {type(tokenizer).__name__} has not")
    return tokenizer


def longest_sequence(wanted: object, pool: kv.BlockPool, max_positions: int | None) -> int:
    """The most tokens that a sequence may have; `wanted` is None or an integer."""
    capacity = pool.num_blocks * pool.block_size
    longest = capacity if max_positions is None else min(capacity, max_positions)
    if wanted is None:
        return longest
    number = _checks.integer("max_tokens_per_sequence", wanted, 1)
    if number > longest:
        raise ValueError(
            f"max_tokens_per_sequence must be from 1 to {longest}, not {number}: the pool holds "
            f"{capacity} tokens, the model is made for {max_positions}"
        )
    return number


def check_request(
    prompt_token_ids: object,
    params: object,
    on_token: object,
    *,
    vocabulary_size: int,
    max_tokens_per_sequence: int,
    max_sequences: int,
    has_tokenizer: bool,
) -> tuple[list[int], int]:
    """The prompt, and the most tokens of an answer to it; see `Engine.submit` for what is raised."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token must be callable, which {type(on_token).__name__} is not")
    prompt = token_ids("prompt_token_ids", prompt_token_ids, vocabulary_size)
    token_ids("stop_token_ids", params.stop_token_ids, vocabulary_size)
    if not prompt:
        raise ValueError("prompt_token_ids must hold at least one token")
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need an engine with a tokenizer")
    room = max_tokens_per_sequence - len(prompt)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if not 1 <= max_tokens <= room:
        raise RequestRefused(
            f"{len(prompt)} prompt tokens and an answer of up to {max(max_tokens, 1)} exceed the engine's "
            f"max_tokens_per_sequence, {max_tokens_per_sequence} (by default what its pool holds, or what "
            "the model is made for)"
        )
    if params.n > max_sequences:
        raise RequestRefused(f"{params.n} samples exceed the engine's max_sequences, {max_sequences}")
    return prompt, max_tokens


def check_bandwidth(bandwidth: object) -> float:
    """Bytes per second; 0 for None."""
    if bandwidth is None:
        return 0.0
    number = _checks.number("memory_bandwidth", bandwidth)
    if not 0 < number < float("inf"):
        raise ValueError(f"memory_bandwidth must be above 0 bytes per second, not {number}")
    return number
