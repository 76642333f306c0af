"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tiny_models
from kvfolio.serving import Engine, Request, compare_with_generate
from numpy.typing import NDArray
from transformers import PreTrainedModel


def make_engine(model: PreTrainedModel, **changes: Any) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_sequences": 4, "max_tokens_per_step": 32}
    return Engine(model, **{**options, **changes})


def expected_answer(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    return compare_with_generate(model, prompt, [], max_tokens=max_tokens).expected


def assert_nothing_held(engine: Engine) -> None:
    engine.pool.audit()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_work


def run(engine: Engine, most_steps: int = 60) -> None:
    """Like `engine.run()`, but without end only where the test would wait for ever."""
    for _ in range(most_steps):
        if not engine.has_work:
            break
        engine.step()
    assert_nothing_held(engine)


def tokens_of(request: Request) -> list[list[int]]:
    return [answer.token_ids for answer in request.answers]


class Letters:
    """Token 1 is "b", and so on; letters repeat. Raises `error` at the call to which `fails_at` counts."""

    def __init__(self) -> None:
        self.error: type[BaseException] = ValueError
        self.fails_at = -1

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise self.error("letters")
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


class Oracle:
    """A drafter that knows the texts; `lies` says at which place of a proposal it errs, by their length."""

    def __init__(
        self,
        texts: Iterable[Sequence[int]],
        num_draft_tokens: int = 4,
        lies: Callable[[int], int | None] = lambda _length: None,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.num_draft_tokens = num_draft_tokens
        self.lies = lies
        self.limits: list[int] = []

    def propose(self, token_ids: NDArray[np.int32], limit: int) -> list[int]:
        self.limits.append(limit)
        length, known = len(token_ids), token_ids.tolist()
        for text in self.texts:
            if text[:length] == known:
                drafts = text[length : length + min(limit, self.num_draft_tokens)]
                lie = self.lies(length)
                if lie is not None and lie < len(drafts):
                    drafts[lie] = (drafts[lie] + 1) % tiny_models.VOCABULARY
                return drafts
        return []
