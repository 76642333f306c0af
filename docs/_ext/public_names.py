"""Every public name is on a page of the reference: what is not there is an error."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

logger = logging.getLogger(__name__)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of what has no place: names in `__all__` of `public_modules`, and their methods and properties."""
    documented = env.domains.python_domain.objects
    for module in app.config.public_modules:
        for name in importlib.import_module(module).__all__:
            for full in names_of(f"{module}.{name}", getattr(importlib.import_module(module), name)):
                if full not in documented:
                    logger.warning("%s is on no page of the reference", full)


def names_of(name: str, value: object) -> list[str]:
    """It, and what a class defines itself for its users."""
    if not isinstance(value, type):
        return [name]
    kinds = FunctionType | classmethod | staticmethod | property
    members = [member for member, what in vars(value).items() if isinstance(what, kinds)]
    return [name, *(f"{name}.{member}" for member in members if not member.startswith("_"))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_config_value("public_modules", [], "env", frozenset({list}))
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
