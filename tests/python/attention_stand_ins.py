"""FlashAttention and FlashInfer as documented, on float64: for tests where neither can be installed.

They take the arguments that the libraries take, by the same names, in the versions that `kvfolio.exports`
names.
"""

from __future__ import annotations

import math
import types

import numpy as np
import torch
from attention_reference import attention


def _gathered(tables, lengths, pages):
    """K or V of each row, out of its pages."""
    block_size = pages.shape[1]
    for table, length in zip(tables, lengths, strict=True):
        positions = torch.arange(int(length))
        yield pages[table[positions // block_size].long(), positions % block_size]


def _attend(q, starts, tables, lengths, keys, values, **options):
    """Out [T, H, D] and lse [T, H] of some rows, whose queries begin at `starts`."""
    assert starts.dtype == tables[0].dtype == torch.int32
    spans = [slice(*span) for span in starts.unfold(0, 2, 1).tolist()]
    parts = zip(spans, _gathered(tables, lengths, keys), _gathered(tables, lengths, values), strict=True)
    found = [attention(q[span].double(), k.double(), v.double(), **options) for span, k, v in parts]
    outs, lses = zip(*found, strict=True)
    return torch.from_numpy(np.concatenate(outs)).to(q.dtype), torch.from_numpy(np.concatenate(lses)).float()


def _window(window_size):
    return None if window_size == (-1, -1) else window_size[0] + 1


def flash_attn():
    """FlashAttention-2."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        lengths = cu_seqlens_k.diff().tolist()
        assert causal and max_seqlen_k == max(lengths) and max_seqlen_q == int(cu_seqlens_q.diff().max())
        options = {"scale": softmax_scale, "logit_softcap": softcap or None, "alibi_slopes": alibi_slopes}
        options["sliding_window"] = _window(window_size)
        out, lse = _attend(q, cu_seqlens_q, block_table, lengths, k, v, **options)
        return (out, lse.T, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        rows, queries = q.shape[:2]
        starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32)
        assert k is None and v is None and cache_seqlens.dtype == torch.int32 and causal
        assert k_cache.shape[1] % 256 == 0
        options = {"scale": softmax_scale, "logit_softcap": softcap or None}
        options["sliding_window"] = _window(window_size)
        out, _ = _attend(q.flatten(0, 1), starts, block_table, cache_seqlens, k_cache, v_cache, **options)
        return out.view(q.shape)

    return types.SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache
    )


def flash_attn_interface():
    """FlashAttention-3."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert k is None and v is None and cache_seqlens.dtype == torch.int32 and causal
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return _attend(q, cu_seqlens_q, page_table, cache_seqlens, k_cache, v_cache, scale=softmax_scale)[0]

    return types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def flashinfer():
    """Its wrappers for paged KV."""

    class Wrapper:
        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False
        ):
            assert float_workspace_buffer.dtype == torch.uint8 and not use_cuda_graph
            assert kv_layout == "NHD"

        def _keep(self, starts, indptr, indices, last_page_len, page_size, options):
            lengths = (indptr.diff() - 1) * page_size + last_page_len
            tables = [indices[a:b] for a, b in indptr.unfold(0, 2, 1).tolist()]
            self.planned = starts, tables, lengths, options

        def run(self, q, paged_kv_cache, *, return_lse=False):
            starts, tables, lengths, options = self.planned
            out, lse = _attend(q, starts, tables, lengths, *paged_kv_cache, **options)
            return (out, lse / math.log(2)) if return_lse else out

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1,
            logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        ):  # fmt: skip
            assert causal
            window = None if window_left < 0 else window_left + 1
            options = {"scale": sm_scale, "sliding_window": window, "logit_softcap": logits_soft_cap}
            paged = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            self._keep(qo_indptr, *paged, page_size, options)

    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
            window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16", kv_data_type=None,
        ):  # fmt: skip
            starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
            window = None if window_left < 0 else window_left + 1
            options = {"scale": sm_scale, "sliding_window": window, "logit_softcap": logits_soft_cap}
            self._keep(starts, indptr, indices, last_page_len, page_size, options)

    wrappers = BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper
    return types.SimpleNamespace(**{wrapper.__name__: wrapper for wrapper in wrappers})
