"""The flash backend's GPU paths, with kernels that behave as the real ones do but compute on the CPU."""

import itertools
import re
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from medusa.attention import flash
from medusa.attention.flash import FlashAttention
from tests.medusa.attention_cases import FEATURES, THIN, Case, make

CUDA = torch.device("cuda")
PAGES = [Case(lengths=(255, 256, 257, 0), size=256), Case(nodes=(1, 40, 1), lengths=(300, 3, 0), size=256)]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def prefix_attention(query_THD: Tensor, key_LHD: Tensor, value_LHD: Tensor, scale: float, softcap: float):
    """Output [T, H, D] and log-sum-exp [H, T] of one sequence, as flash kernels give them: 0 and +inf without keys."""
    if len(key_LHD) == 0:
        return torch.zeros_like(query_THD), query_THD.new_full(query_THD.shape[:2], float("inf"), dtype=torch.float32).T
    groups = query_THD.shape[1] // key_LHD.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key_LHD, value_LHD))
    scores_HTL = torch.einsum("thd,lhd->htl", query_THD.double(), key) * scale
    if softcap:
        scores_HTL = softcap * torch.tanh(scores_HTL / softcap)
    out_THD = torch.einsum("htl,lhd->thd", scores_HTL.softmax(-1), value)
    return out_THD.to(query_THD.dtype), scores_HTL.logsumexp(-1).float()


def check_tensors(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if tensor.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if tensor.shape[-1] > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """flash-attn 2.8.3: q [B, T, H, D], caches [B, S, Hkv, D], or [blocks, size, Hkv, D] with a table [B, W]; returns
    [B, T, H, D] and log-sum-exp [B, H, T].
    """
    assert not causal
    assert window_size == (-1, -1), "not imitated"
    check_tensors(q, k_cache, v_cache)
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != q.shape[:1]:
        raise RuntimeError("seqlens_k must have dtype int32 and one entry per sequence")
    if block_table is not None:
        if block_table.dtype != torch.int32 or block_table.stride(-1) != 1 or k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        k_cache, v_cache = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    if k_cache.shape[0] != q.shape[0]:
        raise RuntimeError("one cache per sequence")
    parts = [
        prefix_attention(q[b], k_cache[b, :length], v_cache[b, :length], softmax_scale, softcap)
        for b, length in enumerate(cache_seqlens.tolist())
    ]
    out, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    return (out, lse) if return_softmax_lse else out


def flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
):  # fmt: skip
    """torch's varlen kernel: query [total, H, D], key [total, Hkv, D]; returns [total, H, D], lse [H, total], more."""
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    check_tensors(query, key, value)
    if {tensor.dtype for tensor in (cum_seq_q, cum_seq_k, seqused_k)} != {torch.int32}:
        raise RuntimeError("cu_seqlens and seqused_k must have dtype int32")
    starts_q, starts_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    assert max(b - a for a, b in itertools.pairwise(starts_q)) <= max_q
    parts = []
    for b, length in enumerate(seqused_k.tolist()):
        assert length <= max_k
        rows = slice(starts_k[b], starts_k[b] + length)
        parts.append(prefix_attention(query[starts_q[b] : starts_q[b + 1]], key[rows], value[rows], scale, 0.0))
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse, dim=1), torch.empty(0), torch.empty(0), torch.empty(0)


def install(monkeypatch, interface: dict[str, object] | None) -> None:
    """Make ``import flash_attn`` find a package, with or without the interface of flash-attn 2."""
    package = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    if interface is not None:
        module = ModuleType("flash_attn.flash_attn_interface")
        vars(module).update(interface)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)


@pytest.fixture(params=["package", "torch"])
def backend(request, monkeypatch) -> FlashAttention:
    install(monkeypatch, {"flash_attn_with_kvcache": flash_attn_with_kvcache} if request.param == "package" else None)
    monkeypatch.setattr(flash, "_CUDA_KERNEL", flash_attention_forward)
    return FlashAttention(CUDA)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [*THIN, *PAGES, FEATURES["sinks"], Case(lengths=(0, 0)), Case(lengths=(0,))], ids=str)
def test_prefix_and_tree_merge_to_the_whole(backend, case, dtype):
    layer = make(case, dtype)
    torch.testing.assert_close(
        layer.run(backend).double(), layer.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_the_package_caps_scores(monkeypatch):
    install(monkeypatch, {"flash_attn_with_kvcache": flash_attn_with_kvcache})
    layer = make(FEATURES["softcap"], torch.float16)
    torch.testing.assert_close(layer.run(FlashAttention(CUDA)).double(), layer.expected(), atol=4e-3, rtol=4e-3)


def test_an_old_package_that_cannot_cap_scores_is_not_asked_to(monkeypatch):
    def old(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False, return_softmax_lse=False):
        raise AssertionError("not reached")

    install(monkeypatch, {"flash_attn_with_kvcache": old})
    layer = make(FEATURES["softcap"], torch.float16)
    objection = FlashAttention(CUDA).objection(*layer.inputs)
    assert objection == "this flash kernel does not cap scores"


@pytest.mark.parametrize(("size", "paged"), [(32, False), (256, True), (512, True)])
def test_the_package_reads_blocks_in_place_where_it_can(monkeypatch, size, paged):
    tables = []

    def note(*args, block_table=None, **options):
        tables.append(block_table)
        return flash_attn_with_kvcache(*args, block_table=block_table, **options)

    install(monkeypatch, {"flash_attn_with_kvcache": note})
    make(Case(size=size), torch.float16).run(FlashAttention(CUDA))
    assert [table is not None for table in tables] == [paged]


@pytest.mark.parametrize("interface", [None, {}])
def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(monkeypatch, interface):
    install(monkeypatch, interface)
    assert FlashAttention(CUDA)._prefix is flash._torch_cuda


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (Case(), torch.float32, "do not compute in torch.float32"),
        (FEATURES["window"], torch.float16, "a sliding window"),
        (FEATURES["narrow values"], torch.float16, r"head sizes \(64, 32\)"),
        (Case(dim=264), torch.float16, r"multiples of 8 up to 256"),
        (Case(dim=20), torch.float16, r"multiples of 8 up to 256"),
    ],
    ids=str,
)
def test_layers_that_kernels_refuse_are_not_given_to_them(backend, case, dtype, reason):
    layer = make(case, dtype)
    objection = backend.objection(*layer.inputs)
    assert objection is not None
    assert re.search(reason, objection)
