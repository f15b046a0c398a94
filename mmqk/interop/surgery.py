"""Change the architecture of trained weights and keep their function near: ``mmqk interop --from A --to B --set ...``.

New gains start as in a fork (`mmqk.training.fork.weights`). Those of QK-Norm are then fitted, layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmqk.config.checks import check_forkable
from mmqk.config.parse import parse_fields, yaml_value
from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig
from mmqk.data.tokens.ids import load_ids
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.transformer import Block
from mmqk.store import UserError, read_details
from mmqk.training.fork.measure import Change, change_of_function
from mmqk.training.fork.weights import Carried, carry

SEQUENCES, RANDOM_TOKENS = 16, 128  # most sequences that are read; tokens of a random sequence
FIT_SEQUENCES, FIT_ROUNDS = 4, 20  # sequences and rounds of L-BFGS for each layer's QK-Norm


def fields_of(given: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of ``--set model.NAME=VALUE``, by their names without ``model.``.

    Raises:
        UserError: a name has another form, or a value is no YAML.
    """
    for name, value in given:
        if not name.startswith("model."):
            raise UserError(f"--set {name}={value} is not of the form model.FIELD=VALUE, as model.qk_norm.kind=rms is.")
    return {name.removeprefix("model."): yaml_value(name, value) for name, value in given}


def batch_for(config: ModelConfig, source: Path, file: Path | None) -> tuple[TokenBatch, str]:
    """Return sequences for a model, and their origin: a file of ids, the run's own held-out data, or random ids.

    Raises:
        UserError: the file or the data cannot be read, or an id is not in the vocabulary.
    """
    stored = read_details(source).get("config")
    if file is None and stored:
        from mmqk.data.datamodule import TokenDataModule  # imports Lightning

        data = TokenDataModule(parse_fields(DataConfig, stored["data"]), stored["seed"])
        data.setup()
        return data.probe_batch(SEQUENCES), "held-out sequences of the run"
    origin = f"sequences of {file}"
    if file is None:
        origin = "sequences of random ids, which have other activations than real tokens: give --batch"
        ids_BT = torch.randint(config.vocab_size, (FIT_SEQUENCES, RANDOM_TOKENS), generator=torch.Generator())
    else:
        ids = load_ids(file)
        if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise UserError(f"{file} has the shape {ids.shape}: give ids as (sequences, tokens) in a .npy file.")
        ids_BT = torch.from_numpy(ids[:SEQUENCES].astype("int64"))
        if not 0 <= int(ids_BT.min()) <= int(ids_BT.max()) < config.vocab_size:
            raise UserError(f"{file} has ids that are not from 0 to {config.vocab_size - 1}: give ids of this model.")
    ends = torch.tensor(list(config.vocab_sizes.values())).cumsum(0)
    valid_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    target_BT = valid_BT.clone()
    target_BT[:, -1] = False
    modality_BT = torch.bucketize(ids_BT, ends, right=True)
    return TokenBatch(ids_BT, modality_BT, target_BT, valid_BT, target_BT.sum()), origin


def operate(
    model: EarlyFusionTransformer, fields: Mapping[str, Any], batch: TokenBatch
) -> tuple[EarlyFusionTransformer, Carried, Change]:
    """Return the model with some fields changed, the origin of its parameters, and the change of its outputs.

    Args:
        model: The trained model, in fp32 and evaluation mode.
        fields: Value of each changed field of `ModelConfig` by its dotted name: ``{"qk_norm.kind": "rms"}``.
        batch: Sequences on which new gains are fitted and the outputs compared.

    Raises:
        UserError: a field or value is unknown, or the weights do not fit into the changed model.
    """
    config = changed_config(model.config, fields)
    if config.embed_norm and not model.config.embed_norm and "embed_scale" not in fields:
        config = replace(config, embed_scale=measured_embed_scale(model, batch))
    new = EarlyFusionTransformer(config, "math").eval()
    carried = carry(model, new, batch)
    if config.qk_norm != model.config.qk_norm and config.qk_norm.kind != "none":
        fit_attention(model, new, batch)
    return new, carried, change_of_function(model, new, batch)


def changed_config(config: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration with these fields changed, given by their dotted names. A new QK-Norm has the eps of
    the other norms, as in Qwen3.

    Raises:
        UserError: a field or value is unknown, or a fork could not make this change.
    """
    if "patch" in fields:
        raise UserError("--set model.patch would run code: name the patch in the fork's command line.")
    stored = asdict(config)
    stored["qk_norm"]["eps"] = config.norm_eps if config.qk_norm.kind == "none" else config.qk_norm.eps
    try:
        changed = parse_fields(ModelConfig, {**stored, **fields})
        check_forkable(config, changed)
    except (UserError, ValueError) as error:
        raise UserError(f"--set model.FIELD=VALUE: {error}") from error
    return changed


@torch.no_grad()
def measured_embed_scale(model: EarlyFusionTransformer, batch: TokenBatch) -> dict[str, float]:
    """Return the factor by modality that gives normalized embeddings their former RMS (4 digits), over the batch's
    tokens of the modality, or over all tokens if it has none."""
    square_N = model.embed(batch.ids_BT)[batch.valid_BT].double().square().mean(-1)
    modality_N = batch.modality_BT[batch.valid_BT]
    scales = {}
    for m, name in enumerate(model.config.modalities):
        own_N = square_N[modality_N == m]
        size = (own_N if len(own_N) else square_N).mean().sqrt()
        scales[name] = float(f"{size * model.config.embed_scale.get(name, 1.0):.4g}")
    return scales


def fit_attention(old: EarlyFusionTransformer, new: EarlyFusionTransformer, batch: TokenBatch) -> None:
    """Fit the gains and biases of QK-Norm in each layer, so that attention's output is near the parent's for the
    parent's input: the least squares over the batch's first sequences, by L-BFGS.

    The gains that `carry` sets give queries and keys their mean size. They are the start, and a fit never has a
    larger error.
    """
    calls: list[tuple[tuple[Any, ...], Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Any]) -> None:
        calls.append((args, out[0]))

    part = batch.first(FIT_SEQUENCES)
    with contextlib.ExitStack() as stack:
        for model in (old, new):
            stack.enter_context(model.use_backend("math"))
        for block in cast(list[Block], list(old.blocks)):
            stack.callback(block.attention.register_forward_hook(note).remove)
        with torch.no_grad():
            old(part.ids_BT, part.modality_BT, part.document_BT)
        for block, (args, wanted_BTD) in zip(cast(list[Block], list(new.blocks)), calls, strict=True):
            _fit(block.attention, args, wanted_BTD, part.valid_BT)


def _fit(attention: nn.Module, args: tuple[Any, ...], wanted_BTD: Tensor, valid_BT: Tensor) -> None:
    fitted = [p for n, p in attention.named_parameters() if n.startswith(("q_norm", "k_norm", "v_norm"))]
    if not fitted:
        return
    optimizer = torch.optim.LBFGS(fitted, max_iter=FIT_ROUNDS, line_search_fn="strong_wolfe")
    size = wanted_BTD[valid_BT].square().sum()
    start = [p.detach().clone() for p in fitted]

    def error() -> Tensor:
        out_BTD, _ = attention(*args)
        return (out_BTD - wanted_BTD)[valid_BT].square().sum() / size

    def closure() -> Tensor:
        value = error()
        for p, gradient in zip(fitted, torch.autograd.grad(value, fitted), strict=True):
            p.grad = gradient
        return value

    with torch.enable_grad():
        first = optimizer.step(closure)
    with torch.no_grad():
        if not error() <= first:  # also if the error is NaN
            for p, value in zip(fitted, start, strict=True):
                p.copy_(value)
    optimizer.zero_grad()
