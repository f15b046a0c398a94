"""Measures the spectral entropy of the change of W_q W_k^T from one probe to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from mmqk.model import EarlyFusionTransformer
from mmqk.monitors.formulas.weights import product_change_entropy
from mmqk.monitors.probe import block_matrices
from mmqk.monitors.record import Probe
from mmqk.store.tags import tag


class ProductChange:
    """Measures `product_change_entropy` of every layer since the previous call; the first call measures nothing.

    It stores a copy of every W_q and W_k. Under σReparam these are the raw weights; gains of QK-Norm are left out. If
    the modalities have their own W_q and W_k, each modality has its own entropy.

    Attributes:
        earlier: the weights at the previous call, by name.
    """

    def __init__(self, earlier: dict[str, Tensor] | None = None) -> None:
        self.earlier = earlier or {}

    @torch.no_grad()
    def measure(self, model: EarlyFusionTransformer) -> Probe:
        """Return a probe with the entropies since the previous call."""
        probe, head_dim = Probe(sequences=0), model.config.head_dim
        weights = {
            tag(name, *modality, layer=layer): weight.detach().unflatten(0, (-1, head_dim))
            for name, modality, layer, weight in block_matrices(model)
            if name in ("w_q", "w_k")
        }
        for name, q_HKD in weights.items():
            place = name.removeprefix("w_q/")
            if place == name or name not in self.earlier:
                continue
            k = f"w_k/{place}"
            earlier_q, earlier_k = (self.earlier[n].to(q_HKD.device) for n in (name, k))
            entropy = product_change_entropy(q_HKD, weights[k], earlier_q, earlier_k)
            probe.add_means([f"qk_change_entropy/{place}"], entropy)
        self.earlier = {name: weight.clone() for name, weight in weights.items()}
        return probe
