"""The backends of attention: one contract, `(q, k, v, mask) -> out [, what each row's softmax was]`.

Shapes are in the names: B batch, T tokens (S the same tokens as keys), H heads, K head width.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .norms import at_least_fp32

# Dense, torch's fused one by the kernel that fits or by a named one, and FlexAttention.
BACKENDS = ("math", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
_KERNELS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
BLOCK = 128  # tokens


class Rows(NamedTuple):
    """What a fused kernel knows of each query's softmax; fp32, without a gradient.

    Attributes:
        max_BHT: The largest raw logit, after the scale, before the cap.
        lse_BHT: Log of the sum of the exponentials of the logits, after the cap.
    """

    max_BHT: Tensor
    lse_BHT: Tensor


def check_backend(
    backend: str,
    softcap: float | None = None,
    kind: str = "softmax",
    *,
    dropout: float = 0.0,
    masked: bool = False,
    tokens: int | None = None,
) -> None:
    """Raise ValueError for an unknown backend, or for one that cannot compute this attention on any device.

    Args:
        backend: Its name.
        softcap: Cap on the logits.
        kind: softmax or sigmoid.
        dropout: Of attention weights.
        masked: Whether a query's keys are fewer than all before it: a window, or documents kept apart.
        tokens: Of a sequence, where that is known.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}.")
    if backend == "math":
        return
    if kind != "softmax":
        raise ValueError(f"backend {backend} cannot compute model.attention {kind}; use backend math.")
    if backend != "flex":
        if softcap is not None:
            raise ValueError(
                f"backend {backend} cannot apply model.attn_softcap {softcap}; use backend math, or flex on a GPU."
            )
        if backend == "sdpa_flash" and masked:
            raise ValueError(
                "backend sdpa_flash sees all earlier tokens: with model.window or with data.document_mask use sdpa,"
                " sdpa_efficient, flex or math."
            )
        if backend == "sdpa_cudnn" and masked and tokens is not None and tokens % BLOCK:
            raise ValueError(
                f"backend sdpa_cudnn with a mask wants data.seq_len to be a multiple of {BLOCK}, but it is"
                f" {tokens}: at others its backward pass has given NaN; use sdpa."
            )
        return
    if dropout:
        raise ValueError(
            f"backend flex cannot drop attention weights (model.attn_dropout {dropout}); use sdpa or math."
        )
    if tokens is not None and tokens % BLOCK:
        raise ValueError(
            f"backend flex wants data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at others its"
            " backward pass has given NaN."
        )


def kernel_name(
    backend: str, device: str, dtype: torch.dtype, masked: bool = False, dropout: float = 0.0
) -> str:
    """The kernel that computes attention, always this one: math, flex, or SDPA's flash, efficient, cudnn or math.

    Under `sdpa` it is flash, or efficient where there is a mask or fp32 on a GPU. cuDNN's, which torch itself prefers
    on Hopper and which may be faster there, is only taken by name: its backward pass has given NaN where a row's
    log-sum-exp is very negative, a regime that drifting logits reach, and such a NaN would pass for a divergence of
    the model.

    Raises:
        ValueError: the named kernel does not exist on this device, or not for this.
    """
    if backend == "math":
        return "math (dense, fp32)"
    if backend == "flex":
        if device != "cuda":
            raise ValueError(
                f"backend flex is compiled for CUDA GPUs and this is {device}; use sdpa or math."
            )
        return "flex (Triton)"
    return f"{_sdpa(backend, device, dtype, masked, dropout).name.removesuffix('_ATTENTION').lower()} (SDPA)"


def _sdpa(backend: str, device: str, dtype: torch.dtype, masked: bool, dropout: float) -> SDPBackend:
    if device != "cuda":
        if backend in ("sdpa_efficient", "sdpa_cudnn"):
            raise ValueError(
                f"backend {backend} exists on CUDA GPUs only and this is {device}; use sdpa or math."
            )
        if dropout and backend == "sdpa_flash":
            raise ValueError(
                "backend sdpa_flash has no dropout on a CPU (model.attn_dropout); use sdpa or math."
            )
        return SDPBackend.MATH if dropout else SDPBackend.FLASH_ATTENTION
    low = dtype in (torch.bfloat16, torch.float16)
    if backend == "sdpa":
        if dtype == torch.float64:
            return SDPBackend.MATH
        return SDPBackend.FLASH_ATTENTION if low and not masked else SDPBackend.EFFICIENT_ATTENTION
    if not low and backend != "sdpa_efficient":
        raise ValueError(
            f"backend {backend} computes in 16 bits only and this is {dtype}: set trainer.precision bf16-mixed, or"
            " backend sdpa or math."
        )
    return _KERNELS[backend]


def mask_of(
    backend: str, T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None
) -> Any:
    """Who sees whom, as the backend wants it; made once for all layers with this window.

    Args:
        backend: Its name.
        T: Tokens.
        device: Where the tokens are.
        window: A token sees this many tokens, itself included; 0 for all.
        document_BT: A token sees only tokens of its own document number; None is one document a row.

    Returns:
        math: what is added to the logits, 0 or -inf, (T, T) or (B, 1, T, T). sdpa: the same as booleans, or None
        for all earlier tokens. flex: a BlockMask.
    """
    if backend == "flex":
        from .flex import flex_mask  # of torch 2.9 and later: the monitors import this file under older ones

        return flex_mask(T, device, window, document_BT)
    if backend != "math" and document_BT is None and not window:
        return None
    visible = visible_keys(T, device, window, document_BT)
    if backend != "math":
        return visible
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))


def visible_keys(T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> Tensor:
    """Which keys S a query T may see: (T, S), or (B, 1, T, S) where documents are given."""
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
) -> tuple[Tensor, Rows | None]:
    """Causal attention: `softmax(mask(cap(scale * q.k))) v`, in the dtype of its inputs.

    Args:
        q_BHTK: Queries as they enter the dot product; keys and values have the same shape and dtype, under flex
            perhaps fewer heads, which divide H.
        k_BHTK: Keys.
        v_BHTK: Values.
        mask: `mask_of` the same backend.
        scale: Factor on the dot products.
        kind: softmax, or sigmoid: each weight is `sigmoid(logit - log T)` by itself (Ramapuram et al. 2024,
            arXiv 2409.04431).
        softcap: Logits become `softcap * tanh(logit / softcap)`, before the mask (Gemma 2, arXiv 2408.00118).
        dropout: Probability of dropping a weight.
        backend: math is dense, and fp32 between the inputs and the output.

    Returns:
        out_BHTK, and the rows of a backend that has them for nothing: flex.

    Raises:
        TypeError: q, k and v are not of the one dtype that autocast computes in.
        ValueError: the backend cannot compute this, here.
    """
    check_backend(backend, softcap, kind, dropout=dropout, masked=mask is not None)
    _check_dtypes(q_BHTK, k_BHTK, v_BHTK)
    if backend == "flex":
        from .flex import flex_rows

        out_BHTK, max_BHT, lse_BHT = flex_rows(q_BHTK, k_BHTK, v_BHTK, mask, scale, softcap)
        return out_BHTK, Rows(max_BHT, lse_BHT)
    if backend != "math":
        kernel = _sdpa(backend, q_BHTK.device.type, q_BHTK.dtype, mask is not None, dropout)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout
            ), None
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q, k, v = at_least_fp32(q_BHTK), at_least_fp32(k_BHTK), at_least_fp32(v_BHTK)
        logits_BHTS = (scale * q) @ k.transpose(-1, -2)
        if softcap is not None:
            logits_BHTS = softcap * torch.tanh(logits_BHTS / softcap)
        # Adding -inf in place is one pass forward and none backward; masked_fill is one in each direction.
        logits_BHTS += mask
        if kind == "softmax":
            weight_BHTS = torch.softmax(logits_BHTS, dim=-1)
        else:
            weight_BHTS = torch.sigmoid(logits_BHTS - math.log(q.shape[-2]))
        if dropout:
            weight_BHTS = F.dropout(weight_BHTS, dropout)
        return (weight_BHTS @ v).to(v_BHTK.dtype), None


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype: {q.dtype}, {k.dtype}, {v.dtype}.")
    if q.dtype != torch.float64 and torch.is_autocast_enabled(q.device.type):
        wanted = torch.get_autocast_dtype(q.device.type)
        if q.dtype != wanted:
            raise TypeError(f"q, k and v are {q.dtype} where autocast computes in {wanted}.")
