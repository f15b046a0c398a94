"""Attention in plain PyTorch: the backend math, which is also the reference in the tests of all other kernels.

Shapes are in the names: B batch, T query tokens, S key tokens, H heads, K head_dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import at_least_fp32


def dense_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: Tensor,
    scale: float,
    kind: str,
    softcap: float | None,
    dropout: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Return `softmax(mask(cap(scale * q.k))) v` from all T x T logits, or with sigmoid instead of softmax.

    `sink_H` adds `exp(sink)` to the denominator of each row of the softmax.

    The arguments are those of `mmqk.model.backends.attention`. The computation is in at least fp32; the output has
    the dtype of the values.
    """
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
        return (weight_BHTS @ v).to(v_BHTK.dtype)
