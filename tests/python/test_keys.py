"""The key chain, computed again from the layout at the top of rust/core/src/key.rs."""

import hashlib
import re
import struct
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "rust" / "core" / "src" / "key.rs"

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="needs the Rust sources")


def of_bytes(data):
    return struct.pack("<Q", len(data)) + data


def root_key(block_size, model="", adapter="", tenant="", salt=""):
    fields = b"".join(of_bytes(field.encode()) for field in (model, adapter, tenant, salt))
    return hashlib.sha256(b"kvfolio\x01R" + struct.pack("<I", block_size) + fields).digest()


def block_message(parent, tokens, first=0, extras=()):
    """Extras that touch the block, placed relative to its first position."""
    touching = [
        struct.pack("<qq", start - first, stop - first) + of_bytes(digest)
        for start, stop, digest in sorted(extras)
        if start < first + len(tokens) and stop > first
    ]
    head = b"kvfolio\x01B" + struct.pack("<II", len(tokens), len(touching)) + parent
    return head + struct.pack(f"<{len(tokens)}I", *tokens) + b"".join(touching)


def block_key(*block, **more):
    return hashlib.sha256(block_message(*block, **more)).digest()


def golden():
    return re.findall(r'assert_eq!\(hex\(\w+\), "([0-9a-f]{64})"\)', SOURCE.read_text())


def test_golden_keys_of_the_rust_tests_follow_from_the_layout():
    root = root_key(4)
    assert golden()[:2] == [root.hex(), block_key(root, [1, 2, 3, 4]).hex()]


def chain_key(block_size, case):
    """The key of the third block of the chain that the Rust tests call by this name."""
    fields = ("model", "adapter", "tenant", "salt")
    context = {field: f"of the {field}, é" for field in fields if case in (field, "all")}
    extras = [
        (0, 1, b""),
        (block_size - 1, block_size + 1, b"one"),
        (2 * block_size, 2 * block_size + 3, b"two"),
    ]
    key = root_key(block_size, **context)
    for first in range(0, 3 * block_size, block_size):
        tokens = [i * 2654435761 % 2**31 for i in range(first, first + block_size)]
        key = block_key(key, tokens, first=first, extras=extras if case in ("extras", "all") else ())
    return key


def test_golden_keys_of_chains_follow_from_the_layout():
    golden = re.findall(r'\((\d+), "(\w+)", "([0-9a-f]{64})"\)', SOURCE.read_text())
    assert {(int(size), case) for size, case, _ in golden} == {
        (size, case)
        for size in (1, 16, 128)
        for case in ("none", "model", "adapter", "tenant", "salt", "extras", "all")
    }
    for size, case, key in golden:
        assert chain_key(int(size), case).hex() == key, (size, case)
    assert len({key for *_, key in golden}) == len(golden)


def test_the_version_of_the_encoding_is_that_of_the_sources():
    (version,) = re.findall(r'const VERSION: &\[u8\] = b"(.*)";', SOURCE.read_text())
    assert version == r"kvfolio\x01"


def test_a_block_of_sixteen_tokens_takes_two_compressions():
    assert len(block_message(bytes(32), [7] * 16)) + 9 <= 2 * 64  # a bit and the length are appended


def test_no_two_inputs_are_encoded_alike():
    roots = {
        root_key(4),
        root_key(8),
        root_key(4, model="S"),
        root_key(4, adapter="S"),
        root_key(4, tenant="S"),
        root_key(4, salt="S"),
        root_key(4, tenant="a", salt="bc"),
        root_key(4, tenant="ab", salt="c"),
    }
    root = root_key(4)
    blocks = {
        block_key(root, [1, 2, 3, 4]),
        block_key(root, [1, 2, 3]),
        block_key(block_key(root, [1, 2, 3, 4]), [1, 2, 3, 4]),
        block_key(root, [1, 2, 3, 4], extras=[(0, 1, b"x")]),
        block_key(root, [1, 2, 3, 4], extras=[(0, 2, b"x")]),
        block_key(root, [1, 2, 3, 4], extras=[(1, 2, b"x")]),
        block_key(root, [1, 2, 3, 4], extras=[(0, 1, b"x"), (0, 1, b"x")]),
    }
    assert len(roots) == 8 and len(blocks) == 7 and not roots & blocks


def test_an_extra_in_front_or_behind_does_not_count():
    root = root_key(4)
    for extra in [(0, 4, b"x"), (8, 9, b"x")]:
        assert block_key(root, [1, 2, 3, 4], first=4, extras=[extra]) == block_key(root, [1, 2, 3, 4])
