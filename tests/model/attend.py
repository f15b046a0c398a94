"""Builds the mask of a backend and runs its attention, in one call."""

from mmqk.model import backends as kernels


def attention(q_BHTK, k_BHTK, v_BHTK, *, window=0, document_BT=None, backend="math", **options):
    mask = kernels.mask_of(backend, q_BHTK.shape[-2], q_BHTK.device, window, document_BT)
    return kernels.attention(q_BHTK, k_BHTK, v_BHTK, mask, backend=backend, **options)[0]
