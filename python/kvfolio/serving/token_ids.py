"""Token ids as they come: a list, a tuple, an array or a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfolio import _checks

TokenIds = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor


def token_ids(argument: str, value: object, vocabulary_size: int | None = None) -> list[int]:
    """The integers of a flat sequence, checked against the vocabulary if its size is given.

    Raises TypeError for what is no such sequence, ValueError for what is not in the vocabulary.
    """
    wanted = f"{argument} must be a flat sequence of integers, not"
    if isinstance(value, Mapping):
        raise TypeError(f"{wanted} {type(value).__name__}: pass its ['input_ids']")
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{wanted} {type(value).__name__}: a tokenizer makes token ids of a text")
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if value.ndim != 1:
            raise TypeError(f"{wanted} of shape {tuple(value.shape)}: pass one sequence at a time")
        value = value.tolist()
    if not isinstance(value, Sequence):
        raise TypeError(f"{wanted} {type(value).__name__}")
    ids = [token if type(token) is int else _one(f"{argument}[{i}]", token) for i, token in enumerate(value)]
    if vocabulary_size is not None:
        for token in ids:
            if not 0 <= token < vocabulary_size:
                raise ValueError(f"{argument} must be from 0 to {vocabulary_size - 1}, not {token}")
    return ids


def _one(argument: str, value: object) -> int:
    if isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError(
            f"{argument} must be an integer, not {type(value).__name__}: pass one sequence at a time"
        )
    return _checks.integer(argument, value, 0)
