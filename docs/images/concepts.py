"""Draws the pictures of concepts.md: `python docs/images/concepts.py` writes the SVGs beside this file.

Ids and tokens are those of the page's code. The background is light, so that they read on dark pages, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

BLUE, ORANGE, GREEN, GREY, WHITE = "#cfe3f7", "#fde0bf", "#cfe9cf", "#e3e3e3", "#ffffff"
INK, SOFT, RED = "#1d2733", "#5a6673", "#c0262d"


class Picture:
    """An SVG that is put together in the order in which things are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#fafbfc" stroke="#d5dae0"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = WHITE,
        *,
        edge: str = INK,
        dashed: bool = False,
        heavy: bool = False,
        radius: float = 3,
    ) -> None:
        """Draw a rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" '
            f'stroke="{edge}" stroke-width="{2.4 if heavy else 1}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: object,
        *,
        size: int = 13,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """Write a line; `y` is that of its base."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(str(text))}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False, colour: str = SOFT) -> None:
        """Draw a line through points, with a tip at the last."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def cells(
        self, x: float, y: float, tokens: Sequence[object], fill: str, *, width: float = 30, marked: int = -1
    ) -> None:
        """A block: a cell for each of its slots; None is an empty one."""
        for i, token in enumerate(tokens):
            empty = token is None
            self.box(x + i * width, y, width, 28, WHITE if empty else fill, dashed=empty, radius=0)
            if not empty:
                self.text(x + (i + 0.5) * width, y + 19, token, size=12)
        if marked >= 0:
            self.box(x + marked * width, y, width, 28, "none", edge=RED, heavy=True, radius=0)

    def save(self, name: str) -> None:
        """Write the file."""
        path = Path(__file__).with_name(name)
        path.write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


def block_table() -> None:
    """Draw two sequences, their tables, and where their tokens lie."""
    picture = Picture(860, 392, "A block table maps a sequence's logical blocks to physical ones")
    logical = {
        "sequence A, 10 tokens": (
            30,
            BLUE,
            [1, 4, 5],
            [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, None, None]],
        ),
        "sequence B, 6 tokens": (480, ORANGE, [2, 3], [[21, 22, 23, 24], [25, 26, None, None]]),
    }
    storage: dict[int, tuple[str, list[int | None]]] = {}
    for name, (left, colour, ids, blocks) in logical.items():
        picture.text(left, 30, name, anchor="start", bold=True)
        for i, (block, tokens) in enumerate(zip(ids, blocks, strict=True)):
            x = left + 132 * i
            storage[block] = colour, tokens
            picture.cells(x, 42, tokens, colour, marked=2 if block == 4 else -1)
            for offset in range(4):
                picture.text(x + 30 * offset + 15, 83, 4 * i + offset, size=10, colour=SOFT)
            picture.arrow((x + 60, 92), (x + 60, 118))
            picture.box(x + 36, 122, 48, 30, colour)
            picture.text(x + 60, 142, block, size=15, bold=True)
            picture.arrow((x + 60, 155), (28 + 90 * block + 40, 236))
        picture.text(left, 142, "table", anchor="start", size=12, colour=SOFT)
    picture.text(424, 83, "position", size=10, colour=SOFT, anchor="start")
    for block in range(9):
        x = 28 + 90 * block
        colour, tokens = storage.get(block, (GREY, ["-"] * 4 if block == 0 else [None] * 4))
        picture.cells(x, 240, tokens, colour, width=20, marked=2 if block == 4 else -1)
        picture.text(x + 40, 286, f"block {block}", size=12, bold=block in storage)
    picture.text(68, 303, "null: pads tables", size=11, colour=SOFT)
    picture.text(653, 303, "blank", size=11, colour=SOFT)
    picture.text(28, 228, "storage", anchor="start", size=12, colour=SOFT)
    picture.text(
        430, 343, "position 6 of A: table entry 6 // 4 = 1, which is block 4, at offset 6 % 4 = 2", colour=RED
    )
    picture.text(430, 367, "its slot, as in slot_mapping: 4 x 4 + 2 = 18", colour=RED)
    picture.save("block-table.svg")


def copy_on_write() -> None:
    """Draw a fork before, at and after its first write."""
    picture = Picture(860, 300, "Copy-on-write: a fork shares its blocks until somebody writes")
    panels = [
        ("1. before", [("parent", [1, 2], BLUE)], {1: 1, 2: 1}),
        ("2. fork: nothing is copied", [("parent", [1, 2], BLUE), ("child", [1, 2], ORANGE)], {1: 2, 2: 2}),
        (
            "3. the child appends a token",
            [("parent", [1, 2], BLUE), ("child", [1, 3], ORANGE)],
            {1: 2, 2: 1, 3: 1},
        ),
    ]
    contents = {1: list("abcd"), 2: ["e", "f", None, None], 3: ["e", "f", "g", None]}
    for i, (name, tables, counts) in enumerate(panels):
        left = 20 + 280 * i
        picture.text(left + 10, 32, name, anchor="start", bold=True)
        for j, (owner, ids, colour) in enumerate(tables):
            y = 50 + 44 * j
            picture.text(left + 10, y + 20, owner, anchor="start")
            for k, block in enumerate(ids):
                picture.box(left + 80 + 50 * k, y, 44, 30, colour)
                picture.text(left + 102 + 50 * k, y + 20, block, size=15, bold=True)
        for block, count in counts.items():
            colour = {1: {1: BLUE, 2: GREEN}[count], 2: {1: BLUE, 2: GREEN}[count], 3: ORANGE}[block]
            x = left + 10 + 85 * (block - 1)
            picture.cells(x, 180, contents[block], colour, width=18)
            picture.text(x + 36, 226, f"block {block}", size=12)
            picture.text(x + 36, 244, f"{count} reference{'s' if count > 1 else ''}", size=11, colour=SOFT)
        if i < 2:
            picture.arrow((left + 262, 80), (left + 284, 80))
    picture.arrow((701, 176), (701, 158), (782, 158), (782, 176), colour=RED)
    picture.text(741, 151, "copies = [[2, 3]]", size=12, colour=RED)
    picture.text(
        430,
        280,
        "Who writes into a block that others use gets a copy of it; block 1 is full, and stays shared.",
    )
    picture.save("copy-on-write.svg")


def prefix_chain() -> None:
    """Draw two prompts that share two blocks, and the same tokens of another tenant."""
    picture = Picture(860, 392, "Keys of full blocks form a chain; equal beginnings have equal keys")
    for y, tenant in ((40, '""'), (262, '"t2"')):
        picture.box(20, y, 130, 54, GREY, radius=8)
        picture.text(85, y + 24, "root", bold=True)
        picture.text(85, y + 42, f"tenant {tenant}", size=12)
    for x, tokens, block, key in (
        (200, [1, 2, 3, 4], 1, "K1 = H(root, 1 2 3 4)"),
        (380, [5, 6, 7, 8], 2, "K2 = H(K1, 5 6 7 8)"),
    ):
        picture.cells(x, 53, tokens, GREEN, width=32)
        picture.text(x + 64, 42, f"block {block}, shared by A and B", size=11, colour=SOFT)
        picture.text(x + 64, 100, key, size=12)
    picture.cells(560, 53, [9, 10, 11, 12], BLUE, width=32)
    picture.text(624, 42, "block 3, A alone", size=11, colour=SOFT)
    picture.text(624, 100, "K3 = H(K2, 9 10 11 12)", size=12)
    picture.cells(740, 53, [13, None, None, None], BLUE, width=25)
    picture.text(790, 42, "block 4, A", size=11, colour=SOFT)
    picture.text(790, 100, "not full: no key", size=12, colour=RED)
    picture.cells(560, 148, [20, 21, None, None], ORANGE, width=32)
    picture.text(624, 137, "block 5, B", size=11, colour=SOFT)
    picture.text(624, 195, "not full: no key", size=12, colour=RED)
    for start, end in ((150, 198), (328, 378), (508, 558), (688, 738)):
        picture.arrow((start, 67), (end, 67))
    picture.arrow((508, 67), (534, 67), (534, 162), (558, 162))
    picture.text(20, 232, "Equal tokens of another tenant:", anchor="start", bold=True)
    for x, tokens, key in ((200, [1, 2, 3, 4], "K1' is not K1"), (380, [5, 6, 7, 8], "K2' is not K2")):
        picture.cells(x, 275, tokens, WHITE, width=32)
        picture.text(x + 64, 322, key, size=12)
    picture.arrow((150, 289), (198, 289))
    picture.arrow((328, 289), (378, 289))
    picture.text(550, 286, "Nothing of A and B is found: the root is in", anchor="start", colour=RED)
    picture.text(550, 306, "every key behind it.", anchor="start", colour=RED)
    picture.text(20, 112, "also: model, adapter,", anchor="start", size=11, colour=SOFT)
    picture.text(20, 127, "salt, block size", anchor="start", size=11, colour=SOFT)
    picture.text(
        430,
        366,
        "H is SHA-256. A key stands for a block's tokens and all before them; all 256 bits are compared.",
    )
    picture.save("prefix-chain.svg")


def block_life() -> None:
    """Draw the states of a block."""
    picture = Picture(860, 330, "The states of a block")
    states = {
        "blank": (40, 60, WHITE, "no content"),
        "referenced": (270, 60, BLUE, "somebody's; not findable"),
        "referenced, findable": (560, 60, GREEN, "full, committed, has a key"),
        "idle": (560, 220, GREEN, "found again, or evicted"),
        "quarantined": (270, 220, GREY, "a plan in flight names it"),
    }
    for name, (x, y, fill, note) in states.items():
        width = 210 if x > 40 else 150
        picture.box(x, y, width, 56, fill, radius=10)
        picture.text(x + width / 2, y + 24, name, size=14, bold=True)
        picture.text(x + width / 2, y + 44, note, size=11, colour=SOFT)
    picture.arrow((190, 78), (268, 78))
    picture.text(229, 70, "plan", size=12)
    picture.arrow((270, 102), (192, 102))
    picture.text(230, 120, "last user", size=11, colour=SOFT)
    picture.text(230, 134, "leaves", size=11, colour=SOFT)
    picture.arrow((480, 88), (558, 88))
    picture.text(519, 80, "commit", size=12)
    picture.arrow((640, 116), (640, 218))
    picture.text(632, 172, "last user leaves", size=12, anchor="end")
    picture.arrow((700, 220), (700, 118))
    picture.text(708, 172, "hit", size=12, anchor="start")
    picture.arrow((600, 276), (600, 304), (115, 304), (115, 118))
    picture.text(360, 298, "evicted: a block is wanted and none is blank", size=12)
    picture.arrow((340, 116), (340, 218), dashed=True)
    picture.text(348, 172, "last user leaves while a plan", size=12, anchor="start")
    picture.text(348, 188, "in flight still names it", size=12, anchor="start")
    picture.arrow((270, 248), (160, 248), (160, 118), dashed=True)
    picture.text(215, 240, "plan ends", size=12)
    picture.text(215, 264, "(idle if findable)", size=11, colour=SOFT)
    picture.text(
        430,
        34,
        "blank + idle + referenced + quarantined = num_blocks, always; free = blank + idle",
        bold=True,
    )
    picture.save("block-life.svg")


def plan_life() -> None:
    """Draw what becomes of a plan, and two plans in flight."""
    picture = Picture(860, 400, "The life of a plan, and two plans in flight")
    steps = [
        (20, WHITE, "pending tokens", "known, no KV yet", "blocks: none"),
        (232, BLUE, "plan", "arrays for the kernels", "blocks 1, 2 taken"),
        (444, BLUE, "the model runs", "K and V are written", "nothing is findable"),
        (656, GREEN, "commit", "tokens are computed", "full block 1 is findable"),
    ]
    for x, fill, name, note, effect in steps:
        picture.box(x, 30, 184, 62, fill, radius=10)
        picture.text(x + 92, 55, name, size=14, bold=True)
        picture.text(x + 92, 77, note, size=12)
        picture.text(x + 92, 112, effect, size=11, colour=SOFT)
        if x < 600:
            picture.arrow((x + 184, 61), (x + 210, 61))
    picture.arrow((536, 122), (536, 150), (112, 150), (112, 122), colour=RED)
    picture.text(324, 143, "rollback: every count and block as before", size=12, colour=RED)
    picture.text(
        20, 196, "Run-ahead: the next plan is made while the model is at work", anchor="start", bold=True
    )
    lanes = [
        (212, "plan 1", [(110, 50, WHITE, "plan"), (160, 250, BLUE, "model"), (440, 70, GREEN, "commit")]),
        (266, "plan 2", [(170, 50, WHITE, "plan"), (420, 250, BLUE, "model"), (700, 70, GREEN, "commit")]),
    ]
    for y, name, bars in lanes:
        picture.text(20, y + 22, name, anchor="start")
        for x, width, fill, label in bars:
            picture.box(x, y, width, 32, fill)
            picture.text(x + width / 2, y + 21, label, size=12)
    picture.arrow((220, 282), (418, 282), dashed=True)
    picture.text(320, 300, "waits for its turn in the queue", size=11, colour=SOFT)
    picture.arrow((110, 330), (830, 330))
    picture.text(470, 349, "time", size=11, colour=SOFT)
    picture.text(
        20,
        380,
        "Plan 2 has a place for the token of plan 1, whose id is -1 until then. Plans end in their order.",
        anchor="start",
    )
    picture.save("plan-life.svg")


if __name__ == "__main__":
    for draw in (block_table, copy_on_write, prefix_chain, block_life, plan_life):
        draw()
