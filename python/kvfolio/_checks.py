"""Checks of plain arguments, with messages that name the argument, what came and what is allowed."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np


def integer(argument: str, value: object, minimum: int) -> int:
    """The value as an int; TypeError if it is none, ValueError if it is below `minimum`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{argument} must be an integer, not {type(value).__name__}")
    if int(value) < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, not {value}")
    return int(value)


def index(argument: str, value: object, length: int) -> int:
    """The value as an int; TypeError if it is none, IndexError if it is outside `range(length)`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{argument} must be an integer, not {type(value).__name__}")
    if not 0 <= int(value) < length:
        raise IndexError(f"{argument} must be between 0 and {length - 1}, not {value}")
    return int(value)


def torch_is_here(wish: str) -> None:
    """Raise an ImportError that names the extra if there is no torch, which `wish` needs."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{wish} needs torch: pip install 'kvfolio[torch]'") from error


def number(argument: str, value: object) -> float:
    """The value as a float; TypeError if it is no real number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (Real, np.floating)):
        raise TypeError(f"{argument} must be a number, not {type(value).__name__}")
    return float(value)
