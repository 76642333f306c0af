"""The compiled module as Sphinx can read it: signatures of the stub, docstrings of the extension.

A compiled class has no annotations to show, and a stub has no docstrings. So the package is imported here on
top of a module that has both: the stub, executed, with the docstrings put in. Nothing in it works; it is to
be read.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import numpy.typing

Item = TypeVar("Item")


class NDArray(Generic[Item]):
    """Stands for numpy's alias of this name, which would be spelt out: ndarray[tuple[Any, ...], ...]."""

    __module__ = "numpy.typing"


def install() -> None:
    """Make ready to import `kvfolio`, once."""
    if "kvfolio" in sys.modules:
        raise RuntimeError("kvfolio is imported already")
    numpy.typing.NDArray = NDArray  # type: ignore[misc]
    package = importlib.util.find_spec("kvfolio")
    if package is None:
        raise ModuleNotFoundError("kvfolio must be installed, which `make docs` does")
    spec = PathFinder.find_spec("kvfolio._native", package.submodule_search_locations)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules[spec.name] = _read_stub(Path(spec.origin).parent / "_native.pyi", native)


def _read_stub(path: Path, native: ModuleType) -> ModuleType:
    stub = ModuleType(native.__name__, native.__doc__)
    stub.__file__ = str(path)
    stub.__loader__ = SourceFileLoader(stub.__name__, str(path))  # where Sphinx looks up the members' order
    # Inherits the future of this file: annotations stay texts, since they name classes that come later.
    code = compile(path.read_text(), str(path), "exec")
    exec(code, stub.__dict__)
    for name in stub.__all__:
        compiled = getattr(native, name)
        if hasattr(stub, name):
            _add_docstrings(getattr(stub, name), compiled)
        else:  # a constant, which the stub only declares
            setattr(stub, name, compiled)
    stub.PlanBuffers.__module__ = "kvfolio"  # whose class of this name derives from it, and is what users see
    return stub


def _add_docstrings(stub: Any, compiled: Any) -> None:
    stub.__doc__ = compiled.__doc__
    if isinstance(stub, type):
        for name, member in vars(stub).items():
            if isinstance(member, FunctionType | property):
                member.__doc__ = getattr(compiled, name).__doc__
