"""Storage for K and V, and attention over it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvfolio import _arrays, _checks, _environment, _native
from kvfolio._arrays import Array
from kvfolio._native import BlockPool, Plan
from kvfolio.errors import CopiesNotApplied, StaleHandle

if TYPE_CHECKING:
    from kvfolio import _device_cache


class KVCache:
    """K and V of every layer, in the blocks of a pool.

    A step of a model applies the plan's copies once, and then, in every layer, writes its tokens' K and V
    and attends::

        cache.apply_copies(plan)
        for layer in range(cache.num_layers):
            ...
            cache.write(layer, k, v, plan)
            out = cache.attend(layer, q, plan)

    Arrays are numpy arrays or torch tensors of the cache's dtype; what comes out is of the kind that went
    in. In numpy, bfloat16 is `ml_dtypes.bfloat16` where that package is installed, else its bits as uint16;
    both are taken.

    Threads may use one cache at once for batches of their own: the pool's rules keep them off each other's
    blocks.

    Parameters
    ----------
    pool : BlockPool
        Says how many blocks there are and how large they are.
    num_layers, num_kv_heads, head_dim : int
        At least 1 each.
    dtype : str or dtype
        float32, float16 or bfloat16.
    device : str or torch.device
        "cpu" or "cuda", by number or not. There everything is queued on the current stream, and heads have
        64, 128 or 256 elements. The first use on a machine builds the kernels (`kvfolio.ops.load_cuda`).
    array : {"numpy", "torch"}
        What `keys` and `values` are made of; tensors where the device is no CPU.
    backend : {"kvfolio", "flashinfer", "flash_attn"}
        On a GPU, whose attention to call.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type, too small, or names what is not supported.
    CudaUnavailable, ImportError
        What the device or the backend needs is not there.
    MemoryError
        The system refuses the memory. It is claimed here but supplied by the page, when that is first
        written.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float32",
        device: Any = "cpu",
        array: Literal["numpy", "torch"] = "numpy",
        backend: Literal["kvfolio", "flashinfer", "flash_attn"] = "kvfolio",
    ) -> None:
        num_blocks, block_size = _pool_shape(pool)
        num_layers = _checks.integer("num_layers", num_layers, 1)
        num_kv_heads = _checks.integer("num_kv_heads", num_kv_heads, 1)
        head_dim = _checks.integer("head_dim", head_dim, 1)
        name = _arrays.dtype_name("dtype", dtype)
        kind = str(device).partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', not {str(device)!r}")
        if array not in ("numpy", "torch"):
            raise ValueError(f"array must be 'numpy' or 'torch', not {array!r}")
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        if kind == "cuda":
            _checks.torch_is_here(f"device={str(device)!r}")
            from kvfolio import _device_cache

            keys, values, storage = _device_cache.allocate(shape, name, device, num_layers, backend)
            self._adopt(pool, keys, values, name, storage)
            return
        if backend != "kvfolio":
            raise ValueError(f"backend must be 'kvfolio' on the cpu, not {backend!r}")
        if array == "torch":
            _checks.torch_is_here("array='torch'")
        keys = tuple(_arrays.zeros(shape, name, array) for _ in range(num_layers))
        values = tuple(_arrays.zeros(shape, name, array) for _ in range(num_layers))
        self._adopt(pool, keys, values, name)

    @classmethod
    def wrap(cls, pool: BlockPool, keys: Sequence[Array], values: Sequence[Array]) -> KVCache:
        """A cache in memory that the caller owns.

        Parameters
        ----------
        pool : BlockPool
        keys, values : sequence of arrays or tensors
            One of each for every layer, seen as ``[num_physical_blocks, block_size, num_kv_heads,
            head_dim]``. Heads' elements must be adjacent; other strides are free. So ``[blocks, heads,
            block_size, head_dim]`` (HND) comes as a view with two axes swapped, and K and V packed in one
            array come as two views.

        Raises
        ------
        TypeError, ValueError
            They differ in number, shape, dtype or device from each other or from the pool; are not
            writable; or do not give every element a place of its own.
        """
        shape = _pool_shape(pool)
        keys, values = tuple(keys), tuple(values)
        if not keys or len(keys) != len(values):
            raise ValueError(
                f"keys and values must have one array each for every layer, not {len(keys)} and {len(values)}"
            )
        named = [(f"keys[{i}]", key) for i, key in enumerate(keys)]
        named += [(f"values[{i}]", value) for i, value in enumerate(values)]
        dtype = _arrays.stored_dtype(*named[0])
        if any(_arrays.is_tensor(array) and not array.is_cpu for _, array in named):
            from kvfolio import _device_cache

            _device_cache.check_storage(named, shape)
            cache = cls.__new__(cls)
            cache._adopt(pool, keys, values, dtype, _device_cache.DeviceStorage(keys, values, dtype))
            return cache
        views = [_arrays.kernel_view(name, array, dtype, 4) for name, array in named]
        whole = (*shape, *views[0].shape[2:])
        for (name, _), view in zip(named, views, strict=True):
            _check_storage(name, view, whole)
        for (one, one_view), (other, other_view) in combinations(zip(named, views, strict=True), 2):
            if _share_memory(one_view, other_view):
                raise ValueError(f"{one[0]} and {other[0]} must not share memory")
        # Copies nothing, but looks at all strides.
        _native.copy_blocks(dtype, views, np.empty((0, 2), np.int32))
        cache = cls.__new__(cls)
        cache._adopt(pool, keys, values, dtype)
        return cache

    def _adopt(
        self,
        pool: BlockPool,
        keys: tuple[Array, ...],
        values: tuple[Array, ...],
        dtype: str,
        storage: _device_cache.DeviceStorage | None = None,
    ) -> None:
        self._pool, self._keys, self._values, self._dtype = pool, keys, values, dtype
        self._storage = storage  # None on the CPU
        if storage is None:
            _environment.check()
            keys = tuple(_arrays.kernel_view("keys", key, dtype, 4) for key in keys)
            values = tuple(_arrays.kernel_view("values", value, dtype, 4) for value in values)
        self._key_views, self._value_views = list(keys), list(values)
        self._copied: weakref.WeakSet[Plan] = weakref.WeakSet()

    @property
    def pool(self) -> BlockPool:
        """The pool whose blocks these are."""
        return self._pool

    @property
    def keys(self) -> tuple[Array, ...]:
        """The storage of K, ``[num_physical_blocks, block_size, num_kv_heads, head_dim]`` for each layer."""
        return self._keys

    @property
    def values(self) -> tuple[Array, ...]:
        """The storage of V, shaped like `keys`."""
        return self._values

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._keys)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self._key_views[0].shape[2])

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return int(self._key_views[0].shape[3])

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self._key_views[0].shape[1])

    @property
    def dtype(self) -> str:
        """float32, float16 or bfloat16."""
        return self._dtype

    @property
    def device(self) -> str:
        """Where the storage is."""
        return "cpu" if self._storage is None else str(self._storage.device)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in all layers, those of the null block included."""
        return sum(view.nbytes for view in self._key_views + self._value_views)

    def __repr__(self) -> str:
        num_blocks, block_size, num_kv_heads, head_dim = self._key_views[0].shape
        return (
            f"<KVCache: {self.num_layers} layers, {num_kv_heads} KV heads x {head_dim}, "
            f"{self.dtype} on {self.device}, {num_blocks} blocks of {block_size} tokens, "
            f"{self.nbytes / 2**20:.1f} MiB>"
        )

    def apply_copies(self, plan: Plan) -> None:
        """Do a plan's copy-on-write, in all layers; to be called once for a plan, before its first `write`.

        All sources are read before any destination is written. A second call for the same plan does
        nothing, so that it cannot undo what was written since.

        Raises
        ------
        TypeError, ValueError, IndexError
            `plan.copies` is no int32 array ``[c, 2]``, or names a block that the storage does not have.
        """
        self._check_plan(plan)
        if plan in self._copied:
            return
        copies = _plan_array(plan, "copies", np.int32, 2)
        if self._storage is not None:
            self._storage.copy_blocks(plan, copies, self._pool.num_physical_blocks)
        else:
            _native.copy_blocks(self._dtype, self._key_views + self._value_views, copies)
        self._copied.add(plan)

    def write(self, layer: int, k: Array, v: Array, plan: Plan) -> None:
        """Put the K and V of a step's tokens into their slots.

        Parameters
        ----------
        layer : int
        k, v : array or tensor, ``[num_tokens, num_kv_heads, head_dim]``, the cache's dtype
        plan : Plan
            Token `t` goes into slot `plan.slot_mapping[t]`; tokens with a negative slot are passed over.

        Raises
        ------
        StaleHandle
            The plan has been rolled back.
        CopiesNotApplied
            The plan has copies, and `apply_copies` was not called: they would overwrite what is written
            now.
        TypeError, ValueError, IndexError
            An argument does not fit the cache or the plan. Nothing was written.
        """
        layer = _checks.index("layer", layer, self.num_layers)
        keys = self._tokens("k", k, plan)
        values = self._tokens("v", v, plan)
        slots = _plan_array(plan, "slot_mapping", np.int64, 1)
        copies = _plan_array(plan, "copies", np.int32, 2)
        if len(copies) and plan not in self._copied:
            raise CopiesNotApplied(
                f"the plan has {len(copies)} block copies to be done before its K and V are written: "
                "call apply_copies(plan) first"
            )
        if self._storage is not None:
            self._storage.write(layer, keys, values, plan)
            return
        views = self._key_views[layer], self._value_views[layer]
        slots = np.ascontiguousarray(slots)
        _native.write_kv(self._dtype, keys, values, *views, slots, max_threads=_arrays.max_threads(k))

    @overload
    def attend(
        self,
        layer: int,
        q: Array,
        plan: Plan,
        *,
        scale: float | None = ...,
        sliding_window: int | None = ...,
        logit_softcap: float | None = ...,
        alibi_slopes: Any = ...,
        sinks: Any = ...,
        return_lse: Literal[False] = ...,
    ) -> Array: ...
    @overload
    def attend(
        self,
        layer: int,
        q: Array,
        plan: Plan,
        *,
        scale: float | None = ...,
        sliding_window: int | None = ...,
        logit_softcap: float | None = ...,
        alibi_slopes: Any = ...,
        sinks: Any = ...,
        return_lse: Literal[True],
    ) -> tuple[Array, Array]: ...
    def attend(
        self,
        layer: int,
        q: Array,
        plan: Plan,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Causal attention of a step's queries to all K and V of their sequences, of this step and before.

        The queries of a row are its last positions: of `n` queries of a sequence that is `s` tokens long
        now, query `i` stands at position ``s - n + i`` and sees the keys up to there. Rows of one query
        (decode) and of many (prefill, or a chunk of one) go together. Query head `h` reads KV head ``h //
        (num_heads // num_kv_heads)``.

        The score of a key is ``scale * (q . k)``, then ``cap * tanh(score / cap)`` if there is a soft cap,
        then the ALiBi bias is added. Sums are taken in float32.

        Parameters
        ----------
        layer : int
        q : array or tensor, ``[num_tokens, num_heads, head_dim]``, the cache's dtype
            `num_heads` is a multiple of `num_kv_heads`.
        plan : Plan
        scale : float, optional
            ``1 / sqrt(head_dim)`` by default.
        sliding_window : int, optional
            So many keys are seen, the query's own position included; all by default.
        logit_softcap : float, optional
            Above 0.
        alibi_slopes : ``[num_heads]``, optional
            ``slope * (key position - query position)`` is added to scores (Press et al. 2022).
        sinks : ``[num_heads]``, optional
            A score for each head that joins the softmax's denominator and carries no value: learned
            attention sinks, as in gpt-oss (after StreamingLLM, Xiao et al. 2024).
        return_lse : bool
            Return the logarithm of the denominators, too: with it, partial results can be merged.

        Returns
        -------
        out : array or tensor, of q's shape, dtype and kind
            Zeros for a sequence of length 0.
        lse : float32 ``[num_tokens, num_heads]``, of q's kind, if `return_lse`
            Natural logarithm of the softmax's denominator, sinks included; minus infinity where that is 0.

        Raises
        ------
        ValueError
            A block that was discarded is in sight of a query: the sliding window is wider than what was
            kept.
        TypeError, ValueError, IndexError
            An argument does not fit the cache or the plan.

        Notes
        -----
        Online softmax (Milakov and Gimelshein 2018) over K and V where they lie in their pages
        (FlashAttention, Dao et al. 2022; PagedAttention, Kwon et al., SOSP 2023). Memory that a query does
        not see has no influence on its row, not even if it holds NaN.
        """
        layer = _checks.index("layer", layer, self.num_layers)
        queries = self._tokens("q", q, plan)
        num_tokens, num_heads, head_dim = queries.shape
        if sliding_window is not None:
            sliding_window = min(_checks.integer("sliding_window", sliding_window, 1), 2**31)
        scale = head_dim**-0.5 if scale is None else _checks.number("scale", scale)
        logit_softcap = None if logit_softcap is None else _checks.number("logit_softcap", logit_softcap)
        if self._storage is not None:
            options = (scale, sliding_window, logit_softcap, alibi_slopes, sinks)
            result = self._storage.attend(layer, queries, plan, *options)
            return result if return_lse else result[0]
        out, out_view = _arrays.empty_like(q, self._dtype)
        lse, lse_view = _arrays.empty_float32((num_tokens, num_heads), q) if return_lse else (None, None)
        _native.attend(
            self._dtype,
            queries,
            self._key_views[layer],
            self._value_views[layer],
            out_view,
            lse_view,
            _rows_adjacent(_plan_array(plan, "block_table", np.int32, 2)),
            np.ascontiguousarray(_plan_array(plan, "seq_lens", np.int32, 1)),
            np.ascontiguousarray(_plan_array(plan, "query_start_loc", np.int32, 1)),
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_heads),
            sinks=_per_head("sinks", sinks, num_heads),
            max_threads=_arrays.max_threads(q),
        )
        return (out, lse) if return_lse else out

    def _check_plan(self, plan: Plan) -> None:
        """Its blocks are this cache's, and still its own. A plan from elsewhere may leave that untold."""
        if not hasattr(plan, "num_tokens"):
            raise TypeError(f"plan must be a Plan, not {type(plan).__name__}")
        pool = getattr(plan, "pool", self._pool)
        if pool is not self._pool:
            raise ValueError(f"plan must be of the cache's pool, {self._pool!r}, not of {pool!r}")
        if getattr(plan, "is_rolled_back", False):
            raise StaleHandle("the plan has been rolled back; its blocks are others' now")

    def _tokens(self, argument: str, value: Array, plan: Plan) -> Any:
        """The kernels' view of a step's q, k or v: an array, or on a device a tensor."""
        self._check_plan(plan)
        view: Any
        if self._storage is None:
            view = _arrays.token_view(argument, value, self._dtype)
        else:
            view = self._storage.view(argument, value, 3)
        num_tokens = plan.num_tokens
        if view.shape[0] != num_tokens or view.shape[2] != self.head_dim:
            heads = "num_heads" if argument == "q" else self.num_kv_heads
            raise ValueError(
                f"{argument} must be of shape [{num_tokens} (plan.num_tokens), {heads}, "
                f"{self.head_dim} (head_dim)], not {tuple(view.shape)}"
            )
        return view


def _pool_shape(pool: BlockPool) -> tuple[int, int]:
    try:
        return int(pool.num_physical_blocks), int(pool.block_size)
    except AttributeError:
        raise TypeError(f"pool must be a BlockPool, not {type(pool).__name__}") from None


def _check_storage(argument: str, view: NDArray[Any], shape: tuple[int, ...]) -> None:
    if view.shape != shape or 0 in shape:
        num_blocks, block_size = shape[:2]
        raise ValueError(
            f"{argument} must be of shape [{num_blocks} (pool.num_physical_blocks), "
            f"{block_size} (pool.block_size), num_kv_heads, head_dim], the same for all layers, "
            f"not {view.shape}"
        )
    if not view.flags.writeable:
        raise ValueError(f"{argument} must be writable")
    if view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
        raise ValueError(
            f"{argument} must be contiguous in its last dimension, head_dim; its strides are {view.strides}"
        )


def _share_memory(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=100_000)  # type: ignore[arg-type]  # any int, says numpy
    except np.exceptions.TooHardError:  # interleaved in a way that only a search could tell from overlapping
        return False


def _plan_array(plan: Plan, name: str, dtype: type[np.generic], ndim: int) -> NDArray[Any]:
    array = getattr(plan, name, None)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"plan must be a Plan with a numpy array {name}, not {type(plan).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"plan.{name} must be of dtype {np.dtype(dtype)}, not {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"plan.{name} must have {ndim} dimensions, not {array.ndim}")
    return array


def _rows_adjacent(table: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows may lie apart, their cells may not."""
    return table if table.shape[1] <= 1 or table.strides[1] == table.itemsize else np.ascontiguousarray(table)


def _per_head(argument: str, value: object, num_heads: int) -> NDArray[np.float32] | None:
    return None if value is None else _arrays.float32_vector(argument, value, num_heads)
