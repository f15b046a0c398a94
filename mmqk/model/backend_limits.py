"""Which attention each backend can compute. Needs no torch, so that a run is checked before torch is imported."""

from mmqk.model.ranges import refuse

# math is dense attention and flex is FlexAttention. The others are torch's scaled_dot_product_attention; sdpa uses
# the kernel that `kernel_name` returns.
BACKENDS = ("math", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
BLOCK = 128  # tokens


def check_backend(
    backend: str,
    softcap: float | None = None,
    kind: str = "softmax",
    *,
    dropout: float = 0.0,
    masked: bool = False,
    tokens: int | None = None,
    sink: bool = False,
) -> None:
    """Raise ValueError for a backend that is unknown or cannot compute this attention on any device.

    Args:
        backend: One of `BACKENDS`.
        softcap: Cap on the logits.
        kind: softmax or sigmoid.
        dropout: Probability of dropping an attention weight.
        masked: Whether a window, a document mask or a layer that separates the modalities hides earlier keys.
        tokens: Tokens per sequence; None if unknown.
        sink: Whether the softmax has a learned logit that belongs to no key.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}.")
    uneven = tokens is not None and tokens % BLOCK != 0
    refused = {
        f"cannot compute model.attention {kind}; use backend math.": backend != "math" and kind != "softmax",
        "cannot compute model.attn_sink; use backend math.": backend != "math" and sink,
        f"cannot apply model.attn_softcap {softcap}; use backend math, or flex on a GPU.":
            backend not in ("math", "flex") and softcap is not None,
        "cannot apply model.window, model.separate_first, model.separate_last or data.document_mask; use sdpa,"
        " sdpa_efficient, flex or math.": backend == "sdpa_flash" and masked,
        f"with a mask needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its"
        " backward pass has given NaN; use sdpa.": backend == "sdpa_cudnn" and masked and uneven,
        f"cannot drop attention weights (model.attn_dropout {dropout}); use sdpa or math.":
            backend == "flex" and dropout > 0,
        f"needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its backward pass has"
        " given NaN.": backend == "flex" and uneven,
    }  # fmt: skip
    refuse({f"backend {backend} {reason}": is_refused for reason, is_refused in refused.items()})
