"""The page on other libraries' kernels: all of its code runs on the CPU, with stand-ins for the libraries."""

from __future__ import annotations

import sys

import pytest
from pages import ROOT, blocks

pytest.importorskip("torch")

import attention_stand_ins

LIBRARIES = ("flashinfer", "flash_attn", "flash_attn_interface")
PAGE = ROOT / "docs" / "kernels.md"


def test_its_code_gives_what_the_plain_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own assertions compare."""
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, getattr(attention_stand_ins, library)())
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(PAGE, "python", "py"):
        exec(block.compile({'"cuda"': '"cpu"'}), namespace)
    sources = [block.source for block in blocks(PAGE, "py")]
    assert len(sources) == sum("torch.testing.assert_close(out" in source for source in sources) == 5
