"""Observed passes of mmqk's own model.

The probe is a separate fp32 forward pass with the current weights, and gives the statistics. It never changes training:
it computes no gradients, draws no random numbers, writes no buffers, and restores the model's mode. `first_bad_site`
finds the first site of a forward or backward pass with a NaN or an infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.backends import documents_of
from mmqk.model.linear import SigmaLinear, through
from mmqk.model.norms import Norm
from mmqk.model.transformer import Block, Observer, capped, evaluation_mode
from mmqk.monitors.collect import NORM_SITES, Collector, Statistics
from mmqk.monitors.formulas.reduce import Pairs, Sums, kind_of, selection, visible_pairs
from mmqk.monitors.formulas.weights import absorption
from mmqk.store.metrics import tag

# Backends without an eager fp32 kernel.
NO_EAGER_FP32 = ("flex", "sdpa_flash", "sdpa_cudnn")


Reach = tuple[int, bool]  # the result of `ModelConfig.reach_of` for a layer


def pairs_by_reach(config: ModelConfig, batch: TokenBatch) -> dict[Reach, Pairs]:
    """Return the visible pairs of query and key, for each distinct `ModelConfig.reach_of` of the model's layers."""
    pairs = {}
    for window, apart in {config.reach_of(layer) for layer in range(config.n_layers)}:
        document_BT = documents_of(config, apart, batch.modality_BT, batch.document_BT)
        visible_BTS = visible_pairs(batch.valid_BT, document_BT, window)
        pairs[window, apart] = Pairs(batch.modality_BT, visible_BTS, len(config.modalities), config.n_heads)
    return pairs


def probe(
    model: EarlyFusionTransformer,
    batch: TokenBatch,
    heads: bool = False,
    pairs: Mapping[Reach, Pairs] | None = None,
    matrices: bool = False,
) -> Statistics:
    """Return every statistic of docs/statistics.md that one forward pass over ``batch`` can measure, by layer and
    modality.

    Attention logits are measured by the modalities of query and key, the output softmax by the modality of the
    target, and all other statistics by the modality of the input token.

    Args:
        model: runs in evaluation mode and fp32, and is not changed.
        batch: all of its sequences are used.
        heads: also add statistics of attention logits and weights for each head.
        pairs: the result of `pairs_by_reach` for this batch; None computes it.
        matrices: also add the norms and the stable rank of every weight matrix of the blocks.
    """
    c = model.config
    collector = Collector(c.modalities, batch.modality_BT, batch.valid_BT, heads)
    pairs = pairs_by_reach(c, batch) if pairs is None else pairs
    sites: dict[str, Tensor] = {}  # tensors of the current layer

    def observer(site: str, layer: int, tensor: Tensor) -> None:
        if site in NORM_SITES:
            collector.norms(site, layer, tensor)
        sites[site] = tensor
        if site in ("q_raw", "k_raw"):
            all_heads_BTD = tensor.transpose(1, 2).flatten(2)
            collector.norm_ratios(f"{site[0]}_weight_gain", layer, sites["attn_in"], all_heads_BTD)
        elif site == "k":
            q, k, seen, softmax = sites["q"], tensor, pairs[c.reach_of(layer)], c.attention == "softmax"
            logit = cast(Block, model.blocks[layer]).attention.sink
            sink_H = None if logit is None else logit.weight
            scale, cap = model.attn_scale_value, c.attn_softcap
            collector.attention(layer, q, k, scale, seen, cap, softmax, sink_H)
            sites.clear()
        elif site == "gate":
            collector.gate(layer, tensor)
        elif site == "final":
            collector.final(tensor)
        elif site == "logits":
            logits = capped(tensor, c.final_softcap)
            collector.output(logits, batch.target_modality_BT, batch.target_mask_BT, c.vocab_sizes)

    with torch.autocast(batch.ids_BT.device.type, enabled=False):
        eager_forward(model, batch, observer, NO_EAGER_FP32)
    _weights(model, collector)
    if matrices:
        collector.statistics.add_matrices(block_matrices(model))
    return collector.statistics


def block_matrices(model: EarlyFusionTransformer) -> Iterator[tuple[str, list[str], int, Tensor]]:
    """Yield the name, modality (empty if the modalities share the matrix), layer and weight of each block matrix."""
    for layer, block in enumerate(model.blocks):
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                *_, name = (part for part in path.split(".") if part.startswith("w_"))
                copy = [part for part in path.split(".") if part.isdigit()]
                yield name, [model.config.modalities[int(n)] for n in copy], layer, module.weight


@torch.no_grad()
def _weights(model: EarlyFusionTransformer, collector: Collector) -> None:
    """Add the statistics of the weights: row norms of embedding and head by vocabulary block, gains and logit bound
    of QK-Norm, and the ratio of σReparam's sigma to the largest singular value."""
    c = model.config
    for statistic, weight_VD in (("embed_row_norm", model.embed.weight), ("head_row_norm", model.head.weight)):
        norms = [rows.float().norm(dim=-1).mean() for rows in weight_VD.split(list(c.vocab_sizes.values()))]
        collector.of_vocabulary([tag(statistic, name) for name in c.modalities], torch.stack(norms))
    if c.weight_reparam == "sigma":
        tags = [tag("sigma_ratio", layer=layer) for layer in range(c.n_layers)]
        collector.statistics.add_values(tags, torch.stack([sigma_ratio(block) for block in model.blocks]))
    if c.qk_norm.kind == "none":
        return
    for layer in range(c.n_layers):
        attention = cast(Block, model.blocks[layer]).attention
        if not all(any(isinstance(m, Norm) for m in norm.modules()) for norm in (attention.q_norm, attention.k_norm)):
            continue  # `model.patch` replaced QK-Norm, whose bound is then unknown
        device = next(attention.parameters()).device
        tags, values = [tag("attn_logit_bound", layer=layer)], [logit_bound(model, layer).to(device)]
        for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
            gains = [m.gain() for m in norm.modules() if isinstance(m, Norm)]
            present = [gain.float().abs().flatten() for gain in gains if gain is not None]
            if present:
                tags += [tag(f"{name}_gain_mean", layer=layer), tag(f"{name}_gain_max", layer=layer)]
                values += [torch.cat(present).mean(), torch.cat(present).max()]
        collector.statistics.add_values(tags, torch.stack(values))


@torch.no_grad()
def sigma_ratio(block: nn.Module) -> Tensor:
    """Return the smallest ratio of sigma to the largest singular value over the σReparam matrices of a block; it is
    1 if sigma is exact."""
    matrices = [m for m in block.modules() if isinstance(m, SigmaLinear)]
    ratios = [m.sigma().float() / torch.linalg.matrix_norm(m.weight.float(), 2) for m in matrices]
    return torch.stack(ratios).min()


@torch.no_grad()
def logit_bound(model: EarlyFusionTransformer, layer: int) -> Tensor:
    """Return the upper bound on the attention logits of this layer under QK-Norm, for any input.

    It is the scale times the largest norm of a query times the largest norm of a key (`Norm.longest`). For RMS
    QK-Norm of each head with gains g, it is ``|g_q|_max |g_k|_max sqrt(head_dim)`` at the usual scale. RoPE does not
    change norms.
    """
    attention = cast(Block, model.blocks[layer]).attention

    def longest(norm: nn.Module) -> Tensor:
        return torch.stack([m.longest() for m in norm.modules() if isinstance(m, Norm)]).max()

    return model.attn_scale_value * longest(attention.q_norm) * longest(attention.k_norm)


@torch.no_grad()
def eager_forward(
    model: EarlyFusionTransformer, batch: TokenBatch, observer: Observer, dense_for: Collection[str]
) -> None:
    """Run the model eagerly and in evaluation mode. If its backend is in ``dense_for``, use dense attention instead.

    torch.compile would compile the model again for a forward pass with an observer, so it is disabled. Flex attention
    is not fused when it runs eagerly, so callers include ``flex`` in ``dense_for``.
    """
    dense = model.use_backend("math") if model.backend in dense_for else nullcontext()
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"), dense:
        model(batch.ids_BT, batch.modality_BT, batch.document_BT, observer=observer)


@torch.no_grad()
def residual_absorption(model: EarlyFusionTransformer, batch: TokenBatch) -> Statistics:
    """Return the `absorption` by layer and modality of the token, over the additions of attention and MLP outputs.

    If the stream is not in bf16, the result is the error that a bf16 stream would have, and the tags end in
    ``_if_bf16``. The function runs one forward pass in the caller's precision and does not change the model.

    Args:
        model: runs in evaluation mode.
        batch: all of its sequences are used.
    """
    names = model.config.modalities
    selected_MBT = selection(batch.modality_BT, batch.valid_BT, len(names))
    statistics = Statistics()
    stream: dict[str, Tensor] = {}
    first: dict[int, dict[str, Sums]] = {}
    blocks = [cast(Block, block) for block in model.blocks]

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # the input of a pre-norm is the stream
        stream["x"] = inputs[0]

    def observer(site: str, layer: int, tensor: Tensor) -> None:
        if site not in ("attn_out", "mlp_out"):
            return
        x_BTD, alpha = stream["x"], blocks[layer].stream_scale
        of_site = absorption(x_BTD if alpha is None else alpha * x_BTD, tensor, selected_MBT)
        if site == "attn_out":
            first[layer] = of_site
            return
        ending = "" if x_BTD.dtype == torch.bfloat16 else "_if_bf16"
        for statistic, of_attention in first[layer].items():
            both = of_attention + of_site[statistic]
            statistics.add_means([tag(statistic + ending, n, layer=layer) for n in names], both)

    with ExitStack() as stack:
        for block in blocks:
            for norm in (block.attn_pre_norm, block.mlp_pre_norm):
                stack.callback(norm.register_forward_pre_hook(before).remove)
        eager_forward(model, batch, observer, dense_for=("flex",))
    return statistics


def first_bad_site(model: EarlyFusionTransformer, batch: TokenBatch, loss: Callable[[Observer], Tensor]) -> str | None:
    """Return a description of the first site with a NaN or an infinity, such as ``attn_logits of layer 3, at image
    tokens, is infinite``.

    The function first checks the weights, then the sites of a forward pass (`EarlyFusionTransformer.forward` lists
    them), the attention logits, the loss, the gradients at the sites from the last to the first, and the gradients of
    the parameters. It runs in the caller's mode and precision, does not write ``.grad``, and synchronizes with the
    host.

    Args:
        model: the model with its current weights.
        batch: the input.
        loss: gets an observer, runs ``model`` on ``batch`` with it, and returns the loss.

    Returns:
        The description, or None if everything is finite.
    """
    for name, p in model.named_parameters():
        if kind := kind_of(p.detach()):
            return f"the weight {name} is {kind}"
    sites = _Sites(model, batch)
    with torch.enable_grad():
        value = loss(sites.check)
        sites.check_missing_logits()
        if sites.first_bad is not None:
            return sites.first_bad
        if kind := kind_of(value.detach()):
            return f"the loss is {kind} though all logits are finite"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    if sites.first_bad is not None:
        return sites.first_bad
    for (name, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None and (kind := kind_of(gradient)):
            return f"the gradient of {name} is {kind}"
    return None


def first_bad_state(model: nn.Module, optimizers: Iterable[Optimizer]) -> str | None:
    """Return a description of the first weight or optimizer state with a NaN or an infinity; None if all are finite.

    It synchronizes with the host once.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    named = [(f"the weight {name}", p.detach()) for p, name in names.items()]
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    named.append((f"the optimizer's {key} of {names.get(p, 'a weight')}", value))
    if torch.stack([torch.isfinite(x).all().to(named[0][1].device) for _, x in named]).all():
        return None
    return next(f"{name} is {kind}" for name, x in named if (kind := kind_of(x)))


class _Sites:
    """Checks the sites of a forward pass and their gradients, and describes the first bad one."""

    def __init__(self, model: EarlyFusionTransformer, batch: TokenBatch) -> None:
        self.model, self.batch = model, batch
        self.first_bad: str | None = None
        self.names = (*model.config.modalities, "padding")
        valid_MBT = selection(batch.modality_BT, batch.valid_BT, len(model.config.modalities))
        self.selected_MBT = torch.cat([valid_MBT, ~batch.valid_BT[None]])
        self.q_BHTK: Tensor | None = None
        self.final_BTD: Tensor | None = None

    def check(self, site: str, layer: int, tensor: Tensor) -> None:
        """Check one tensor; this is the observer of the forward pass."""
        self._check(site, layer, [tensor.detach()])
        if self.first_bad is not None:
            return
        if site == "q":
            self.q_BHTK = tensor.detach()
        elif site == "k":
            self._check("attn_logits", layer, self._attention_logits(layer, tensor.detach()))
        elif site in ("final", "logits"):
            self.final_BTD = tensor.detach() if site == "final" else None
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._check(f"the gradient at {site}", layer, [gradient]))

    @torch.no_grad()
    def check_missing_logits(self) -> None:
        """Check the logits if the forward pass stopped before the head, as with a chunked loss."""
        if self.final_BTD is not None:
            head, norm = self.model.head, self.model.final_norm
            rows = zip(self.final_BTD.split(1), self.batch.modality_BT.split(1), strict=True)
            self._check("logits", -1, (head(through(norm, x_1TD, modality_1T)) for x_1TD, modality_1T in rows))

    def _check(self, site: str, layer: int, parts: Iterable[Tensor]) -> None:
        """Store a description of the site if a value is not finite.

        Each part contains some of the sequences and has the shape (b, T, X) or (b, H, T, X).
        """
        if self.first_bad is not None:
            return
        bad, has_nan = [], False
        for part in parts:
            finite = torch.isfinite(part).all(-1)
            bad.append(~(finite.all(1) if finite.ndim == 3 else finite))
            has_nan = has_nan or bool(bad[-1].any() and torch.isnan(part).any())
        bad_BT = torch.cat(bad)
        if not bad_BT.any():
            return
        at = (self.selected_MBT & bad_BT).flatten(1).any(1).tolist()
        tokens = " and ".join(name for name, is_bad in zip(self.names, at, strict=True) if is_bad)
        of_layer = f" of layer {layer}" if layer >= 0 else ""
        self.first_bad = f"{site}{of_layer}, at {tokens} tokens, is {'NaN' if has_nan else 'infinite'}"

    def _attention_logits(self, layer: int, k_BHTK: Tensor) -> Iterator[Tensor]:
        """Yield the visible attention logits of each sequence, which can be infinite even if queries and keys are
        finite."""
        assert self.q_BHTK is not None
        batch, config = self.batch, self.model.config
        document_BT = documents_of(config, config.separates(layer), batch.modality_BT, batch.document_BT)
        visible_BTS = visible_pairs(batch.valid_BT, document_BT, config.window_of(layer))
        q, k = self.model.attn_scale_value * self.q_BHTK.float(), k_BHTK.float()
        with torch.autocast(q.device.type, enabled=False):
            for q_HTK, k_HSK, visible_TS in zip(q, k, visible_BTS, strict=True):
                yield (q_HTK @ k_HSK.transpose(-1, -2)).masked_fill(~visible_TS, 0.0)[None]
