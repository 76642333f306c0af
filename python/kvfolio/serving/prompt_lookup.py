"""A drafter that needs no model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks


class PromptLookup:
    """The last few tokens occurred before: what followed them then may follow again.

    Looks for the last `max_ngram` tokens, then for fewer, down to `min_ngram`, and proposes up to
    `num_draft_tokens` of what came after them (prompt lookup decoding, Saxena 2023). Of several places the
    latest counts that has so many tokens behind it, or else the one with the most. It costs no model, and
    helps where answers repeat their prompt or themselves.
    """

    def __init__(self, num_draft_tokens: int = 4, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.num_draft_tokens = _checks.integer("num_draft_tokens", num_draft_tokens, 1)
        self.min_ngram = _checks.integer("min_ngram", min_ngram, 1)
        self.max_ngram = _checks.integer("max_ngram", max_ngram, self.min_ngram)

    def __repr__(self) -> str:
        return (
            f"PromptLookup(num_draft_tokens={self.num_draft_tokens}, max_ngram={self.max_ngram}, "
            f"min_ngram={self.min_ngram})"
        )

    def propose(self, token_ids: NDArray[np.int32], limit: int) -> list[int]:
        """See `Drafter.propose`; the time is linear in the number of tokens."""
        limit = min(limit, self.num_draft_tokens)
        for length in range(min(self.max_ngram, len(token_ids) - 1), self.min_ngram - 1, -1):
            ends = _earlier_ends(token_ids, length)
            if len(ends):
                roomy = ends[ends <= len(token_ids) - limit]
                end = int(roomy[-1] if len(roomy) else ends[0])
                return [int(token) for token in token_ids[end : end + limit]]
        return []


def _earlier_ends(token_ids: NDArray[np.int32], length: int) -> NDArray[np.intp]:
    """Where the last `length` tokens ended before, in rising order."""
    pattern, stop = token_ids[-length:], len(token_ids) - length
    matches = np.ones(stop, dtype=bool)
    for i, token in enumerate(pattern):
        matches &= token_ids[i : i + stop] == token
    return np.flatnonzero(matches) + length
