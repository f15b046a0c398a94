"""The forward pass of the model, written with other operations, as the reference for the tests of the model.

It processes one sequence: one head at a time in attention, and one token at a time elsewhere. It uses the state dict
of a model and shares no code with the model.
"""

import math

import torch
import torch.nn.functional as F


def capped(x, cap):
    """Return `cap * tanh(x / cap)`, or x without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def rope_angles(T, c, local):
    """Return the RoPE angle of every position and channel pair, with the frequency scaling of the configuration."""
    half = c.head_dim // 2
    theta = c.local_rope_theta if local and c.local_rope_theta else c.rope_theta
    frequencies = []
    for pair in range(half):
        frequency, s = theta ** (-pair / half), c.rope_scaling
        wavelength = 2 * math.pi / frequency
        if (local and c.local_rope_theta) or s.kind == "none":
            pass
        elif s.kind == "linear" or wavelength > s.original_length / s.low_freq_factor:
            frequency = frequency / s.factor
        elif wavelength > s.original_length / s.high_freq_factor:
            smooth = (s.original_length / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        frequencies.append(frequency)
    return torch.arange(T)[:, None] * torch.tensor(frequencies, dtype=torch.float64)


class WrittenOut:
    """`WrittenOut(state, config)(ids_T)` returns the logits (T, V) of one sequence.

    Args:
        state: Parameters and buffers by name; fp64 gives more accurate logits.
        config: The `ModelConfig` of the model.
        modalities: Modality number of each token; by default computed from the ids.
    """

    def __init__(self, state, config, modalities=None):
        self.state, self.c, self.modalities = state, config, modalities

    def __call__(self, ids_T):
        c, ids = self.c, ids_T.tolist()
        ends = [sum(list(c.vocab_sizes.values())[: m + 1]) for m in range(len(c.vocab_sizes))]
        self.m = self.modalities or [next(m for m, end in enumerate(ends) if i < end) for i in ids]
        root = math.sqrt(c.d_model) if c.embed_sqrt_d else 1.0
        factor = [root * c.embed_scale.get(list(c.vocab_sizes)[m], 1.0) for m in self.m]
        x = [factor[t] * self.state["embed.weight"][i] for t, i in enumerate(ids)]
        self.place, self.T = list(range(len(ids))), len(ids)
        for layer in range(c.n_layers):
            ends = layer < c.separate_first or layer >= c.n_layers - c.separate_last
            x = (self.stacks if ends else self.block)(f"blocks.{layer}", layer, x)
        head = self.state["embed.weight" if c.tie_embeddings else "head.weight"]
        return torch.stack([capped(head @ self.norm("final_norm", y, t), c.final_softcap) for t, y in enumerate(x)])

    def stacks(self, at, layer, x):
        """Compute a separated layer: for each modality, a layer with that modality's weights over its tokens only."""
        out = list(x)
        for m in set(self.m):
            mine = [t for t in range(len(x)) if self.m[t] == m]
            state = {n.replace(f".copies.{m}.", "."): w for n, w in self.state.items() if f".copies.{m}." in n}
            alone = WrittenOut(self.state | state, self.c)
            alone.m, alone.place, alone.T = [None] * len(mine), mine, self.T
            for t, y in zip(mine, alone.block(at, layer, [x[t] for t in mine]), strict=True):
                out[t] = y
        return out

    def get(self, module, leaf, t):
        """Return the parameter for token t (the copy of its modality if there are copies), or None."""
        own = f"{module}.copies.{self.m[t]}.{leaf}"
        return self.state.get(own, self.state.get(f"{module}.{leaf}"))

    def matrix(self, module, x, t, inner=""):
        weight = self.get(module, inner + "weight", t)
        if self.c.weight_reparam == "sigma":
            u, v, gamma = (self.get(module, inner + leaf, t) for leaf in ("u", "v", "gamma"))
            weight = gamma * weight / torch.einsum("i,ij,j", u, weight, v)
        return weight @ x

    def affine(self, module, y, t, gain):
        weight, bias = self.get(module, "weight", t), self.get(module, "bias", t)
        if weight is not None:
            y = y * (1 + weight if gain == "zero_centered" else weight)
        return y if bias is None else y + bias

    def norm(self, module, x, t):
        """Apply a norm of the residual stream; return x if the configuration has no norm in this place."""
        c, kind = self.c, module.split("_")[-2]
        if (kind == "pre" and not c.pre_norm) or (kind == "post" and not c.post_norm):
            return x
        if kind == ("final" if c.deep_norm else "deep"):
            return x
        normalized = F.layer_norm if c.norm == "layer" else F.rms_norm
        return self.affine(module, normalized(x, x.shape, eps=c.norm_eps), t, c.norm_gain)

    def qk_norm(self, module, x_HK, t):
        """Return the normalized queries (or keys, values) of one token."""
        qk, role = self.c.qk_norm, module[-6]
        if qk.kind == "none" or (role == "v" and not qk.normalize_v):
            return x_HK
        if qk.kind == "l2":
            y = F.normalize(x_HK, dim=-1, eps=qk.eps)
            if role != "q":
                return y
            if qk.gain == "none":
                return qk.scale_init * y
            scale = self.get(module, "weight", t)
            return y * (scale if qk.scale_max is None else scale.exp().clamp(max=qk.scale_max))
        shape = x_HK.shape if qk.scope == "full" else x_HK.shape[-1:]
        y = (F.layer_norm if qk.kind == "layer" else F.rms_norm)(x_HK, shape, eps=qk.eps)
        return self.affine(module, y, t, qk.gain)

    def rotate(self, x_HK, angle_P):
        half = x_HK.shape[1] // 2
        turned = torch.complex(x_HK[:, :half], x_HK[:, half:]) * torch.exp(1j * angle_P)
        return torch.cat((turned.real, turned.imag), -1)

    def attention(self, at, layer, x):
        c, T = self.c, len(x)
        heads = c.n_heads // (c.n_kv_heads or c.n_heads)
        everything = c.window == 0 or (c.global_every and (layer + 1) % c.global_every == 0)
        angle_TP = rope_angles(self.T, c, local=not everything)[self.place]
        q, k, v = ([self.matrix(f"{at}.w_{n}", y, t).view(-1, c.head_dim) for t, y in enumerate(x)] for n in "qkv")
        v = [self.qk_norm(f"{at}.v_norm", y, t) for t, y in enumerate(v)]
        for n, rows in (("q", q), ("k", k)):
            for t in range(T):
                if c.qk_norm.place == "before_rope":
                    rows[t] = self.rotate(self.qk_norm(f"{at}.{n}_norm", rows[t], t), angle_TP[t])
                else:
                    rows[t] = self.qk_norm(f"{at}.{n}_norm", self.rotate(rows[t], angle_TP[t]), t)
        scale = 1.0
        if c.qk_norm.kind != "l2" and c.attn_scale != "none":
            scale = {"rsqrt": c.head_dim**-0.5, "inverse": 1 / c.head_dim}.get(c.attn_scale) or c.attn_scale
        out = []
        for t in range(T):
            seen = [s for s in range(t + 1) if everything or self.place[t] - self.place[s] < c.window]
            mixed = []
            for h in range(c.n_heads):
                logits = capped(scale * torch.stack([q[t][h] @ k[s][h // heads] for s in seen]), c.attn_softcap)
                weights = torch.softmax(logits, 0)
                if c.attention == "sigmoid":
                    weights = 1 / (1 + self.T * torch.exp(-logits))
                mixed.append(sum(weights[i] * v[s][h // heads] for i, s in enumerate(seen)))
            out.append(self.matrix(f"{at}.w_o", torch.cat(mixed), t))
        return out

    def mlp(self, at, x, t):
        up = self.matrix(at, x, t, "w_up.")
        if self.c.mlp == "gelu":
            return self.matrix(at, up * 0.5 * (1 + torch.erf(up / math.sqrt(2))), t, "w_down.")
        gate = self.matrix(at, x, t, "w_gate.")
        gate = gate * torch.sigmoid(gate) if self.c.mlp == "swiglu" else F.gelu(gate, approximate="tanh")
        return self.matrix(at, gate * up, t, "w_down.")

    def block(self, at, layer, x):
        """Compute one layer for a list of tokens."""

        def branch(name, y, t):
            y = self.norm(f"{at}.{name}_post_norm", y, t)
            return y if self.c.layer_scale is None else y * self.get(f"{at}.{name}_layer_scale", "weight", t)

        def add(name, y, out, t):
            alpha = math.sqrt(math.sqrt(2 * self.c.n_layers)) if self.c.deep_norm else 1
            return self.norm(f"{at}.{name}_deep_norm", alpha * y + branch(name, out, t), t)

        normed = [self.norm(f"{at}.attn_pre_norm", y, t) for t, y in enumerate(x)]
        out = self.attention(f"{at}.attention", layer, normed)
        x = [add("attn", y, out[t], t) for t, y in enumerate(x)]
        out = [self.mlp(f"{at}.mlp", self.norm(f"{at}.mlp_pre_norm", y, t), t) for t, y in enumerate(x)]
        return [add("mlp", y, out[t], t) for t, y in enumerate(x)]
