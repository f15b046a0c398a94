"""FlexAttention: causal and document masks, windows, a cap on the logits and grouped queries in one compiled kernel.

Shapes are in the names: B batch, T tokens, H heads, G key and value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from .dynamo import allow_many_graphs

# The raw logit recovered from a capped fp32 logit has a relative error of at most 1/1000 up to 6 times the cap, and
# of at most 1/40 up to 8 times the cap. From about 9 times the cap, tanh rounds to 1.
SATURATED = 8.0


def flex_rows(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of attention and the softmax statistics of each row.

    Returns:
        out_BHTK; max_BHT, the largest raw logit of each row (fp32, after the scale and before the cap; recovered
        from the capped logit, see `SATURATED`); lse_BHT, the log-sum-exp of the row's capped logits (fp32). The last
        two have no gradient.
    """
    # In a compiled block, flex_attention is part of the block's graph; otherwise it is compiled separately.
    fused: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out_BHTK, aux = fused(
        q_BHTK,
        k_BGTK,
        v_BGTK,
        score_mod=None if softcap is None else cap(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    assert aux.max_scores is not None and aux.lse is not None
    return out_BHTK, uncapped(aux.max_scores.detach(), softcap), aux.lse.detach()


def uncapped(capped: Tensor, softcap: float | None) -> Tensor:
    """Recover the raw logit from a capped logit; the result is at most `SATURATED` times the cap."""
    if softcap is None:
        return capped
    # The kernel computes in base 2, so rounding may give a value just above the cap.
    return softcap * torch.atanh((capped / softcap).clamp(-1.0, 1.0)).clamp(-SATURATED, SATURATED)


def cap(softcap: float) -> Callable[..., Tensor]:
    """Return a function that computes `softcap * tanh(logit / softcap)`, for `flex_attention`."""

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def flex_mask(T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> BlockMask:
    """Return the attention mask, with the blocks of 128 x 128 tokens that the kernel may skip."""
    if document_BT is None:
        return _same_for_all(T, device, window)
    causal = sees(window)

    def of_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(b, h, query, key) & (document_BT[b, query] == document_BT[b, key])

    return create_block_mask(of_document, len(document_BT), None, T, T, device)


@lru_cache(maxsize=16)
def _same_for_all(T: int, device: torch.device, window: int) -> BlockMask:
    with torch.inference_mode(False):  # training reuses masks that validation creates in inference mode
        return create_block_mask(sees(window), None, None, T, T, device)


@cache
def sees(window: int) -> Callable[..., Tensor]:
    """Return a mask function: a query attends to itself and all earlier tokens, or to the last `window` of these."""

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return near if window else causal


@cache
def _compiled() -> Callable[..., tuple[Tensor, AuxOutput]]:
    # Uncompiled, or after too many recompilations, flex_attention would compute all T x T logits.
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
