"""Copies the parent's weights into the fork's model and keeps its function as close to the parent's as possible.

Parameters of both models are copied by name. Where the norms differ, the fork's gain is computed from the parent's
activations on the probe batch:

```
g' = f * g * rms(n(x)) / rms(n'(x))      n, n'  normalization of parent and fork (the identity if there is no norm)
                                         g, g'  gains; f  factor on q and k if the attention scales differ
```

For an added norm, g = 1 and n(x) = x, so its gain is the measured RMS (by head, if the norm has a gain for each
head). A gain without a parameter in the fork is folded into the rows of the matrix before it or the columns of the
matrix after it.

Shapes: D model width, H heads, K head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.linear import TINY, ByModality, SigmaLinear, parameter_generator
from mmqk.model.norms import L2Norm, LayerScale, Norm
from mmqk.training.fork.measure import mean_log_sums, one_copy, sizes_at_norms

SINK_MASS = 0.01  # approximate share of the attention that a new sink starts with; without a share it would not learn


@dataclass
class Carried:
    """The origin of each parameter of a fork, by parameter name.

    Attributes:
        added: Parameters that the parent does not have, with a description of their initial value.
        dropped: Parameters that the fork does not have, with a description of the parameters into which they are
            folded.
        from_name: For each parameter of the fork, the parent's parameter that it is copied from.
        scale: For each copied parameter, the factor on the parent's values, if it is not 1.
    """

    added: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    from_name: dict[str, str] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)


def tied_name(name: str) -> str:
    return re.sub(r"\.copies\.\d+", "", name)


@torch.no_grad()
def carry(old: EarlyFusionTransformer, new: EarlyFusionTransformer, batch: TokenBatch) -> Carried:
    """Fill the fork's model ``new`` from the parent's model ``old``.

    Both are in fp32 and in evaluation mode, on the device of ``batch``.
    """
    carrying = _Carrying(old, new, batch)
    carrying.by_name()
    carrying.norms()
    carrying.gates()
    if new.config.attn_sink and not old.config.attn_sink:
        carrying.sinks(mean_log_sums(old, batch))
    carrying.write()
    return carrying.account()


@torch.no_grad()
def perturb(model: nn.Module, size: float, draw: int) -> None:
    """Add noise to every weight matrix, with an RMS of ``size`` times the RMS of the matrix. ``draw`` and the
    weight's name determine the noise."""
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight not in done:
            weight = module.weight
            done.add(weight)  # change a tied matrix once
            generator = parameter_generator(draw, f"fork/{name}")
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            wide = weight.double().cpu()
            wide += noise * (size * wide.square().mean().sqrt() / noise.square().mean().sqrt())
            weight.copy_(wide)


class _Carrying:
    """Copies parameters by name (`by_name`), sets the gains of norms and collects factors of matrices (`norms`), then
    applies the factors (`write`)."""

    def __init__(self, old: EarlyFusionTransformer, new: EarlyFusionTransformer, batch: TokenBatch):
        self.old, self.new = dict(old.named_modules()), dict(new.named_modules())
        self.before, self.config = old.config, new.config
        self.old_values, self.new_values = dict(old.named_parameters()), dict(new.named_parameters())
        self.factor: dict[str, Tensor] = {}  # factor of each matrix of the fork, broadcast over the matrix
        self.done = Carried()
        self.sizes = sizes_at_norms(old, new, batch)
        # Factor on q and k that corrects for different scales of the attention logits. It is 1 unless exactly one of
        # the two models has a QK-Norm of kind l2.
        cosine = [c.qk_norm.kind == "l2" for c in (self.before, self.config)]
        ratio = self.before.attn_scale_value / self.config.attn_scale_value
        self.logit_factor = ratio**0.5 if cosine[0] != cosine[1] else 1.0

    def by_name(self) -> None:
        """Copy each parameter that the parent has with the same name (with or without ``.copies.N``) and the same
        shape."""
        for name, value in self.new_values.items():
            source = name if name in self.old_values else tied_name(name)
            if source in self.old_values and self.old_values[source].shape == value.shape:
                value.copy_(self.old_values[source])
                self.done.from_name[name] = source
        for name, fork in self.new.items():
            parent = self.old.get(name, self.old.get(tied_name(name)))
            if isinstance(fork, SigmaLinear) and isinstance(parent, SigmaLinear):
                fork.u.copy_(parent.u)
                fork.v.copy_(parent.v)
        if self.config.tie_embeddings != self.before.tie_embeddings:
            self.new["head"].weight.copy_(self.old_values["embed.weight"])
            self.done.added["head.weight"] = "a copy of embed.weight"

    def fold(self, layers: list[str], gain: Tensor, side: Literal["rows", "columns"], m: int | None = None) -> str:
        """Collect ``gain`` as a factor on rows or columns of the fork's matrices; return a description.

        The factor applies to the copy of modality ``m``, or, if ``m`` is None, to all copies of a matrix.
        """
        shape = (-1, 1) if side == "rows" else (1, -1)
        for layer in layers:
            for name in self._matrices_of(layer):
                copied = ".copies." in name
                if m is not None and (f".copies.{m}" not in name if copied else m > 0):
                    continue  # a shared matrix uses the gain of the first modality
                self.factor[name] = self.factor.get(name, torch.ones(())) * gain.reshape(shape)
        if layers == ["head"] and self.config.tie_embeddings:
            return ""
        return "into " + ", ".join(f"{layer}.weight" for layer in layers if self._matrices_of(layer))

    def _matrices_of(self, layer: str) -> list[str]:
        if layer == "head" and self.config.tie_embeddings:
            return []
        return [n for n, m in self.new.items() if isinstance(m, nn.Linear) and tied_name(n) == layer]

    def write(self) -> None:
        """Write the parent's effective matrices times the folded factors, in the fork's parameterization."""
        for name, fork in self.new.items():
            if not isinstance(fork, nn.Linear):
                continue
            parent, factor = self.old.get(name, self.old.get(tied_name(name))), self.factor.get(name)
            if parent is None:
                continue  # the matrix of a new gate
            assert isinstance(parent, nn.Linear)
            if isinstance(parent, SigmaLinear) and (not isinstance(fork, SigmaLinear) or factor is not None):
                effective = parent.gamma / parent.sigma().clamp_min(TINY)
                factor = effective.double() * (1.0 if factor is None else factor)
                if not isinstance(fork, SigmaLinear):
                    self.done.dropped[f"{tied_name(name)}.gamma"] = f"into {name}.weight"
            if factor is not None:
                fork.weight.copy_(fork.weight.double() * factor)
                if f"{name}.weight" in self.done.from_name:
                    self.rescaled(f"{name}.weight", factor)
            if isinstance(fork, SigmaLinear) and (factor is not None or not isinstance(parent, SigmaLinear)):
                fork.start()
                fork.gamma.copy_(fork.sigma())
                if not isinstance(parent, SigmaLinear):
                    self.done.added[f"{name}.gamma"] = "sigma of its matrix"

    def rescaled(self, name: str, factor: Tensor) -> None:
        before = self.done.scale.get(name)
        self.done.scale[name] = factor if before is None else before * factor

    def account(self) -> Carried:
        """Return the origin of every parameter, in the order of the models' parameters."""
        done = self.done
        for name in self.new_values.keys() - done.from_name.keys():
            done.added.setdefault(name, "its first value")
        gone = self.old_values.keys() - set(done.from_name.values()) - self.new_values.keys()
        done.added = {name: done.added[name] for name in self.new_values if name in done.added}
        done.dropped = {
            name: done.dropped.get(name) or "does not exist in the fork" for name in self.old_values if name in gone
        }
        return done

    def norms(self) -> None:
        """Carry over every norm, from the first layer to the last."""
        for layer in range(self.config.n_layers):
            block = f"blocks.{layer}"
            attention = f"{block}.attention"
            qkv = [f"{attention}.{m}" for m in ("w_q", "w_k", "w_v")]
            self._stream_norm(f"{block}.attn_pre_norm", behind=qkv)
            self._stream_norm(f"{block}.mlp_pre_norm", behind=[f"{block}.mlp.w_gate", f"{block}.mlp.w_up"])
            self._branch(f"{block}.attn", f"{attention}.w_o")
            self._branch(f"{block}.mlp", f"{block}.mlp.w_down")
            for role in "qkv":
                self._head_norm(attention, role)
        self._stream_norm("final_norm", behind=["head"])

    def gates(self) -> None:
        """Start new gates of attention at the constant 1/2 for every input, and double W_o."""
        for name, gate in self.new.items():
            if not isinstance(gate, nn.Linear) or (not name.endswith("w_g") and ".w_g.copies." not in name):
                continue
            if name in self.old or tied_name(name) in self.old:
                continue
            (gate.gamma if isinstance(gate, SigmaLinear) else gate.weight).zero_()
            self.done.added[f"{name}.weight"] = "0, and W_o is doubled"
            if not name.endswith((".0", "w_g")):
                continue  # double W_o once, not for each modality
            w_o = f"{tied_name(name).removesuffix('w_g')}w_o"
            width = self.config.n_heads * self.config.head_dim
            self.fold([w_o], torch.full((width,), 2.0, device=gate.weight.device), "columns")

    def sinks(self, log_sums_LH: Tensor) -> None:
        """Start new sinks with about `SINK_MASS` of the attention."""
        for layer, log_sum_H in enumerate(log_sums_LH):
            name = f"blocks.{layer}.attention.sink.weight"
            self.new_values[name].copy_(log_sum_H + math.log(SINK_MASS))
            self.done.added[name] = f"the mean log-sum-exp of the logits, plus log {SINK_MASS}"

    def _stream_norm(self, name: str, behind: list[str]) -> None:
        """Carry over a norm of the residual stream; ``behind`` are the matrices that read its output."""
        self._norm(name, lambda gain_HK, m: self.fold(behind, gain_HK.flatten(), "columns", m))

    def _branch(self, branch: str, matrix: str) -> None:
        """Carry over the norm and the LayerScale after the last matrix of a sublayer."""
        norm, scale = f"{branch}_post_norm", f"{branch}_layer_scale"
        parent, fork = self.old[scale], self.new[scale]
        if isinstance(fork, LayerScale) and not isinstance(parent, LayerScale):
            fork.weight.fill_(1.0)
            self.done.added[f"{scale}.weight"] = "1"

        def fold_gain(gain_HK: Tensor, m: int | None) -> str:
            normed = isinstance(one_copy(self.new[norm]), Norm)
            if not normed:
                return self.fold([matrix], gain_HK.flatten(), "rows", m)
            if isinstance(fork, LayerScale) and m is None:
                fork.weight.mul_(gain_HK.flatten())
                return f"into {scale}.weight"
            return ""

        self._norm(norm, fold_gain)
        if isinstance(parent, LayerScale) and not isinstance(fork, LayerScale):
            absorbed_by = ""
            for m, copy in _copies(self.new[norm]):
                if not isinstance(copy, Norm) or copy.weight is None:
                    absorbed_by = fold_gain(parent.weight[None].double(), m)
                    continue
                gain, prefix = copy.gain(), norm if m is None else f"{norm}.copies.{m}"
                assert gain is not None
                copy.weight.copy_(gain * parent.weight - copy.offset)
                if copy.bias is not None:
                    copy.bias.mul_(parent.weight)
                if f"{prefix}.weight" in self.done.from_name:
                    self.rescaled(f"{prefix}.weight", parent.weight)
                absorbed_by = f"into {norm}.weight"
            self.done.dropped[f"{scale}.weight"] = absorbed_by

    def _head_norm(self, attention: str, role: Literal["q", "k", "v"] | str) -> None:
        name, matrix = f"{attention}.{role}_norm", f"{attention}.w_{role}"
        after_rope = self.before.qk_norm.place == "after_rope" and role != "v"

        def fold_gain(gain_HK: Tensor, m: int | None) -> str:
            if isinstance(one_copy(self.new[name]), Norm):  # the norm would cancel the gain
                if role != "v":
                    return ""
                shared = self.config.n_heads // self.config.kv_heads
                columns = gain_HK.repeat_interleave(shared, 0).flatten()
                return self.fold([f"{attention}.w_o"], columns, "columns", m)
            if after_rope:  # only a gain that both channels of a pair share commutes with the rotation
                K = gain_HK.shape[-1]
                gain_HK = (gain_HK.square() + gain_HK.roll(K // 2, -1).square()).div(2).sqrt()
            return self.fold([matrix], gain_HK.flatten(), "rows", m)

        self._norm(name, fold_gain, factor=1.0 if role == "v" else self.logit_factor)

    def _norm(self, name: str, fold_gain: Callable[[Tensor, int | None], str], factor: float = 1.0) -> None:
        """Set the gain of a norm from the parent's gain and the measured sizes.

        If the fork has no parameter for it, ``fold_gain`` folds the gain (H, K) of a modality, or of all modalities
        (None), into another parameter, and returns a description.
        """
        parent, fork = self.old[name], self.new[name]
        first = one_copy(fork)
        cosine = isinstance(first, L2Norm) and not name.endswith("v_norm")
        if _alike(one_copy(parent), first) and factor == 1.0:
            return
        absorbed_by = ""
        for m, copy in _copies(fork):
            parent_copy = parent.copies[m] if isinstance(parent, ByModality) and m is not None else one_copy(parent)
            gain_HK = self._gain(name, parent, parent_copy, m) * factor
            prefix = name if m is None else f"{name}.copies.{m}"
            if cosine and isinstance(copy, L2Norm):
                absorbed_by = f"into {name.replace('k_norm', 'q_norm')}.weight"
                if copy.weight is not None:
                    self._start_scale(prefix, copy, m)
            elif isinstance(copy, Norm) and copy.weight is not None:
                self._start_gain(prefix, copy, gain_HK, self.sizes[name].mean("other", m), parent)
            else:
                absorbed_by = fold_gain(gain_HK, m)
            self._start_bias(prefix, copy, parent_copy)
        for parameter in self.old_values:
            if parameter.startswith(f"{name}.") and parameter not in self.done.from_name.values():
                self.done.dropped[parameter] = absorbed_by if parameter.endswith("weight") else ""

    def _gain(self, name: str, parent: nn.Module, parent_copy: nn.Module, m: int | None) -> Tensor:
        """Return the exact gain of the fork at this norm, (H, K) or (1, D): g * rms(n(x)) / rms(n'(x))."""
        sizes = self.sizes[name]
        ratio_H = (sizes.mean("plain", m) / sizes.mean("other", m).clamp_min(1e-30)).sqrt()
        shape = (len(ratio_H), self.config.head_dim if ".attention." in name else self.config.d_model)
        if m is None and isinstance(parent, ByModality):  # one gain replaces those of all modalities
            gains = [_gain_of(copy, shape) for copy in parent.copies]
            return torch.stack(gains).mean(0) * ratio_H[:, None]
        return _gain_of(parent_copy, shape).to(ratio_H.device) * ratio_H[:, None]

    def _start_gain(self, prefix: str, copy: Norm, gain_HK: Tensor, other_H: Tensor, parent: nn.Module) -> None:
        """Set the gain of a norm. If the heads share one gain, it is the average over heads, weighted with the
        measured sizes."""
        assert copy.weight is not None
        shape = copy.weight.shape
        if shape.numel() == gain_HK.numel():
            gain = gain_HK.reshape(shape)
        else:
            weighed_HK = gain_HK.square() * other_H[:, None]
            sign_K = torch.where(gain_HK.mean(0) < 0, -1.0, 1.0)
            gain = (weighed_HK.sum(0) / other_H.sum()).sqrt() * sign_K
        copy.weight.copy_(gain - copy.offset)
        if f"{prefix}.weight" not in self.done.from_name:
            had_gain = isinstance(one_copy(parent), Norm) and one_copy(parent).weight is not None
            how = "the parent's gain, scaled by measured RMS" if had_gain else "the measured RMS"
            self.done.added[f"{prefix}.weight"] = how

    def _start_scale(self, prefix: str, copy: L2Norm, m: int | None) -> None:
        """Set the learned scale of cosine attention from the measured lengths of queries and keys."""
        assert copy.weight is not None
        c, k_norm = self.config, prefix.split(".q_norm")[0] + ".k_norm"
        q_norm = k_norm.replace("k_norm", "q_norm")
        q_H, k_G = self.sizes[q_norm].mean("out", m), self.sizes[k_norm].mean("out", None)
        k_H = k_G.repeat_interleave(c.n_heads // c.kv_heads)
        scale_H = (q_H * k_H).sqrt() * c.head_dim * self.before.attn_scale_value
        scale = scale_H.mean(0, keepdim=True) if copy.weight.shape == (1,) else scale_H[:, None]
        if copy.maximum is not None:
            scale = scale.clamp_max(copy.maximum).log()
        copy.weight.copy_(scale)
        self.done.from_name.pop(f"{prefix}.weight", None)
        self.done.added[f"{prefix}.weight"] = "attn_scale times the measured lengths of q and k"

    def _start_bias(self, prefix: str, copy: nn.Module, parent_copy: nn.Module) -> None:
        bias, parent_bias = getattr(copy, "bias", None), getattr(parent_copy, "bias", None)
        if bias is None or f"{prefix}.bias" in self.done.from_name:
            return
        if parent_bias is None:
            bias.zero_()
            self.done.added[f"{prefix}.bias"] = "0"
        elif bias.ndim > parent_bias.ndim:  # the parent has one bias for all heads, the fork one per head
            bias.copy_(parent_bias.expand_as(bias))
            self.done.added[f"{prefix}.bias"] = "the parent's"
        else:
            bias.copy_(parent_bias.mean(0))
            self.done.added[f"{prefix}.bias"] = "the mean of the parent's"


def _copies(module: nn.Module) -> list[tuple[int | None, nn.Module]]:
    """Return (index of the modality, copy) for each copy of a layer; a layer without copies is its own copy, and its
    index is None."""
    return list(enumerate(module.copies)) if isinstance(module, ByModality) else [(None, module)]


def _alike(a: nn.Module, b: nn.Module) -> bool:
    """Return whether gain and bias have the same meaning in both norms; eps may differ."""
    if not (isinstance(a, Norm) and isinstance(b, Norm)):
        return not isinstance(a, Norm) and not isinstance(b, Norm)
    if type(a) is not type(b) or a.shape != b.shape or a.offset != b.offset:
        return False
    if isinstance(a, L2Norm) and isinstance(b, L2Norm) and (a.fixed, a.maximum) != (b.fixed, b.maximum):
        return False
    shapes = [[None if p is None else p.shape for p in (norm.weight, norm.bias)] for norm in (a, b)]
    return shapes[0] == shapes[1]


def _gain_of(norm: nn.Module, shape: tuple[int, int]) -> Tensor:
    gain = norm.gain() if isinstance(norm, Norm) else None
    return torch.ones(shape, dtype=torch.float64) if gain is None else gain.double().expand(shape)
