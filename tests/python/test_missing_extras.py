"""What is asked for without its extra is refused with the command that brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CACHE = "kvfolio.KVCache(kvfolio.BlockPool(4, 4), 1, 1, 64, {})"
WISHES = {
    "kvfolio.torch": ("torch", "import kvfolio.torch"),
    "kvfolio.ops": ("torch", "import kvfolio.ops"),
    "array='torch'": ("torch", CACHE.format("array='torch'")),
    "device='cuda'": ("torch", CACHE.format("device='cuda'")),
    "device='cuda:1'": ("torch", CACHE.format("device='cuda:1', backend='flashinfer'")),
    "kvfolio.serving": ("serving", "import kvfolio.serving"),
    "kvfolio.events": ("events", "import kvfolio.events"),
    "kvfolio.metrics": ("metrics", "import kvfolio.metrics"),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of the wishes raises, in a process in which none of the extras' packages can be imported."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "zmq", "msgspec", "prometheus_client")))
import kvfolio
for _, wish in {list(WISHES.values())!r}:
    try:
        exec(wish)
    except ImportError as error:
        print(error)
    else:
        print("nothing")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(WISHES, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("wish", WISHES)
def test_an_extra_that_is_missing_is_named(said: dict[str, str], wish: str) -> None:
    extra, _ = WISHES[wish]
    assert said[wish].startswith(f"{wish} needs ")
    assert said[wish].endswith(f": pip install 'kvfolio[{extra}]'")
