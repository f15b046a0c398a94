"""The attention backends: the choice of kernel, its mask, and one function, `attention(q, k, v, mask)`.

Shapes are in the names: B batch, T query tokens, S key tokens, H heads, G key and value heads, K head_dim.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import ModelConfig
from .norms import at_least_fp32
from .ranges import check_backend

_KERNELS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


class RowStats(NamedTuple):
    """Softmax statistics of each query, from a fused kernel; fp32, without a gradient.

    Attributes:
        max_BHT: The largest raw logit, after the scale, before the cap.
        lse_BHT: Log-sum-exp of the logits, after the cap.
    """

    max_BHT: Tensor
    lse_BHT: Tensor


def kernel_name(backend: str, device: str, dtype: torch.dtype, masked: bool = False, dropout: float = 0.0) -> str:
    """Return the name of the one kernel that computes attention: math, flex, or SDPA's flash, efficient, cudnn or
    math.

    On a CPU, `sdpa` uses flash, or math if there is dropout. On a GPU it uses flash for 16-bit inputs without a mask,
    math for fp64, and efficient otherwise. On Hopper, torch prefers cuDNN's kernel, which may be faster, but mmqk
    uses it only for `sdpa_cudnn`. The backward pass of cuDNN's kernel has given NaN where a row's log-sum-exp is very
    negative. Drifting logits can reach such values, and the NaN would look like a divergence.

    Raises:
        ValueError: the named kernel does not exist on this device, or does not support this dtype or dropout.
    """
    if backend == "math":
        return "math (dense, fp32)"
    if backend == "flex":
        if device != "cuda":
            raise ValueError(f"backend flex needs a CUDA GPU, but the device is {device}; use sdpa or math.")
        return "flex (Triton)"
    return f"{_sdpa(backend, device, dtype, masked, dropout).name.removesuffix('_ATTENTION').lower()} (SDPA)"


def _sdpa(backend: str, device: str, dtype: torch.dtype, masked: bool, dropout: float) -> SDPBackend:
    if device != "cuda":
        if backend in ("sdpa_efficient", "sdpa_cudnn"):
            raise ValueError(f"backend {backend} needs a CUDA GPU, but the device is {device}; use sdpa or math.")
        if dropout and backend == "sdpa_flash":
            raise ValueError("backend sdpa_flash has no dropout on a CPU (model.attn_dropout); use sdpa or math.")
        return SDPBackend.MATH if dropout else SDPBackend.FLASH_ATTENTION
    low = dtype in (torch.bfloat16, torch.float16)
    if backend == "sdpa":
        if dtype == torch.float64:
            return SDPBackend.MATH
        return SDPBackend.FLASH_ATTENTION if low and not masked else SDPBackend.EFFICIENT_ATTENTION
    if not low and backend != "sdpa_efficient":
        raise ValueError(
            f"backend {backend} needs 16 bits, but the dtype is {dtype}: set trainer.precision bf16-mixed, or use"
            " backend sdpa or math."
        )
    return _KERNELS[backend]


def mask_of(backend: str, T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> Any:
    """Return the attention mask in the backend's format. Layers with equal windows and documents share a mask.

    Args:
        backend: One of `BACKENDS`.
        T: Tokens per sequence.
        device: Device of the tokens.
        window: A query attends to this many tokens, itself included; 0 means all earlier tokens.
        document_BT: A query attends only to tokens with its document number; None means one document per row.

    Returns:
        math: 0 or -inf to add to the logits, (T, T) or (B, 1, T, T). sdpa: the same mask as booleans, or None for
        plain causal attention. flex: a BlockMask.
    """
    if backend == "flex":
        return flex_mask(T, device, window, document_BT)
    if backend != "math" and document_BT is None and not window:
        return None
    visible = visible_keys(T, device, window, document_BT)
    if backend != "math":
        return visible
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def documents_of(
    config: ModelConfig, separate: bool, modality_BT: Tensor | None, document_BT: Tensor | None
) -> Tensor | None:
    """Return the document number of each token for a layer. Attention stays inside a document.

    Args:
        config: Configuration of the model.
        separate: Whether tokens of different modalities also count as different documents (`config.separates`).
        modality_BT: Modality number of each token; an unknown number counts as 0.
        document_BT: Document number of each token; None means one document per row.
    """
    if not separate:
        return document_BT
    assert modality_BT is not None
    modalities = len(config.vocab_sizes)
    modality_BT = modality_BT.where((modality_BT >= 0) & (modality_BT < modalities), 0)
    return modality_BT if document_BT is None else modalities * document_BT + modality_BT


def visible_keys(T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> Tensor:
    """Return a bool mask, True where a query attends to a key: (T, S), or (B, 1, T, S) with documents."""
    visible_TS = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    if window:
        visible_TS = visible_TS.triu(1 - window)
    if document_BT is None:
        return visible_TS
    return visible_TS & (document_BT[:, None, :, None] == document_BT[:, None, None, :])


def attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: Any,
    *,
    scale: float,
    kind: str = "softmax",
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "math",
    sink_H: Tensor | None = None,
) -> tuple[Tensor, RowStats | None]:
    """Compute causal attention, `softmax(mask(cap(scale * q.k))) v`, in the dtype of its inputs.

    Args:
        q_BHTK: Queries as they enter the dot product.
        k_BHTK: Keys, with the shape and dtype of the queries; with flex the number of heads may be a divisor of H.
        v_BHTK: Values, with the shape of the keys.
        mask: The result of `mask_of` for this backend.
        scale: Factor on the dot products.
        kind: softmax, or sigmoid: each weight is `sigmoid(logit - log T)` (Ramapuram et al. 2024,
            arXiv 2409.04431).
        softcap: Logits become `softcap * tanh(logit / softcap)`, before the mask (Gemma 2, arXiv 2408.00118).
        dropout: Probability of dropping a weight.
        backend: One of `BACKENDS`.
        sink_H: For each head, a logit that counts only in the denominator of the softmax.

    Returns:
        out_BHTK, and the `RowStats` of flex, which its kernel computes anyway, or None with other backends.

    Raises:
        TypeError: q, k and v differ in dtype, or do not have the autocast dtype.
        ValueError: the backend cannot compute this attention on any device, or on this device.
    """
    check_backend(backend, softcap, kind, dropout=dropout, masked=mask is not None, sink=sink_H is not None)
    _check_dtypes(q_BHTK, k_BHTK, v_BHTK)
    if backend == "flex":
        return _flex(q_BHTK, k_BHTK, v_BHTK, mask, scale, softcap)
    if backend != "math":
        kernel = _sdpa(backend, q_BHTK.device.type, q_BHTK.dtype, mask is not None, dropout)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
            ), None
    # The dense backend computes in at least fp32; it is also the reference in the tests of all other kernels.
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q, k, v = at_least_fp32(q_BHTK), at_least_fp32(k_BHTK), at_least_fp32(v_BHTK)
        logits_BHTS = (scale * q) @ k.transpose(-1, -2)
        if softcap is not None:
            logits_BHTS = softcap * torch.tanh(logits_BHTS / softcap)
        # Adding -inf in place reads the logits once, in the forward pass. masked_fill would read them again in the
        # backward pass.
        logits_BHTS += mask
        if sink_H is not None:
            sink_BHT1 = at_least_fp32(sink_H)[:, None, None].expand(*logits_BHTS.shape[:-1], 1)
            weight_BHTS = torch.softmax(torch.cat((logits_BHTS, sink_BHT1), -1), -1)[..., :-1]
        elif kind == "softmax":
            weight_BHTS = torch.softmax(logits_BHTS, dim=-1)
        else:
            weight_BHTS = torch.sigmoid(logits_BHTS - math.log(q.shape[-2]))
        if dropout:
            weight_BHTS = F.dropout(weight_BHTS, dropout)
        return (weight_BHTS @ v).to(v_BHTK.dtype), None


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, but have {q.dtype}, {k.dtype}, {v.dtype}.")
    if q.dtype != torch.float64 and torch.is_autocast_enabled(q.device.type):
        wanted = torch.get_autocast_dtype(q.device.type)
        if q.dtype != wanted:
            raise TypeError(f"q, k and v are {q.dtype}, but the autocast dtype is {wanted}.")


# FlexAttention: masks, windows, a cap on the logits and grouped queries in one compiled kernel. Its module is
# imported inside the functions, because it needs torch 2.9, and its import takes more than a second.

# The raw logit recovered from a capped fp32 logit has a relative error of at most 1/1000 up to 6 times the cap, and
# of at most 1/40 up to 8 times the cap. From about 9 times the cap, tanh rounds to 1.
SATURATED = 8.0


def _flex(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Any, scale: float, softcap: float | None
) -> tuple[Tensor, RowStats]:
    """Compute the backend flex. The largest raw logits are recovered from the capped logits (see `SATURATED`)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # In a compiled block, flex_attention is part of the block's graph; otherwise it is compiled separately.
    fused: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out_BHTK, aux = fused(
        q_BHTK,
        k_BGTK,
        v_BGTK,
        score_mod=None if softcap is None else _cap(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    assert aux.max_scores is not None and aux.lse is not None
    max_BHT = aux.max_scores.detach()
    if softcap is not None:
        # The kernel computes in base 2, so rounding may give a value just above the cap.
        max_BHT = softcap * torch.atanh((max_BHT / softcap).clamp(-1.0, 1.0)).clamp(-SATURATED, SATURATED)
    return out_BHTK, RowStats(max_BHT, aux.lse.detach())


def _cap(softcap: float) -> Callable[..., Tensor]:
    """Return a function that computes `softcap * tanh(logit / softcap)`, for `flex_attention`."""

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def flex_mask(T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> Any:
    """Return the attention mask, with the blocks of 128 x 128 tokens that the kernel may skip."""
    from torch.nn.attention.flex_attention import create_block_mask

    if document_BT is None:
        return _same_for_all(T, device, window)
    causal = _sees(window)

    def of_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(b, h, query, key) & (document_BT[b, query] == document_BT[b, key])

    return create_block_mask(of_document, len(document_BT), None, T, T, device)


@lru_cache(maxsize=16)
def _same_for_all(T: int, device: torch.device, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.inference_mode(False):  # training reuses masks that validation creates in inference mode
        return create_block_mask(_sees(window), None, None, T, T, device)


@cache
def _sees(window: int) -> Callable[..., Tensor]:
    """Return a mask function: a query attends to itself and all earlier tokens, or to the last `window` of these."""

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return near if window else causal


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled, or after too many recompilations, flex_attention would compute all T x T logits.
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


MOST_GRAPHS = 64


def allow_many_graphs() -> None:
    """Raise the recompile limit: training, validation, a shorter last batch and each window need their own graph."""
    from torch._dynamo import config

    config.recompile_limit = max(MOST_GRAPHS, config.recompile_limit)


def keep_graphs() -> None:
    """Allow several backward passes through graphs compiled from now on. This costs some memory."""
    from torch._functorch import config

    if config.donated_buffer:
        torch.compiler.reset()  # torch would reuse earlier graphs, which overwrite their inputs
    # Without the tag, torch 2.15's disk cache could return a graph that was compiled with donated buffers. Its second
    # backward pass would be wrong.
    config.donated_buffer, torch.compiler.config.cache_key_tag = False, "keep_graphs"
