"""A Hugging Face causal LM over a paged KV cache.

transformers calls whatever attention function is registered under the name in a model's config. Ours writes
the step's K and V into the blocks and attends through the block table. It belongs to no model and no
engine: what it works on comes through a context variable, which is set for the length of one forward pass.

The batch is flat: one row of T tokens, whosever they are, each with its position. No mask is built, because
no mask function is registered under our name; who sees whom follows from the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

import kvfolio as kv

from .errors import UnsupportedModel

IMPLEMENTATION = "kvfolio"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class _LayerCall:
    """One layer's attention over the step's T tokens: q [T, num_heads, d], k and v [T, num_kv_heads, d]."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None
    sliding_window: int | None
    logit_softcap: float | None
    sinks: torch.Tensor | None


_attend: ContextVar[Callable[[_LayerCall], torch.Tensor]] = ContextVar("kvfolio_attend")
_NOT_TOLD: Any = object()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_TOLD,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface: q, k, v [1, heads, T, head_dim] in, [1, T, num_heads, head_dim] out."""
    attend = _attend.get(None)
    if attend is None:
        raise RuntimeError("attention over kvfolio's cache runs within a step of an engine only")
    if attention_mask is not None:
        raise UnsupportedModel("the model masks attention in a way of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{type(module).__name__} is not causal")
    if sliding_window is _NOT_TOLD:
        sliding_window = getattr(module, "sliding_window", None)
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = attend(_LayerCall(layer, q, k, v, scaling, sliding_window, softcap, s_aux))
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention)


@dataclass(frozen=True)
class KVLayout:
    """What one token leaves behind: K and V of [num_kv_heads, head_dim] in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None  # the widest of all layers; None: some layer sees everything

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedModel:
    """A causal LM that computes plans.

    The model is put into evaluation mode. Its attention implementation is switched for each forward pass and
    put back after it, so `model.generate` still works between two steps. Two threads must not use one model
    at once.

    Raises UnsupportedModel if the model has layers that do not come with a K and a V (recurrent, cross
    attention, compressed latents), if these differ in shape, or if its attention cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_by_config(model)
        model.eval()  # type: ignore[no-untyped-call]
        self._model = model
        # One config object may serve many modules, and a model of several parts has several.
        configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
        self._configs = list({id(config): config for config in configs}.values())
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.layout = self._probe()

    def __repr__(self) -> str:
        return f"PagedModel({type(self._model).__name__}, {self.layout})"

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, as `generate` has it."""
        for config in (self._model.generation_config, self._model.config.get_text_config()):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def vocabulary_size(self) -> int:
        """How many tokens the model can read."""
        weight: Any = self._model.get_input_embeddings().weight
        return int(weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model's positions are made for; None: it does not say."""
        config = self._model.config.get_text_config()
        longest: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        # These kinds stretch the rotation of every token by the longest sequence in the batch, so that a
        # request's neighbours would change its answer. Up to the length it was trained with they stretch
        # nothing.
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            longest = rope.get("original_max_position_embeddings") or longest
        return longest

    def make_cache(self, pool: kv.BlockPool) -> kv.KVCache:
        """KV storage for all blocks of a pool, in the model's own dtype and on its device."""
        return kv.KVCache(
            pool,
            self.layout.num_layers,
            self.layout.num_kv_heads,
            self.layout.head_dim,
            dtype=str(self.layout.dtype).removeprefix("torch."),
            device=str(self.layout.device),
            array="torch",
        )

    def forward(
        self,
        plan: kv.Plan,
        cache: kv.KVCache,
        *,
        token_ids: NDArray[np.integer[Any]] | None = None,
        logits_indices: NDArray[np.integer[Any]] | None = None,
    ) -> torch.Tensor:
        """Compute the plan's tokens; returns the logits of `plan.logits_rows`, float32 [m, vocabulary].

        `token_ids`: instead of `plan.token_ids`, [T], where the plan was made before all of them were known.
        `logits_indices`: instead of `plan.logits_indices`, [m], where more places than those are looked at.

        Raises FloatingPointError if they are no numbers, or what the last layer caches is none: such a plan
        must not be committed, since others would find its blocks by their tokens.
        """
        cache.apply_copies(plan)
        finite = True

        def attend(call: _LayerCall) -> torch.Tensor:
            nonlocal finite
            if call.layer == self.layout.num_layers - 1:  # what is wrong in a layer is so in all after it
                finite = all(bool(states.isfinite().all()) for states in (call.k, call.v))
            cache.write(call.layer, call.k, call.v, plan)
            out: torch.Tensor = cache.attend(
                call.layer,
                call.q,
                plan,
                scale=call.scale,
                sliding_window=call.sliding_window,
                logit_softcap=call.logit_softcap,
                sinks=call.sinks,
            )
            return out

        device = self.layout.device
        logits = self._run(
            attend,
            torch.tensor(plan.token_ids if token_ids is None else token_ids, dtype=torch.long, device=device),
            torch.tensor(plan.positions, dtype=torch.long, device=device),
            torch.tensor(
                plan.logits_indices if logits_indices is None else logits_indices,
                dtype=torch.long,
                device=device,
            ),
        )
        # The greatest is NaN if any is; what a model masks is minus infinity, and no matter.
        if not (finite and bool(logits.amax(dim=-1).isfinite().all())):
            raise FloatingPointError("the model's output is not finite")
        return logits

    @torch.inference_mode()
    def _run(
        self,
        attend: Callable[[_LayerCall], torch.Tensor],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        picked = {"logits_to_keep": logits_indices} if self._picks_logits else {}
        with _paged_attention(self._configs, attend):
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **picked
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._picks_logits else logits[logits_indices]).float()

    def _probe(self) -> KVLayout:
        """Send one token through and see what each layer would cache: configs spell that in too many ways."""
        calls: list[_LayerCall] = []

        def attend(call: _LayerCall) -> torch.Tensor:
            calls.append(call)
            return call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])

        one = torch.zeros(1, dtype=torch.long, device=self._model.device)
        self._run(attend, one, one, one)
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if [call.layer for call in calls] != list(range(num_layers)):
            raise UnsupportedModel(
                f"{type(self._model).__name__} has {num_layers} layers, but K and V come from layers "
                f"{[call.layer for call in calls]}: each layer must have its own, once"
            )
        shapes = {states.shape[1:] for call in calls for states in (call.k, call.v)}
        if len(shapes) > 1:
            raise UnsupportedModel(
                f"K and V must have one shape in all layers, not {sorted(map(tuple, shapes))}"
            )
        k = calls[0].k
        windows = [call.sliding_window for call in calls]
        widest = max((window for window in windows if window is not None), default=None)
        return KVLayout(
            num_layers, k.shape[1], k.shape[2], k.dtype, k.device, None if None in windows else widest
        )


def _refuse_by_config(model: PreTrainedModel) -> None:
    """What a probe cannot see."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, not {name}")
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} has an encoder; cross attention is not cached here")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a recurrent state, of which there is no block")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(f"{name} does not call attention through transformers' attention interface")
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise UnsupportedModel(f"{name} has layers of a kind that is not supported: {sorted(unknown)}")


@contextmanager
def _paged_attention(configs: list[Any], attend: Callable[[_LayerCall], torch.Tensor]) -> Iterator[None]:
    """Within it, these configs name our attention, which works through `attend`."""
    before = [config._attn_implementation for config in configs]
    token = _attend.set(attend)
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        _attend.reset(token)
