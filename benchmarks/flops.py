"""How many floating-point operations a training step must do, and what share of the chip's peak that is (MFU).

A forward pass of one token is 2 operations for each weight of a matrix that it goes through (blocks and head; the
embedding is a look-up) and, in each layer, `4 * heads * head width` for each key that its query sees: q.k and the sum
over the values. Causal attention counts the visible keys alone, (T + 1) / 2 of T on average. The backward pass is
twice the forward. Norms, softmax, loss and optimizer are not counted, nor what is computed twice to save memory.
"""

from __future__ import annotations

from mmqk.model import ModelConfig

# Dense bf16 operations a second, by a word of the device's name: NVIDIA's data sheets, without sparsity. An H200 is
# an H100 with other memory.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}


def matrix_weights(c: ModelConfig) -> int:
    """Weights that a token is multiplied with: those of the blocks' matrices and of the head, tied or not."""
    D, queries, keys = c.d_model, c.n_heads * c.head_dim, c.kv_heads * c.head_dim
    attention = D * queries + 2 * D * keys + queries * D
    mlp = (2 if c.mlp == "gelu" else 3) * D * c.mlp_width
    return c.n_layers * (attention + mlp) + D * c.vocab_size


def seen_keys(T: int, window: int = 0) -> int:
    """Pairs of a query and a key that it sees, in one causal sequence of T tokens."""
    w = min(window or T, T)
    return w * (w + 1) // 2 + (T - w) * w


def step_flops(c: ModelConfig, sequences: int, T: int) -> float:
    """Operations of one training step, forward and backward, of so many sequences of T tokens."""
    pairs = sum(seen_keys(T, c.window_of(layer)) for layer in range(c.n_layers))
    forward = 2 * matrix_weights(c) * T + 4 * c.n_heads * c.head_dim * pairs
    return 3.0 * sequences * forward


def peak_flops(device: str) -> float | None:
    """Of a device by its name; None where nobody has said it."""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in device), None)
