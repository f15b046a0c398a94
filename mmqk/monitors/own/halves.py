"""Measures how well the gradients of the modalities agree, from separate passes over the two halves of a batch.

Shapes: M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.distributed import rank, summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import evaluation_mode
from mmqk.monitors.formulas.gradients import Gradients, HalfProducts, half_products
from mmqk.monitors.formulas.reduce import selection
from mmqk.store.tags import tag

# Returns the part of a batch's loss from each modality's targets, (M,), divided by the batch's `step_targets`.
LossParts = Callable[[TokenBatch], Tensor]


def gradient_agreement(model: EarlyFusionTransformer, batch: TokenBatch, loss_parts: LossParts) -> dict[str, float]:
    """Return, by tag, the cosine, signal and noise of the modalities' gradients by layer and over all parameters.

    The halves are the even and the odd sequences, numbered over all ranks; every rank has a batch of equal size. The
    call runs in evaluation mode (so without dropout), does not write ``.grad``, and is collective with several ranks.
    It costs a forward pass for each half, and for each half and modality a backward pass and the memory of all
    gradients.

    A modality without a target in one of the halves is left out, and so is a cosine that is NaN
    (`HalfProducts.cosine`).

    Args:
        model: its parameters ``blocks.N...`` belong to layer N.
        batch: has at least 2 sequences.
        loss_parts: returns the loss of each modality's targets, computed with ``model`` as in training.

    Raises:
        ValueError: the batch has one sequence.
    """
    if len(batch.ids_BT) < 2:
        raise ValueError("monitor.gradient_agreement needs two sequences in a micro-batch: raise data.batch_size.")
    names = model.config.modalities
    before = rank() * len(batch.ids_BT)  # number of sequences on the ranks before this one
    halves = [_half(batch, (before + start) % 2) for start in (0, 1)]
    counts_2M = [
        summed(selection(half.target_modality_BT, half.target_mask_BT, len(names)).sum((1, 2))) for half in halves
    ]
    present = (torch.stack(counts_2M) > 0).all(0).nonzero()[:, 0].tolist()
    if not present:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with evaluation_mode(model):
        gradients = [  # by half, then modality
            _gradients(loss_parts(replace(half, step_targets=count_M.sum())), present, [p for _, p in parameters])
            for half, count_M in zip(halves, counts_2M, strict=True)
        ]
    groups: dict[int | None, list[int]] = {}
    for i, (name, _) in enumerate(parameters):
        groups.setdefault(_layer(name), []).append(i)
    products = {
        layer: half_products(
            [tuple([half[m][i] for i in group] for half in gradients) for m in range(len(present))]  # type: ignore[misc]
        )
        for layer, group in groups.items()
    }
    return _by_tag(products, [names[m] for m in present])


def _half(batch: TokenBatch, start: int) -> TokenBatch:
    return batch._map(lambda t: t[start::2] if t.ndim else t)


def _gradients(parts_M: Tensor, present: list[int], parameters: list[Tensor]) -> list[Gradients]:
    gradients: list[Gradients] = []
    for m in present:
        of_modality = torch.autograd.grad(
            parts_M[m], parameters, retain_graph=m != present[-1], materialize_grads=True
        )
        gradients.append([summed(g) for g in of_modality])
    return gradients


def _layer(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.split(".")[0]) if first == "blocks" else None


def _by_tag(products: dict[int | None, HalfProducts], names: list[str]) -> dict[str, float]:
    """Return the agreement of each layer and, without a layer in the tag, of all parameters."""
    total = sum(list(products.values())[1:], next(iter(products.values())))
    groups = {layer: product for layer, product in products.items() if layer is not None} | {None: total}
    by_tag: dict[str, Tensor] = {}
    for layer, product in groups.items():
        for statistic, values in (("grad_signal", product.signal), ("grad_noise", product.noise)):
            by_tag |= {tag(statistic, name, layer=layer): values[m] for m, name in enumerate(names)}
        cosine_MM = product.cosine
        for (m, name), (n, other) in combinations(enumerate(names), 2):
            by_tag[tag("grad_agreement", name, other, layer=layer)] = cosine_MM[m, n]
    numbers = dict(zip(by_tag, torch.stack([*by_tag.values()]).tolist(), strict=True))  # one transfer
    return {t: x for t, x in numbers.items() if not (t.startswith("grad_agreement") and math.isnan(x))}
