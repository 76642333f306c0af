"""The site of the documentation: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import typed_natives  # before kvfolio, whose annotations it makes readable

typed_natives.install()

import kvfolio  # noqa: E402

project = "kvfolio"
author = "The kvfolio developers"
version = release = kvfolio.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "commands",
    "parameter_lists",
    "public_names",
    "repository_links",
]
# Pages are written for GitHub, too: plain Markdown, paths as links, headings as GitHub names them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"kvfolio {version}"
html_copy_source = False
html_show_copyright = False

# What docstrings put in single backticks is a link if it is a name, and else just code.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", "(?s:.*)"),
    # Other packages' sites are not asked: the build needs no network.
    (
        "py:.*",
        r"(collections|concurrent|enum|msgspec|numpy|os|pathlib|prometheus_client|torch|transformers|types)\..*",
    ),
    # Not for users: what classes are made with that only the package makes. Source is BlockPool | Engine.
    ("py:class", r"(kvfolio\.serving\.text\.)?TextStream|kvfolio\.sizing\.fields\.Fields|Source"),
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
numpydoc_show_class_members = False

public_modules = [
    "kvfolio",
    "kvfolio.events",
    "kvfolio.metrics",
    "kvfolio.serving",
    "kvfolio.simulation",
    "kvfolio.sizing",
    "kvfolio.torch",
]
