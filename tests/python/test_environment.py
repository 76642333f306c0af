"""Variables of the environment that have no effect are said when there is storage for the kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("KVFOLIO_NUM_THREADS", "2", None),
        ("KVFOLIO_NUM_THREADS", "x", "must be a whole number above 0, not 'x': it is passed over"),
        ("KVFOLIO_NUM_THREADS", "0", "must be a whole number above 0, not '0': it is passed over"),
        ("KVFOLIO_NUM_THREADS", "", "must be a whole number above 0, not '': it is passed over"),
        ("KVFOLIO_CPU_CAPABILITY", "portable", None),
        ("KVFOLIO_CPU_CAPABILITY", "sse9", "here, not 'sse9': it is passed over"),
    ],
)
def test_what_has_no_effect_is_said(name: str, value: str, warning: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kvfolio as kv; kv.KVCache(kv.BlockPool(2, 4), 1, 1, 8)"],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        check=True,
    )
    if warning is None:
        assert done.stderr == ""
    else:
        assert f"RuntimeWarning: {name} must be" in done.stderr
        assert warning in done.stderr
