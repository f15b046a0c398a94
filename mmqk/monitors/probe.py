"""The probe: one separate fp32 forward of the present weights, and every statistic of it.

It never touches training: no gradient, no random number, no buffer, and the model's mode is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.norms import Norm
from mmqk.model.transformer import Block
from mmqk.monitors.attention import attention_statistics, visible_pairs
from mmqk.monitors.reduce import moments, selection
from mmqk.store.tags import tag

# Site of the forward -> name of its statistic: the mean L2 norm over tokens (and heads), and its maximum.
NORMS = {
    "q_raw": "q_raw_norm",
    "k_raw": "k_raw_norm",
    "q": "q_norm",
    "k": "k_norm",
    "v": "v_norm",
    "attn_out": "attn_out_norm",
    "mlp_out": "mlp_out_norm",
    "resid": "resid_norm",
}


@dataclass
class Probe:
    """Statistics of one batch, still on the device.

    Attributes:
        sequences: how many sequences were looked at; maxima are exact over these.
        tags: a tag for each statistic.
        values: the statistics, one number each, in the order of the tags.
        counts: tokens or pairs behind each; 0 for an absent modality, which `flat` leaves out.
    """

    sequences: int
    tags: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, name: str, value: Tensor, count: Tensor) -> None:
        self.tags.append(name)
        self.values.append(value.float())
        self.counts.append(count.float())

    def flat(self) -> dict[str, float]:
        """``{tag: number}``, in one transfer to the host."""
        values, counts = torch.stack([torch.stack(self.values), torch.stack(self.counts)]).tolist()
        return {t: v for t, v, n in zip(self.tags, values, counts, strict=True) if n}


def probe(model: EarlyFusionTransformer, batch: TokenBatch) -> Probe:
    """Norms, raw attention logits and attention entropy of ``batch``, by layer and modality.

    The modality is that of the token at the site (the input token); logits are by query and key modality.
    The statistics: ``q_raw_norm`` and ``k_raw_norm`` before QK-Norm, ``q_norm`` and
    ``k_norm`` as they enter the dot product, ``v_norm`` (outside the logit product: the control series),
    ``attn_out_norm`` and ``mlp_out_norm`` as added to the residual stream, ``resid_norm`` after the layer,
    ``final_norm`` and ``final_rms`` of the last layer's output before the final norm (Chameleon, Fig. 5a,
    which does not say whether L2 or RMS, mean or maximum), ``attn_logit_max``, ``attn_logit_absmax``,
    ``attn_logit_p999``, ``attn_entropy`` (nats; of softmax attention alone) and, with QK-Norm,
    ``attn_logit_bound``.
    """
    names = model.config.modalities
    M = len(names)
    selected_MBT = selection(batch.modality_BT, batch.valid_BT, M)
    windows = {model.config.window_of(layer) for layer in range(model.config.n_layers)}
    visible = {w: visible_pairs(batch.valid_BT, batch.document_BT, w) for w in windows}
    result = Probe(sequences=len(batch.ids_BT))
    pending: dict[str, Tensor] = {}

    def sink(site: str, layer: int, tensor: Tensor) -> None:
        if site in NORMS:
            found = moments(tensor.float().norm(dim=-1), selected_MBT)
            for m, name in enumerate(names):
                result.add(tag(NORMS[site], name, layer=layer), found.mean[m], found.count[m])
                result.add(tag(NORMS[site] + "_max", name, layer=layer), found.max[m], found.count[m])
        if site == "q":
            pending["q"] = tensor
        elif site == "k":
            attention = attention_statistics(
                pending.pop("q"),
                tensor,
                model.attn_scale_value,
                batch.modality_BT,
                visible[model.config.window_of(layer)],
                M,
                model.config.attn_softcap,
            )
            for a, query in enumerate(names):
                for b, key in enumerate(names):
                    n = attention.count[a, b]
                    result.add(tag("attn_logit_max", query, key, layer=layer), attention.max[a, b], n)
                    result.add(tag("attn_logit_absmax", query, key, layer=layer), attention.absmax[a, b], n)
                    result.add(tag("attn_logit_p999", query, key, layer=layer), attention.p999[a, b], n)
                if model.config.attention != "softmax":
                    continue  # weights that do not add up to 1 have no entropy
                entropy = attention.entropy
                result.add(tag("attn_entropy", query, layer=layer), entropy.mean[a], entropy.count[a])
        elif site == "final":
            l2 = moments(tensor.float().norm(dim=-1), selected_MBT)
            for m, name in enumerate(names):
                result.add(tag("final_norm", name), l2.mean[m], l2.count[m])
                result.add(tag("final_rms", name), l2.mean[m] / tensor.shape[-1] ** 0.5, l2.count[m])

    _forward(model, batch, sink)
    if model.config.qk_norm.kind != "none":
        one = torch.ones((), device=batch.ids_BT.device)
        for layer in range(model.config.n_layers):
            result.add(tag("attn_logit_bound", layer=layer), logit_bound(model, layer).to(one.device), one)
    return result


@torch.no_grad()
def logit_bound(model: EarlyFusionTransformer, layer: int) -> Tensor:
    """What no attention logit of this layer can exceed under QK-Norm, whatever the input.

    The scale times the greatest length of a query times that of a key (`Norm.longest`): with RMS over a head and
    gains g, ``|g_q|_max |g_k|_max sqrt(head_dim)`` at the usual scale. RoPE keeps lengths.
    """
    attention = cast(Block, model.blocks[layer]).attention

    def longest(norm: nn.Module) -> Tensor:
        return torch.stack([m.longest() for m in norm.modules() if isinstance(m, Norm)]).max()

    return model.attn_scale_value * longest(attention.q_norm) * longest(attention.k_norm)


def _forward(
    model: EarlyFusionTransformer, batch: TokenBatch, sink: Callable[[str, int, Tensor], None]
) -> None:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(batch.ids_BT.device.type, enabled=False):
            model(batch.ids_BT, batch.modality_BT, batch.document_BT, sink=sink)
    finally:
        model.train(was_training)
