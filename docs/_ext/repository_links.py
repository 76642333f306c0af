"""Links from pages to files outside of the site, such as ../tests/cuda/README.md.

On GitHub they lead there. The site has no address of a repository to lead to, so it names the file. A file
that is not there is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")
logger = logging.getLogger(__name__)


def name_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Put `text (path)` in the place of each such link of a page."""
    path = Path(app.env.doc2path(page))
    site, repository = Path(app.srcdir), Path(app.srcdir).parent

    def name(link: re.Match[str]) -> str:
        text, target = link.groups()
        file = (path.parent / target).resolve()
        if file.is_relative_to(site):
            return link[0]
        if not file.exists():
            logger.warning("no such file: %s", target, location=page)
        shown = file.relative_to(repository).as_posix()
        return f"`{shown}`" if text.strip("`") in (shown, target) else f"{text} (`{shown}`)"

    source[0] = LINK.sub(name, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", name_files)
    return {"parallel_read_safe": True}
