"""Copies the parameters that parent and fork share by name, and folds gains into the matrices of the fork."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from mmqk.model import EarlyFusionTransformer
from mmqk.model.linear import TINY, SigmaLinear


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


class Matrices:
    """Copies parameters by name (`by_name`), collects factors of matrices (`fold`), then applies the factors
    (`write`).

    Args:
        old: The parent's model.
        new: The fork's model, whose parameters are overwritten.
    """

    def __init__(self, old: EarlyFusionTransformer, new: EarlyFusionTransformer):
        self.old, self.new = dict(old.named_modules()), dict(new.named_modules())
        self.before, self.config = old.config, new.config
        self.old_values, self.new_values = dict(old.named_parameters()), dict(new.named_parameters())
        self.factor: dict[str, Tensor] = {}  # factor of each matrix of the fork, broadcast over the matrix
        self.done = Carried()

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

    def fold(
        self, layers: list[str], gain: Tensor, side: Literal["rows", "columns"], m: int | None = None
    ) -> str:
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
            parent, factor = self.old[name if name in self.old else tied_name(name)], self.factor.get(name)
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
            name: done.dropped.get(name) or "does not exist in the fork"
            for name in self.old_values
            if name in gone
        }
        return done
