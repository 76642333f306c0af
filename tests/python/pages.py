"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    `line`: of its first line, from 1. `before`: the page's text up to it.
    """

    page: Path
    language: str
    source: str
    line: int
    before: str

    def compile(self, replacements: Mapping[str, str] = {}) -> CodeType:
        """As code whose errors name the page and its lines."""
        source = self.source
        for old, new in replacements.items():
            source = source.replace(old, new)
        return compile("\n" * (self.line - 1) + source, str(self.page), "exec")

    def follows(self, other: Block) -> bool:
        """Whether there is nothing but space between the two."""
        return not self.before[len(other.before) + len(f"```{other.language}\n{other.source}```") :].strip()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """Of these languages, in the page's order."""
    return [block for block in _blocks(page) if block.language in languages]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        yield Block(page, fence[1], fence[2], before.count("\n") + 2, before)
