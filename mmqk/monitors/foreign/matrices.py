"""Measures norm, spectral norm and stable rank of the weight matrices of a third-party model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmqk.monitors.foreign.layers import block_of, clean, layer_of
from mmqk.monitors.formulas.weights import matrix_sizes
from mmqk.monitors.record import Probe
from mmqk.store import UserError, tag


def add_matrices(probe: Probe, root: nn.Module, calls: Sequence[tuple[int, str]]) -> None:
    """Add norm, spectral norm and stable rank of every matrix of every layer.

    A tag is, for example, ``self_attn_q_proj_norm/layer03``.

    A matrix is a parameter with two axes that is not an embedding. Its name in the tag is its path in the layer.

    Args:
        probe: gets the values.
        root: the model.
        calls: layer number and path of the module of each attention call.

    Raises:
        UserError: a layer has no matrix, or its matrices are sharded over ranks.
    """
    tags: list[str] = []
    values: list[Tensor] = []
    for layer, prefix in _prefixes(calls):
        matrices = list(_matrices(root.get_submodule(prefix)))
        if not matrices or any(isinstance(weight, DTensor) for _, weight in matrices):
            raise UserError(
                f"matrices: {prefix or 'the model'} holds no whole weight matrix, as with FSDP: call attach "
                "without matrices"
            )
        for name, weight in matrices:
            tags += [tag(f"{name}_{size}", layer=layer) for size in ("norm", "spectral", "stable_rank")]
            values += matrix_sizes(weight)
    if values:
        probe.add_values(tags, torch.stack(values))


def _prefixes(calls: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the number and path of each layer: the call's path up to its first integer if these paths all differ,
    else up to its last integer."""
    layers = [layer_of(path) for _, path in calls]
    whole = [f"{layer[0]}.{layer[1]}".lstrip(".") for layer in layers if layer is not None]
    if len(set(whole)) < len(calls):
        whole = [block_of(path) for _, path in calls]
    return [(number, prefix) for (number, _), prefix in zip(calls, whole, strict=True)]


def _matrices(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in layer.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 2 and weight.is_floating_point() and not isinstance(module, nn.Embedding):
                full = clean(f"{path}.{name}".strip(".")).replace(".", "_")
                yield full.removesuffix("_weight"), weight
