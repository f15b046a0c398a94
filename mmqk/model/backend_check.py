"""The names of the attention backends, and the kinds of attention that each can compute. Needs no torch."""

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
    if backend == "math":
        return
    if kind != "softmax":
        raise ValueError(f"backend {backend} cannot compute model.attention {kind}; use backend math.")
    if sink:
        raise ValueError(f"backend {backend} cannot compute model.attn_sink; use backend math.")
    if backend != "flex":
        if softcap is not None:
            raise ValueError(
                f"backend {backend} cannot apply model.attn_softcap {softcap}; use backend math, or flex on a GPU."
            )
        if backend == "sdpa_flash" and masked:
            raise ValueError(
                "backend sdpa_flash cannot apply model.window, model.separate_first, model.separate_last or"
                " data.document_mask; use sdpa, sdpa_efficient, flex or math."
            )
        if backend == "sdpa_cudnn" and masked and tokens is not None and tokens % BLOCK:
            raise ValueError(
                f"backend sdpa_cudnn with a mask needs data.seq_len to be a multiple of {BLOCK}, but it is"
                f" {tokens}: at other lengths its backward pass has given NaN; use sdpa."
            )
        return
    if dropout:
        raise ValueError(
            f"backend flex cannot drop attention weights (model.attn_dropout {dropout}); use sdpa or math."
        )
    if tokens is not None and tokens % BLOCK:
        raise ValueError(
            f"backend flex needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its"
            " backward pass has given NaN."
        )
