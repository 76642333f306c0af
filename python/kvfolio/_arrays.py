"""The one place that knows how numpy arrays, torch tensors and bfloat16 differ.

Kernels take numpy arrays of float32, float16, or uint16 that holds the bits of bfloat16. Everything else is
turned into such a view of the same memory here. Torch is never imported unless the caller asked for
tensors: whoever passes one has imported it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _native

Array: TypeAlias = Any  # a numpy.ndarray or a torch.Tensor
Kind: TypeAlias = Literal["numpy", "torch"]

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_name(argument: str, dtype: object) -> str:
    """The plain name of a storage type, given as a name or as an object of numpy, torch or ml_dtypes."""
    name = dtype
    if not isinstance(dtype, str):
        name = str(dtype).removeprefix("torch.") if _is_torch_dtype(dtype) else _numpy_name(dtype)
    if name not in ITEM_SIZES:
        allowed = ", ".join(ITEM_SIZES)
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"{argument} must be one of {allowed}, not {dtype!r}")
    return str(name)


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor; without torch being loaded, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def kind_of(argument: str, value: object) -> Kind:
    """Which kind of array it is; TypeError if it is none."""
    if is_tensor(value):
        return "torch"
    if isinstance(value, np.ndarray):
        return "numpy"
    raise TypeError(f"{argument} must be a numpy array or a torch tensor, not {type(value).__name__}")


def stored_dtype(argument: str, value: Array) -> str:
    """The name of an array's storage type; uint16 counts as the bits of bfloat16."""
    kind_of(argument, value)
    name = _plain_name(value.dtype)
    name = "bfloat16" if name == "uint16" else name
    if name not in ITEM_SIZES or not _is_native(value):
        raise TypeError(f"{argument} must be of dtype {', '.join(ITEM_SIZES)}, not {value.dtype}")
    return name


_SPELLINGS = {"bfloat16": "uint16"}  # numpy has no bfloat16 of its own; its bits do


def kernel_view(argument: str, value: Array, dtype: str, ndim: int) -> NDArray[Any]:
    """The same memory as the kernels take it; TypeError or ValueError if it is not fit for them."""
    kind = kind_of(argument, value)
    name = _plain_name(value.dtype)
    if (name != dtype and name != _SPELLINGS.get(dtype)) or not (kind == "torch" or value.dtype.isnative):
        raise TypeError(f"{argument} must be of dtype {dtype}, as the cache is, not {value.dtype}")
    if value.ndim != ndim:
        raise ValueError(f"{argument} must have {ndim} dimensions, not shape {tuple(value.shape)}")
    if kind == "torch":
        return _tensor_as_numpy(argument, value, bits=dtype == "bfloat16")
    return value.view(np.uint16) if dtype == "bfloat16" else np.asarray(value)


class TensorMemory(NamedTuple):
    """Where a tensor's elements lie, for kernels. To make numpy's view of it takes four times as long."""

    tensor: Any  # whose memory it is: kept as long as this
    address: int
    shape: Sequence[int]
    strides: Sequence[int]  # in elements


def token_view(argument: str, value: Array, dtype: str) -> NDArray[Any] | TensorMemory:
    """A step's q, k or v, ``[tokens, heads, head_dim]``, as `kernel_view`, if need be of a copy."""
    if not is_tensor(value):
        return with_adjacent_rows(kernel_view(argument, value, dtype, 3))
    if _plain_name(value.dtype) != dtype or value.ndim != 3 or not _is_plain(value):
        kernel_view(argument, value, dtype, 3)  # says what is wrong
        value = value.detach()
    strides = value.stride()
    if strides[2] != 1:
        value = value.contiguous()
        strides = value.stride()
    return TensorMemory(value, value.data_ptr(), value.shape, strides)


def with_adjacent_rows(view: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a copy where its last dimension is not contiguous or elements are not aligned."""
    flags = view.flags
    if flags.c_contiguous and flags.aligned:
        return view
    adjacent = view.shape[-1] <= 1 or view.strides[-1] == view.itemsize
    whole = all(stride % view.itemsize == 0 for stride in view.strides)
    return view if adjacent and whole and flags.aligned else np.ascontiguousarray(view)


def empty_like(value: Array, dtype: str) -> tuple[Array, NDArray[Any] | TensorMemory]:
    """A new dense array of the same kind and shape, and of the storage type, and what kernels know it by."""
    if not is_tensor(value):
        out = np.empty(value.shape, value.dtype)
        return out, out.view(np.uint16) if dtype == "bfloat16" else out
    out = value.new_empty(value.shape)
    return out, TensorMemory(out, out.data_ptr(), out.shape, out.stride())


def empty_float32(shape: Sequence[int], like: Array) -> tuple[Array, NDArray[np.float32]]:
    """A new float32 array of the kind of `like`, and the kernels' view of it."""
    out = np.empty(shape, np.float32)
    return (sys.modules["torch"].from_numpy(out) if is_tensor(like) else out), out


def max_threads(value: Array) -> int | None:
    """Torch's own number of threads for tensors, for which kernels use torch's own threads if they can."""
    if not is_tensor(value):
        return None
    _use_threads_of_torch()
    return int(sys.modules["torch"].get_num_threads())


@cache
def _use_threads_of_torch() -> None:
    """They look out for work on all CPUs for a while after each call: ours would be in their way."""
    if "backend: OpenMP" in sys.modules["torch"].__config__.parallel_info():
        with contextlib.suppress(AttributeError, OSError, TypeError):  # not there under this name
            _native.use_open_mp(open_mp_parallel())


def open_mp_parallel() -> int:
    """The address of the process's `GOMP_parallel`, which runtimes of GCC and of LLVM have."""
    return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0


HUGE_PAGE = 2 << 20


def zeros(shape: Sequence[int], dtype: str, kind: Kind) -> Array:
    """Fresh storage, of which the system supplies a page when it is first written."""
    size = int(np.prod(shape, dtype=object)) * ITEM_SIZES[dtype]
    bits = _zero_bytes(size).view(np.uint16 if dtype == "bfloat16" else dtype).reshape(shape)
    if kind == "numpy":
        return bits.view(_numpy_bfloat16()) if dtype == "bfloat16" else bits
    import torch

    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _zero_bytes(size: int) -> NDArray[np.uint8]:
    """Zeros; large ones in huge pages where the system has them, since scattered blocks miss translations."""
    line = 64  # vectors that straddle cache lines cost two loads
    unit = HUGE_PAGE if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") else line
    if unit == line:
        memory = np.zeros(size + unit, np.uint8)
    else:
        try:
            area = mmap.mmap(-1, size + unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"the system refuses {size} bytes for K or V of a layer: {error}") from None
        with contextlib.suppress(OSError):  # a system built without them
            area.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(area, np.uint8)
    start = -memory.ctypes.data % unit
    return memory[start : start + size]


def float32_vector(argument: str, value: object, length: int) -> NDArray[np.float32]:
    """Numbers, one for each head, whatever they come in."""
    if is_tensor(value):
        _check_cpu(argument, value)
        value = value.detach().float().numpy()  # type: ignore[attr-defined]
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{argument} must hold numbers, not {array.dtype}")
    if array.shape != (length,):
        raise ValueError(
            f"{argument} must have shape ({length},), one number for each query head, not {array.shape}"
        )
    with np.errstate(over="ignore"):  # the kernel refuses what is not finite, by name
        return np.ascontiguousarray(array, np.float32)


def _tensor_as_numpy(argument: str, tensor: Any, *, bits: bool) -> NDArray[Any]:
    torch = sys.modules["torch"]
    _check_cpu(argument, tensor)
    if tensor.layout != torch.strided:
        raise ValueError(f"{argument} must be a strided tensor, not {tensor.layout}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: NDArray[Any] = (tensor.view(torch.uint16) if bits else tensor).numpy()
    return array


def _is_plain(tensor: Any) -> bool:
    strided = sys.modules["torch"].strided
    return bool(tensor.is_cpu and tensor.layout == strided and not (tensor.requires_grad or tensor.is_neg()))


def _check_cpu(argument: str, tensor: Any) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{argument} must be on the cpu, where the cache is, not on {tensor.device}")


def _is_native(value: Array) -> bool:
    return is_tensor(value) or bool(value.dtype.isnative)


@cache
def _plain_name(dtype: object) -> str:
    """Of a dtype of numpy, torch or ml_dtypes; there are few, and to spell one takes a microsecond."""
    return str(dtype).removeprefix("torch.")


def _is_torch_dtype(dtype: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def _numpy_name(dtype: Any) -> object:
    if dtype is None:  # numpy reads that as float64
        return None
    try:
        return np.dtype(dtype).name
    except TypeError:
        return None


@cache
def _numpy_bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
