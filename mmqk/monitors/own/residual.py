"""Measures the rounding error of the residual stream in bf16."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import Block
from mmqk.monitors.formulas.precision import Absorption, absorption
from mmqk.monitors.formulas.reduce import selection
from mmqk.monitors.probe import eager_forward
from mmqk.monitors.record import Probe
from mmqk.store.tags import tag

STATISTICS = {"absorb_error": "error", "absorb_bias": "bias", "absorbed": "absorbed"}


@torch.no_grad()
def residual_absorption(model: EarlyFusionTransformer, batch: TokenBatch) -> Probe:
    """Return `Absorption` by layer and modality of the token, over the additions of attention and MLP outputs.

    If the stream is not in bf16, the result is the error that a bf16 stream would have, and the tags end in
    ``_if_bf16``. The function runs one forward pass in the caller's precision and does not change the model.

    Args:
        model: runs in evaluation mode.
        batch: all of its sequences are used.
    """
    names = model.config.modalities
    selected_MBT = selection(batch.modality_BT, batch.valid_BT, len(names))
    probe = Probe(sequences=len(batch.ids_BT))
    stream: dict[str, Tensor] = {}
    first: dict[int, Absorption] = {}
    blocks = [cast(Block, block) for block in model.blocks]

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # the input of a pre-norm is the stream
        stream["x"] = inputs[0]

    def sink(site: str, layer: int, tensor: Tensor) -> None:
        if site not in ("attn_out", "mlp_out"):
            return
        x_BTD, alpha = stream["x"], blocks[layer].stream_scale
        of_site = absorption(x_BTD if alpha is None else alpha * x_BTD, tensor, selected_MBT)
        if site == "attn_out":
            first[layer] = of_site
            return
        ending = "" if x_BTD.dtype == torch.bfloat16 else "_if_bf16"
        for statistic, part in STATISTICS.items():
            both = getattr(first[layer], part) + getattr(of_site, part)
            probe.add_means([tag(statistic + ending, n, layer=layer) for n in names], both)

    with ExitStack() as stack:
        for block in blocks:
            for norm in (block.attn_pre_norm, block.mlp_pre_norm):
                stack.callback(norm.register_forward_pre_hook(before).remove)
        eager_forward(model, batch, sink, dense_for=("flex",))
    return probe
