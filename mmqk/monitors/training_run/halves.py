"""Agreement between the modalities' gradients, from two forwards over disjoint halves of a batch. M modalities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.distributed import rank, summed
from mmqk.model import EarlyFusionTransformer
from mmqk.monitors.measures.agreement import Agreement, Gradients, HalfProducts, half_products
from mmqk.store.tags import tag

# Part of each modality's targets in the loss of a batch, (M,), divided by the batch's `step_targets`.
LossParts = Callable[[TokenBatch], Tensor]


def gradient_agreement(
    model: EarlyFusionTransformer, batch: TokenBatch, loss_parts: LossParts
) -> dict[str, float]:
    """Cosine, signal and noise of the modalities' gradients by layer and over all parameters, as tags.

    The halves are the even and the odd sequences of all ranks together, whose batches have one size. Training is
    not changed: evaluation mode (so no dropout), no gradient in ``.grad``. It is a collective call on several ranks.
    It costs two forwards and a backward pass for each half and modality, and stores as many gradients of every
    parameter.

    A modality without a target in one of the halves is left out, and so is a cosine that is NaN (`Agreement.cosine`).

    Args:
        model: its parameters of ``blocks.N`` are layer N.
        batch: at least 2 sequences.
        loss_parts: runs ``model`` as in training.

    Raises:
        ValueError: the batch has one sequence.
    """
    if len(batch.ids_BT) < 2:
        raise ValueError(
            "monitor.gradient_agreement needs two sequences in a micro-batch: raise data.batch_size."
        )
    names = model.config.modalities
    before = rank() * len(batch.ids_BT)  # sequences of the ranks before this one
    halves = [_half(batch, (before + start) % 2) for start in (0, 1)]
    counts_2M = [summed(_targets(half, len(names))) for half in halves]
    present = (torch.stack(counts_2M) > 0).all(0).nonzero()[:, 0].tolist()
    if not present:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    training = model.training
    model.eval()
    try:
        gradients = [  # by half, then modality
            _gradients(
                loss_parts(replace(half, step_targets=count_M.sum())), present, [p for _, p in parameters]
            )
            for half, count_M in zip(halves, counts_2M, strict=True)
        ]
    finally:
        model.train(training)
    groups: dict[int | None, list[int]] = {}
    for i, (name, _) in enumerate(parameters):
        groups.setdefault(_layer(name), []).append(i)
    products = {
        layer: half_products(
            [tuple([half[m][i] for i in group] for half in gradients) for m in range(len(present))]  # type: ignore[misc]
        )
        for layer, group in groups.items()
        if any(half[m][i] is not None for half in gradients for m in range(len(present)) for i in group)
    }
    return _named(products, [names[m] for m in present])


def _half(batch: TokenBatch, start: int) -> TokenBatch:
    return batch._map(lambda t: t[start::2] if t.ndim else t)


def _targets(batch: TokenBatch, M: int) -> Tensor:
    """Trained targets by modality, (M,)."""
    modality_M = torch.arange(M, device=batch.ids_BT.device)
    of_BTM = batch.target_mask_BT[..., None] & (batch.target_modality_BT[..., None] == modality_M)
    return of_BTM.sum((0, 1))


def _gradients(parts_M: Tensor, present: list[int], parameters: list[Tensor]) -> list[Gradients]:
    gradients: list[Gradients] = []
    for m in present:
        of_modality = torch.autograd.grad(
            parts_M[m], parameters, retain_graph=m != present[-1], allow_unused=True, materialize_grads=False
        )
        gradients.append([None if g is None else summed(g) for g in of_modality])
    return gradients


def _layer(name: str) -> int | None:
    first, _, rest = name.partition(".")
    return int(rest.split(".")[0]) if first == "blocks" else None


def _named(products: dict[int | None, HalfProducts], names: list[str]) -> dict[str, float]:
    groups = [(layer, of) for layer, of in products.items() if layer is not None]
    whole = list(products.values())
    total = sum(whole[1:], whole[0])
    both = [(layer, of.agreement()) for layer, of in [*groups, (None, total)]]
    tags: list[str] = []
    values: list[Tensor] = []
    for layer, agreement in both:
        tags += _tags(names, layer)
        values.append(_flat(agreement))
    numbers = torch.cat(values).tolist()  # one transfer
    return {
        t: v for t, v in zip(tags, numbers, strict=True) if not (t.startswith("grad_agreement") and v != v)
    }


def _tags(names: list[str], layer: int | None) -> list[str]:
    """In the order of `_flat`."""
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return [
        *(tag("grad_signal", name, layer=layer) for name in names),
        *(tag("grad_noise", name, layer=layer) for name in names),
        *(tag("grad_agreement", a, b, layer=layer) for a, b in pairs),
    ]


def _flat(agreement: Agreement) -> Tensor:
    M = len(agreement.signal)
    above = torch.triu_indices(M, M, 1, device=agreement.cosine.device)
    return torch.cat([agreement.signal, agreement.noise, agreement.cosine[above[0], above[1]]])
