"""Beam search over a paged KV cache.

Beams are rows of a batch. Prompts are computed once each and forked into their beams. After a step every row
goes on as a fork of the beam that its continuation belongs to: one call of `Batch.reorder` for all rows of
all prompts, which moves references and no KV. KV is copied only where beams that share a block, not full yet,
write into it, a block for each of them. A contiguous cache copies all KV of every beam in every step.

The search itself is transformers' own (`hypotheses.py` says which functions), and so are its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

import kvfolio as kv
from kvfolio import _checks

from .errors import RequestRefused
from .hf_model import PagedModel
from .hypotheses import Beam, BeamParams, Candidate, EarlyStopping, Hypotheses
from .token_ids import TokenIds, token_ids


@dataclass
class BeamSearchResult:
    """The answers, and what they cost.

    `beams`: for each prompt its `num_return_sequences` best, best first.
    `num_steps`: how often all beams took a token; the prompts' own steps do not count.
    `num_copies`: blocks copied, because beams that shared them wrote different tokens.
    `peak_blocks`: the most blocks that the beams of a step held, each counted once.
    `block_steps`, `unshared_block_steps`: the same summed over the steps; the second with a shared block
    counted for every beam that has it, which is what beams hold that copy theirs.
    """

    beams: list[list[Beam]] = field(default_factory=list)
    num_steps: int = 0
    num_copies: int = 0
    peak_blocks: int = 0
    block_steps: int = 0
    unshared_block_steps: int = 0

    @property
    def sharing(self) -> float:
        """What part of the blocks is saved by sharing them, on average over the steps; 0 without a step.

        As section 6.3 of the PagedAttention paper (SOSP 2023) has it: blocks saved, by the blocks without
        sharing.
        """
        return 1 - self.block_steps / self.unshared_block_steps if self.unshared_block_steps else 0.0

    def _look(self, plan: kv.Plan) -> None:
        held = plan.block_table[plan.block_table != 0]
        distinct = len(np.unique(held))
        self.num_steps += 1
        self.num_copies += len(plan.copies)
        self.peak_blocks = max(self.peak_blocks, distinct)
        self.block_steps += distinct
        self.unshared_block_steps += len(held)


def beam_search(
    model: PreTrainedModel | PagedModel,
    prompts: Sequence[TokenIds],
    *,
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    eos_token_ids: Sequence[int] | None = None,
    max_tokens_per_step: int = 512,
    block_size: int = 16,
    num_blocks: int | None = None,
    cache: kv.KVCache | None = None,
) -> BeamSearchResult:
    """The likeliest answers to some prompts, as `model.generate(num_beams=..., do_sample=False)` finds them.

    Token for token and score for score, by transformers 5.24; prompts may be of any lengths and need no
    padding. A prompt whose search is done leaves the batch, and its blocks come free.

    Parameters
    ----------
    model : PreTrainedModel or PagedModel
        A causal LM of transformers that the engine takes, or an engine's own (`Engine.model`).
    prompts : sequence of flat sequences of integers
    num_beams : int
        Beams of a prompt. One is greedy search.
    max_tokens : int
        The most tokens of an answer.
    length_penalty : float
        Scores are log-probabilities by the answer's length to this power: positive favours long answers.
    early_stopping : True, False or "never"
        When a prompt with `num_beams` answers is done: at once; if none that runs would be better now than
        the worst of them, at its present length; if none can become better.
    num_return_sequences : int
        Answers of a prompt, `num_beams` at most.
    eos_token_ids : sequence of int, optional
        What ends an answer; by default the model's own. Empty: nothing but `max_tokens`.
    max_tokens_per_step : int
        Prompts are computed in pieces of so many tokens, all prompts together.
    block_size, num_blocks : int
        Of the pool that is made for the search; by default as many blocks as it may come to need.
    cache : KVCache, optional
        Search in this one's pool instead, where other sequences may live, such as an engine's, and prompts
        may be cached already (`Engine.cache`).

    Raises
    ------
    TypeError, ValueError
        By the name of the argument.
    RequestRefused
        A prompt and its answer exceed what the model is made for.
    OutOfBlocks
        The pool has not enough blocks. Like after any error, nothing stays held.
    FloatingPointError
        The model's output is not finite.
    """
    paged = model if isinstance(model, PagedModel) else PagedModel(model)
    if eos_token_ids is None:
        eos_token_ids = sorted(paged.eos_token_ids)
    params = BeamParams(
        num_beams=num_beams,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_ids=frozenset(token_ids("eos_token_ids", eos_token_ids, paged.vocabulary_size)),
    )
    if _checks.integer("num_return_sequences", num_return_sequences, 1) > num_beams:
        raise ValueError(
            f"num_return_sequences must be from 1 to num_beams, which is {num_beams}, "
            f"not {num_return_sequences}"
        )
    if params.num_candidates > paged.vocabulary_size:
        raise ValueError(
            f"num_beams must be such that the vocabulary, {paged.vocabulary_size} tokens, has "
            f"{params.num_candidates} continuations of a prompt, not {num_beams}"
        )
    _checks.integer("max_tokens_per_step", max_tokens_per_step, 1)
    ids = _check_prompts(prompts, paged, max_tokens)
    if not ids:
        return BeamSearchResult()
    if cache is None:
        _checks.integer("block_size", block_size, 1)
        if num_blocks is None:
            num_blocks = sum(_most_blocks(len(prompt), params, block_size) for prompt in ids)
        cache = paged.make_cache(kv.BlockPool(_checks.integer("num_blocks", num_blocks, 1), block_size))
    elif not isinstance(cache, kv.KVCache):
        raise TypeError(f"cache must be a KVCache, not {type(cache).__name__}")
    elif num_blocks is not None:
        raise ValueError(f"num_blocks must be left to the cache's pool, not {num_blocks}")
    search = _Search(paged, cache, params, ids)
    try:
        search.compute_prompts(max_tokens_per_step)
        while search.active:
            search.step()
    finally:
        search.free()
    for prompt in search.prompts:
        search.result.beams.append(prompt.hypotheses.ended[:num_return_sequences])
    return search.result


def _check_prompts(prompts: object, model: PagedModel, max_tokens: int) -> list[list[int]]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts must be a sequence of prompts, not {type(prompts).__name__}")
    checked = []
    for i, prompt in enumerate(prompts):
        ids = token_ids(f"prompts[{i}]", prompt, model.vocabulary_size)
        if not ids:
            raise ValueError(f"prompts[{i}] must hold at least one token")
        if model.max_positions is not None and len(ids) + max_tokens > model.max_positions:
            raise RequestRefused(
                f"prompts[{i}] has {len(ids)} tokens, and an answer of up to {max_tokens} exceeds "
                f"the {model.max_positions} that the model is made for"
            )
        checked.append(ids)
    return checked


def _most_blocks(prompt_len: int, params: BeamParams, block_size: int) -> int:
    """Blocks of a prompt's beams: its full blocks are shared, the others may become each beam's own.

    The last token of an answer is never computed. While beams copy a block that they share, it is held beside
    the copies; that counts if it is all that they have of their own, and two beams at least share one.
    """
    shared = prompt_len // block_size
    longest, _ = kv.block_layout(prompt_len + params.max_tokens - 1, block_size)
    own = longest - shared
    return shared + own * params.num_beams + (params.num_beams // 2 if own == 1 else 0)


@dataclass(eq=False)
class _Prompt:
    """A prompt's hypotheses; the i-th running beam is in the i-th of its rows."""

    hypotheses: Hypotheses
    sequences: list[kv.Sequence]
    rows: list[int]


class _Search:
    """The rows of all prompts, and what they hold."""

    def __init__(
        self, model: PagedModel, cache: kv.KVCache, params: BeamParams, prompts: list[list[int]]
    ) -> None:
        self.result = BeamSearchResult()
        self._model, self._cache, self._params = model, cache, params
        self._batch = kv.Batch(
            cache.pool,
            max_sequences=len(prompts) * params.num_beams,
            max_tokens_per_sequence=max(map(len, prompts)) + params.max_tokens,
        )
        self.prompts = [_Prompt(Hypotheses(params), [cache.pool.sequence(ids)], []) for ids in prompts]
        self.active = list(self.prompts)

    def free(self) -> None:
        """Give all blocks back."""
        for prompt in self.prompts:
            for sequence in prompt.sequences:
                sequence.free()

    def compute_prompts(self, max_tokens_per_step: int) -> None:
        """Compute each prompt, and fork it into its beams with a token each."""
        leaders = {self._batch.add(prompt.sequences[0]): prompt for prompt in self.prompts}
        logits: dict[int, torch.Tensor] = {}
        while len(logits) < len(leaders):
            with self._batch.plan(max_tokens_per_step) as plan:
                picked = self._model.forward(plan, self._cache)
            logits.update(zip(plan.logits_rows.tolist(), picked, strict=True))
            self._discard()
        for row, prompt in leaders.items():
            others = [prompt.sequences[0].fork() for _ in range(self._params.num_beams - 1)]
            prompt.sequences += others
            prompt.rows = [row, *(self._batch.add(sequence) for sequence in others)]
        self._choose(torch.stack([logits[row] for row in leaders]))

    def step(self) -> None:
        """Compute the beams' last tokens, and choose the next."""
        with self._batch.plan(rows=[row for prompt in self.active for row in prompt.rows]) as plan:
            logits = self._model.forward(plan, self._cache)
        self.result._look(plan)
        self._discard()
        self._choose(logits)

    def _choose(self, logits: torch.Tensor) -> None:
        """Go on with the best continuations, given the logits of all running beams, prompt by prompt."""
        vocabulary_size = logits.shape[-1]
        so_far = [beam.log_probability for p in self.active for beam in p.hypotheses.running]
        totals = logits.log_softmax(-1) + logits.new_tensor(so_far)[:, None]
        best = totals.view(len(self.active), -1).topk(self._params.num_candidates)
        rows: list[int] = []
        parents: list[int] = []
        tokens: list[int] = []
        for prompt, values, places in zip(
            self.active, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            came_from = prompt.hypotheses.advance(
                [
                    Candidate(value, *divmod(place, vocabulary_size))
                    for value, place in zip(values, places, strict=True)
                ]
            )
            if prompt.hypotheses.is_done:
                for sequence in prompt.sequences:
                    sequence.free()
            else:
                rows += prompt.rows
                parents += [prompt.rows[beam] for beam in came_from]
                tokens += [beam.token_ids[-1] for beam in prompt.hypotheses.running]
        self.active = [prompt for prompt in self.active if not prompt.hypotheses.is_done]
        self._batch.reorder(parents, rows)
        self._batch.extend(rows, tokens)

    def _discard(self) -> None:
        """If all layers look through windows, blocks behind them are of no use."""
        window = self._model.layout.sliding_window
        if window is None:
            return
        for prompt in self.active:
            for sequence in prompt.sequences:  # the next token sees itself and the window - 1 before it
                sequence.discard_before(max(0, sequence.num_computed + 1 - window))
