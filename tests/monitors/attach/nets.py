"""Defines small models in plain PyTorch, without mmqk, that call attention in several ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

V, D, H, L = 40, 32, 4, 3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def alibi(T: int) -> Tensor:
    """Return an ALiBi bias of shape (H, T, T), which decreases with the distance to the key."""
    t = torch.arange(T)
    return -SLOPES[:, None, None] * (t[:, None] - t).abs()


class SelfAttention(nn.Module):
    """Computes attention in the way that ``call`` names. If ``keep`` is a list, each forward appends (q, k) to it."""

    def __init__(self, call: str = "sdpa", kv_heads: int = H):
        super().__init__()
        self.call, self.kv_heads = call, kv_heads
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = (nn.Linear(D, D // H * kv_heads) for _ in range(2))
        self.keep: list | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.keep is not None:
            self.keep.append((q.detach(), k.detach()))
        T, call = x.shape[1], self.call
        if call == "sdpa":
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=0.5, enable_gqa=self.kv_heads != H
            )
        elif call == "full":
            out = torch.ops.aten.scaled_dot_product_attention(q, k, v)
        elif call == "alibi":
            bias = alibi(T).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, bias)
        elif call == "flat":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (-1, H))
        elif call == "by head":
            keep = torch.rand(H, T, T, generator=torch.Generator().manual_seed(0)) < 0.8
            out = F.scaled_dot_product_attention(q, k, v, keep | torch.eye(T, dtype=torch.bool))
        elif call == "flex":
            blocks = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T, device="cpu")
            out = flex_attention(
                q, k, v, lambda z, b, h, t, s: z - SLOPES[h] * (t - s), blocks, enable_gqa=self.kv_heads != H
            )
        else:  # "by hand": matmul and softmax; "by log": with log_softmax, which is not measured
            z = q @ k.transpose(-1, -2) * (D // H) ** -0.5
            z = z.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
            out = (z.softmax(-1) if call == "by hand" else z.log_softmax(-1).exp()) @ v
        return self.out(out.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """Wraps `nn.MultiheadAttention`, with or without returned weights."""

    def __init__(self, weights: bool):
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(D, H, batch_first=True), weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=hidden, need_weights=self.weights)[0]


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), attention
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Net(nn.Module):
    """A small transformer that maps ids to logits."""

    def __init__(self, calls: str | list[str] = "sdpa", seed: int = 0, dropout: float = 0.0, kv_heads: int = H):
        super().__init__()
        torch.manual_seed(seed)
        calls = [calls] * L if isinstance(calls, str) else calls
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList(Layer(self._attention(call, kv_heads), dropout) for call in calls)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if "attention" in name and name.endswith("weight"):
                    p.mul_(4)

    def _attention(self, call: str, kv_heads: int) -> nn.Module:
        return TorchAttention(call == "torch weights") if call.startswith("torch") else SelfAttention(call, kv_heads)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def batches(n: int, B: int = 6, T: int = 16, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (B, T), generator=random) for _ in range(n)]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
