"""Is an answer the model's own? A greedy one, held against `generate` with its contiguous cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """`agrees`: token for token, or up to a near tie.

    `tie_at`: the token from which on no more is compared, because the two answers differ in it and the
    reference's logits for them are closer than NEAR_TIE: either is right, and what follows depends on it.
    None: there is none.
    `differs_at`: the first token that differs without such a reason. `expected`: the reference's answer.
    """

    agrees: bool
    tie_at: int | None
    differs_at: int | None
    expected: list[int]


@torch.inference_mode()
def compare_with_generate(
    model: PreTrainedModel,
    prompt_token_ids: Sequence[int],
    answer_token_ids: Sequence[int],
    *,
    max_tokens: int,
    ignore_eos: bool = False,
) -> Comparison:
    """Let the model generate an answer by itself, greedily, and compare `answer_token_ids` to it."""
    prompt = torch.tensor([list(prompt_token_ids)], device=model.device)
    options = {"eos_token_id": None} if ignore_eos else {}
    generate: Any = model.generate
    output = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    expected = output.sequences[0, prompt.shape[1] :].tolist()
    answer = list(answer_token_ids)
    if answer == expected:
        return Comparison(True, None, None, expected)
    common = min(len(answer), len(expected))
    first = next((i for i in range(common) if answer[i] != expected[i]), common)
    if first < common:
        logits = output.logits[first][0].float()
        if float(logits.max() - logits[answer[first]]) < NEAR_TIE:
            return Comparison(True, first, None, expected)
    return Comparison(False, None, first, expected)
