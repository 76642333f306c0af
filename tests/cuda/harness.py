"""Run the kernels' C interface in the emulator, on numpy arrays."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import programs
import toolchain

MAX_ARRAYS = 256
ORDERS = {"ascending": 0, "descending": 1, "shuffled": 2}
LANDINGS = {"late": 0, "early": 1, "either": 2}


class Storage(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [
        (n, ctypes.c_int64) for n in ("block_stride", "token_stride", "head_stride")
    ]


class Tokens(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("token_stride", "head_stride")]


def _structure(name, **fields):
    """A structure of kvfolio.h; the runner refuses it if its size is another there."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


P, I32, I64, F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
Append = _structure(
    "append", k=Tokens, v=Tokens, keys=Storage, values=Storage, slots=P, num_tokens=I64,
    num_heads=I32, head_bytes=I32, block_size=I32,
)  # fmt: skip
CopyBlocks = _structure(
    "copy_blocks", arrays=P * MAX_ARRAYS, block_stride=I64, token_stride=I64, head_stride=I64, pairs=P,
    num_pairs=I64, num_arrays=I32, num_heads=I32, head_bytes=I32, block_size=I32,
)  # fmt: skip
UpdateTable = _structure("update_table", table=P, updates=P, row_stride=I64, num_updates=I64)
PlanAttention = _structure(
    "plan_attention", seq_lens=P, query_start_loc=P, work=P, capacity=I64, num_sequences=I32, group=I32,
    min_rows=I32, max_rows=I32, tile_rows=I32, tile_keys=I32, window=I32, extra=I32, min_tiles=I32,
)  # fmt: skip
Attention = _structure(
    "attend", q=Tokens, out=Tokens, keys=Storage, values=Storage, lse=P, block_table=P, seq_lens=P,
    query_start_loc=P, alibi_slopes=P, sinks=P, work=P, partial_out=P, partial_lse=P, table_stride=I64,
    capacity=I64, dtype=I32, num_kv_heads=I32, group=I32, head_dim=I32, block_size=I32, tile_rows=I32,
    window=I32, extra=I32, scale=F32, soft_cap=F32,
)  # fmt: skip


class Failed(Exception):
    """The program ended otherwise than well; `status` says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Pointer:
    """Into an array of a program; numpy arrays in fields are pointers to their own first element."""

    array: np.ndarray
    offset: int = 0


@dataclass(eq=False)
class Sparse:
    """An array of many gigabytes of which only these pieces, (offset, uint8 array), are anything."""

    num_bytes: int
    pieces: list[tuple[int, np.ndarray]]


@dataclass
class Program:
    """Calls to be made one after another; arrays that they name are brought along, and back."""

    arrays: list = field(default_factory=list)
    forbidden: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    calls: list[bytes] = field(default_factory=list)

    def number_of(self, array) -> int:
        for number, known in enumerate(self.arrays):
            if known is array:
                return number
        self.arrays.append(array)
        return len(self.arrays) - 1

    def forbid(self, array: np.ndarray, offset: int, num_bytes: int) -> None:
        """AddressSanitizer reports who touches these bytes."""
        self.forbidden.setdefault(self.number_of(array), []).append((offset, num_bytes))

    def call(
        self, arguments: ctypes.Structure, order="ascending", landing="late", seed=1, **pointers
    ) -> None:
        """Call the function that takes these arguments. Pointers are given by field: `keys__data=array`."""
        relocations = []
        for path, value in pointers.items():
            if value is None:
                continue
            pointer = value if isinstance(value, Pointer) else Pointer(value)
            offset, kind = 0, type(arguments)
            for name in path.split("__"):
                if name.isdigit():
                    offset += int(name) * ctypes.sizeof(ctypes.c_void_p)
                else:
                    offset += getattr(kind, name).offset
                    kind = dict(kind._fields_)[name]
            relocations.append((offset, self.number_of(pointer.array), pointer.offset))
        name, data = type(arguments).__name__.encode(), bytes(arguments)
        call = struct.pack("<Q", len(name)) + name
        call += struct.pack("<QQQ", ORDERS[order], LANDINGS[landing], seed)
        call += struct.pack("<Q", len(data)) + data + struct.pack("<Q", len(relocations))
        self.calls.append(call + b"".join(struct.pack("<QQQ", *relocation) for relocation in relocations))

    def run(self, runner: Path) -> None:
        """Run all calls; arrays are changed as the kernels changed them. Raises Failed."""
        with tempfile.TemporaryDirectory() as folder:
            case, result = Path(folder, "case"), Path(folder, "result")
            case.write_bytes(b"".join(self._case()))
            command = [str(runner), str(case), str(result)]
            status, _, said = programs.run(
                runner.name.rpartition("-")[0], command, os.environ | toolchain.ENVIRONMENT
            )
            if status != 0:
                raise Failed(status, said)
            data, start = result.read_bytes(), 0
        for array in self.arrays:
            for _, piece in _pieces(array):
                piece.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8, piece.nbytes, start)
                start += piece.nbytes

    def _case(self):
        yield struct.pack("<Q", len(self.arrays))
        for number, array in enumerate(self.arrays):
            pieces = _pieces(array)
            yield struct.pack(
                "<QQ", array.num_bytes if isinstance(array, Sparse) else array.nbytes, len(pieces)
            )
            for offset, piece in pieces:
                yield struct.pack("<QQ", offset, piece.nbytes) + piece.tobytes()
            forbidden = self.forbidden.get(number, [])
            yield struct.pack("<Q", len(forbidden))
            for part in forbidden:
                yield struct.pack("<QQ", *part)
        yield struct.pack("<Q", len(self.calls)) + b"".join(self.calls)


def _pieces(array):
    if isinstance(array, Sparse):
        return array.pieces
    assert array.flags.c_contiguous, "give the whole memory, and strides apart"
    return [(0, array)]


def storage(array: np.ndarray) -> Storage:
    """Its strides, [blocks, block_size, heads, head_dim]; any axis order."""
    return Storage(None, *array.strides[:3])


def tokens(array: np.ndarray) -> Tokens:
    """Its strides, [tokens, heads, head_dim]."""
    return Tokens(None, *array.strides[:2])
