"""What the pages say is so.

`python` blocks of a page run one after the other, in one namespace. A `text` block right behind one is what
it prints. `py` blocks need what is not here (a GPU, other libraries); they are compiled only. `console`
blocks that begin with `$ kvfolio` print what follows; a line `...` stands for any lines. A `json` block in
front of them is the file whose name in backticks stands last before it.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from pages import PAGES, Block, blocks, name
from test_cli import run

CONSOLES = [
    pytest.param(block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page, "console")
    if block.source.startswith("$ kvfolio ") and "../shared/" not in block.source  # traces are not at hand
]


def pages_with(*languages: str) -> list[object]:
    return [pytest.param(page, id=name(page)) for page in PAGES if blocks(page, *languages)]


def in_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    sequence = blocks(page, "python", "text")
    assert sequence[0].language == "python", "a text is what the block before it prints"
    for block, following in pairwise([*sequence, None]):
        if block is None or block.language != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block.compile(), namespace)
        if following and following.language == "text" and following.follows(block):
            assert in_lines(printed.getvalue()) == in_lines(following.source), f"line {following.line}"


@pytest.mark.parametrize("page", pages_with("py"))
def test_python_that_cannot_run_here_compiles(page: Path) -> None:
    for block in blocks(page, "py"):
        block.compile()


@pytest.mark.parametrize("block", CONSOLES)
def test_commands_print_what_the_page_says(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    for file in blocks(block.page, "json"):
        if file.line < block.line:
            Path(re.findall(r"`([\w.-]+\.json)`", file.before)[-1]).write_text(file.source)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.source, flags=re.MULTILINE):
        program, *arguments = shlex.split(command, comments=True)
        assert program == "kvfolio", "only its own commands are run here"
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        pattern = "\n".join(".*" if line == "..." else re.escape(line) for line in in_lines(output or "..."))
        printed = "\n".join(in_lines(done.stdout + done.stderr))
        assert re.fullmatch(pattern, printed, flags=re.DOTALL), printed


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """The site's build checks those between pages, headings included; these are all, as on GitHub."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
