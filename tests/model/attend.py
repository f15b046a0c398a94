"""Builds the mask of a backend and runs its attention, in one call; and a stand-in for the kernel of flex."""

import math

from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from mmqk.model import backends as kernels


def attention(q_BHTK, k_BHTK, v_BHTK, *, window=0, document_BT=None, backend="math", **options):
    mask = kernels.mask_of(backend, q_BHTK.shape[-2], q_BHTK.device, window, document_BT)
    return kernels.attention(q_BHTK, k_BHTK, v_BHTK, mask, backend=backend, **options)[0]


def dense_flex(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux):
    """Compute `flex_attention` with torch's dense operations. On a CPU its kernel has neither row statistics nor
    gradients."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert return_aux == AuxRequest(lse=True, max_scores=True)
    score_mod = score_mod or (lambda score, b, h, query, key: score)
    out, lse, largest = math_attention(q, k, v, score_mod, block_mask.as_tuple(), scale, {})
    base_2 = math.log(2)
    return out, AuxOutput(lse=base_2 * lse, max_scores=base_2 * largest)
