"""What the environment says to the CPU kernels, which pass over what they cannot use: here that is said."""

from __future__ import annotations

import os
import warnings

from . import _native


def check() -> None:
    """Warn of variables that have no effect."""
    threads = os.environ.get("KVFOLIO_NUM_THREADS", "1")
    if not (threads.isdecimal() and int(threads) > 0):
        _warn(f"KVFOLIO_NUM_THREADS must be a whole number above 0, not {threads!r}")
    capabilities = _native.cpu_capabilities()
    capability = os.environ.get("KVFOLIO_CPU_CAPABILITY", capabilities[0])
    if capability not in capabilities:
        _warn(f"KVFOLIO_CPU_CAPABILITY must be one of {', '.join(capabilities)} here, not {capability!r}")


def _warn(what: str) -> None:
    warnings.warn(f"{what}: it is passed over", RuntimeWarning, stacklevel=2)
