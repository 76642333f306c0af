"""Drafts: tokens that are guessed, computed along with the last known one, and kept if they were right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .schedule import Work
from .token_ids import token_ids


class Drafter(Protocol):
    """Guesses how a text goes on.

    It must not depend on chance: a draft is accepted with the probability that the model gives it, which is
    right for a guess that was certain.
    """

    def propose(self, token_ids: NDArray[np.int32], limit: int, /) -> Sequence[int]:
        """At most `limit` (at least 1) tokens to follow the given ones; none if it has no idea.

        `token_ids`: prompt and answer so far, [n]. More than `limit` are cut. What it raises ends the
        request, as does a token outside of the vocabulary.
        """


def propose(drafter: Drafter, work: Work, *, room: int, vocabulary_size: int) -> list[int]:
    """Drafts for a row, at most `room`, and fewer than the tokens that its answer may still get.

    None for who has more to compute than the last token, and for a prompt that is to be forked. None in the
    first plan after an admission, which looks again for what is cached and computes one token at least: with
    drafts behind it the last known token could be found, and then nobody would compute its logits.
    """
    limit = min(room, work.num_to_come - 1)
    if limit < 1 or work.to_fork or not work.cache_was_asked or work.sequence.num_pending != 1:
        return []
    proposed = drafter.propose(work.sequence.token_ids, limit)
    return token_ids("drafts", proposed, vocabulary_size)[:limit]
