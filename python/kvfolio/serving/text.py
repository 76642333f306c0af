"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what a tokenizer puts for bytes that are not yet a character


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> Any:
        """The text of some tokens."""


class TextStream:
    """Text of a growing answer: whole characters, and nothing that may turn out to begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # A token's text depends on the ones before it (spaces, joined bytes), so a little of what is out
        # already is decoded again with it: [context, done) is out, and `shown` characters of [done, end).
        self._context = self._done = self._shown = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, *, last: bool = False) -> str:
        """The text that is certain now; sets `stopped` and ends before the stop string if one is complete.

        All of it is, with the last token. If the tokenizer raises, the token has not been pushed.
        """
        fresh = self._decode_fresh([token_id])
        certain = fresh if last else fresh.rstrip(REPLACEMENT)
        self._token_ids.append(token_id)
        if certain == fresh:
            self._context, self._done, self._shown = self._done, len(self._token_ids), 0
        else:
            self._shown += len(certain)
        return self._release(certain, last=last)

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        if self.stopped:
            return ""
        fresh = self._decode_fresh([])
        self._done, self._shown = len(self._token_ids), 0
        return self._release(fresh, last=True)

    def _decode_fresh(self, token_ids: list[int]) -> str:
        old = self._decode(self._token_ids[self._context : self._done])
        return self._decode(self._token_ids[self._context :] + token_ids)[len(old) + self._shown :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""

    def _release(self, fresh: str, *, last: bool) -> str:
        text = self._held + fresh
        ends = [text.find(stop) for stop in self._stop if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        released, self._held = text[: len(text) - kept], text[len(text) - kept :]
        return released


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters may be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
