"""What the last tokens occurred before with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
from kvfolio.serving import PromptLookup


def propose(text: str, limit: int = 9, **options: int) -> str:
    """One token a letter."""
    token_ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    drafts = PromptLookup(**options).propose(token_ids, limit)
    assert all(type(token) is int for token in drafts)
    return bytes(drafts).decode()


@pytest.mark.parametrize(
    ("text", "options", "drafts"),
    [
        ("the cat sat on the ", {}, "cat "),
        ("the cat sat on the ", {"num_draft_tokens": 7}, "cat sat"),
        ("the cat sat on the ", {"limit": 2}, "ca"),
        ("xab1 ab2 ab", {"max_ngram": 2}, "2 ab"),  # the latest
        ("xab1 ab2 xab", {}, "1 ab"),  # the longest counts more than the latest
        ("xab1 ab2 xab", {"max_ngram": 2}, "2 xa"),
        ("abcabc", {"num_draft_tokens": 9}, "abc"),
        ("abab", {"num_draft_tokens": 9, "max_ngram": 1}, "ab"),
        ("aaaa", {"num_draft_tokens": 2}, "a"),  # the last three occur once before, one before the end
        ("aaaaaa", {"num_draft_tokens": 2}, "aa"),  # not the latest, behind which is but one
        ("aaaaaa", {"num_draft_tokens": 9}, "aaa"),  # nobody has nine: the most
        ("a1b2c3a", {"min_ngram": 2}, ""),
        ("a1b2c3a", {}, "1b2c"),
        ("abcdef", {}, ""),
        ("a", {}, ""),
        ("", {}, ""),
        ("aa", {}, "a"),
    ],
)
def test_what_followed_the_last_tokens_is_proposed(text: str, options: dict[str, int], drafts: str) -> None:
    assert propose(text, **options) == drafts


def test_it_is_what_a_search_by_hand_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("abc"), rng.integers(1, 30)))
        wanted = ""
        for length in range(3, 0, -1):
            ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
            if len(text) > length and ends:
                roomy = [end for end in ends if end + 4 <= len(text)]
                end = roomy[-1] if roomy else ends[0]
                wanted = text[end : end + 4]
                break
        assert propose(text) == wanted, text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens must be at least 1, not 0"),
        ({"max_ngram": 1.5}, TypeError, "max_ngram must be an integer, not float"),
        ({"min_ngram": 0}, ValueError, "min_ngram must be at least 1, not 0"),
        ({"min_ngram": 3, "max_ngram": 2}, ValueError, "max_ngram must be at least 3, not 2"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PromptLookup(**options)


def test_it_says_what_it_is() -> None:
    assert repr(PromptLookup(2)) == "PromptLookup(num_draft_tokens=2, max_ngram=3, min_ngram=1)"
