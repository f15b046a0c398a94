"""Floating-point operations of a training step, for the model FLOPs utilization (MFU).

MFU is the number of these operations per second, divided by the peak of the device.

A forward pass of one token takes 2 operations for each weight of the matrices in blocks and head (the embedding is a
look-up) and, in each layer, `4 * heads * head_dim` for each key that the token's query sees: q.k and the sum over the
values. With a causal mask, a query sees (T + 1) / 2 of the T keys on average. The backward pass takes twice as many
operations as the forward pass. Norms, softmax, loss and optimizer are not counted, and neither are recomputed
activations.
"""

from __future__ import annotations

from mmqk.model import ModelConfig

# Peak dense bf16 operations per second (without sparsity), from NVIDIA's data sheets. Each key is a word in the name
# of the device. An H200 differs from an H100 only in its memory.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}


def matrix_weights(c: ModelConfig) -> int:
    """Return the number of weights in the matrices of the blocks and in the head, tied or not."""
    D, queries, keys = c.d_model, c.n_heads * c.head_dim, c.kv_heads * c.head_dim
    attention = D * queries + 2 * D * keys + queries * D
    mlp = (2 if c.mlp == "gelu" else 3) * D * c.mlp_width
    return c.n_layers * (attention + mlp) + D * c.vocab_size


def seen_keys(T: int, window: int = 0) -> int:
    """Return the number of visible pairs of query and key in one causal sequence of T tokens."""
    w = min(window or T, T)
    return w * (w + 1) // 2 + (T - w) * w


def step_flops(c: ModelConfig, sequences: int, T: int) -> float:
    """Return the operations of one training step, forward and backward, on sequences of T tokens."""
    pairs = sum(seen_keys(T, c.window_of(layer)) for layer in range(c.n_layers))
    forward = 2 * matrix_weights(c) * T + 4 * c.n_heads * c.head_dim * pairs
    return 3.0 * sequences * forward


def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a device, by its name; None if unknown."""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in device), None)
