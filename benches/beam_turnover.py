"""How often beams give way to copies of others: what the simulation's beams are modelled after.

    python benches/beam_turnover.py

Runs `serving.beam_search` with SmolLM2-135M-Instruct on some of the demo's prompts, and counts the beams that
no beam of the next step goes on from.
"""

from __future__ import annotations

from typing import Any, ClassVar

import kvfolio as kv
import torch
from kvfolio.cli.demo import _token_ids
from kvfolio.cli.demo_prompts import PROMPTS
from kvfolio.cli.loading import find_source, load
from kvfolio.serving import beam_search

STEPS = 100


class Watched:
    """A batch that remembers its reorderings."""

    seen: ClassVar[list[tuple[int, int]]] = []  # rows, and those of them that nobody goes on from

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._batch = Batch(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def reorder(self, parents: list[int], rows: list[int]) -> None:
        self.seen.append((len(rows), len(set(rows) - set(parents))))
        self._batch.reorder(parents, rows)


Batch = kv.Batch


def main() -> None:
    """Print the share for some numbers of beams."""
    model, tokenizer = load(find_source(None), dtype=torch.float32)
    prompts = [_token_ids(tokenizer, prompt) for prompt in PROMPTS[:4]]
    kv.Batch = Watched  # type: ignore[misc, assignment]
    for beams in (2, 4, 6):
        Watched.seen.clear()
        result = beam_search(model, prompts, num_beams=beams, max_tokens=STEPS)
        rows, ended = (sum(column) for column in zip(*Watched.seen, strict=True))
        print(f"{beams} beams: {ended / rows:.1%} give way; sharing saves {result.sharing:.1%} of the blocks")


if __name__ == "__main__":
    main()
