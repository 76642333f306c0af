"""How some values are distributed, in five numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Percentiles:
    """Of some values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.float64] | NDArray[np.int64]) -> Percentiles | None:
        """With linear interpolation between the nearest values; None if there are none."""
        if not len(values):
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))
