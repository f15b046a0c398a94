"""A fork's function equals its parent's up to rounding if possible, and is close to it otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmqk.config.checks import check_forkable
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.config import PerModalityConfig, QKNormConfig
from mmqk.training.fork.measure import change_of_function
from mmqk.training.fork.weights import carry
from mmqk.training.losses import modality_losses
from tests.training.toy import BLOCKS, toy_batch

PLAIN = ModelConfig(d_model=64, n_layers=2, n_heads=4, d_head=64, vocab_sizes=BLOCKS)
GROUPED = replace(PLAIN, n_kv_heads=2)
POST = replace(PLAIN, pre_norm=False, post_norm=True)
BATCH = toy_batch(0, B=8, T=24, padding=3)


def rms(**more) -> QKNormConfig:
    return QKNormConfig(kind="rms", **more)


def l2(**more) -> QKNormConfig:
    return QKNormConfig(kind="l2", **more)


def grown(config: ModelConfig) -> EarlyFusionTransformer:
    """Return a model whose gains are not 1 and whose queries and keys are longer than at initialization."""
    model = EarlyFusionTransformer(config, "math", seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2 or "norm" in name:
                p.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator).clamp(-2, 2))
            elif "w_q" in name or "w_k" in name:
                p.mul_(1.5)
            elif "w_o" in name or "w_down" in name:
                p.mul_(0.4)
            if name.endswith("bias"):
                p.add_(0.1)
    return model.eval()


def logits(model: EarlyFusionTransformer) -> Tensor:
    """Return the fp64 logits at all positions that are not padding."""
    out_BTV = model.double()(BATCH.ids_BT, BATCH.modality_BT)
    model.float()
    return out_BTV[BATCH.valid_BT].detach()


def distance(old: EarlyFusionTransformer, new: EarlyFusionTransformer) -> float:
    before, after = logits(old), logits(new)
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize(
    ("field", "of_parent", "value"),
    [("n_layers", {}, 3), ("tie_embeddings", {}, True), ("per_modality", {"qk": True}, PerModalityConfig()),
     ("layer_scale", {"separate_first": 1}, 0.1)],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(field, of_parent, value):
    old = replace(PLAIN, **{"per_modality": PerModalityConfig(**of_parent)} if "qk" in of_parent else of_parent)
    check_forkable(old, old)  # the control
    with pytest.raises(ValueError, match=f"model.{field}.* a fork"):
        check_forkable(old, replace(old, **{field: value}))


EXACT = {
    "LayerScale on": (PLAIN, replace(PLAIN, layer_scale=1e-4)),
    "LayerScale off": (replace(PLAIN, layer_scale=0.5), PLAIN),
    "sigma reparam on, gamma one": (PLAIN, replace(PLAIN, weight_reparam="sigma", reparam_gamma="one")),
    "sigma reparam off": (replace(PLAIN, weight_reparam="sigma"), PLAIN),
    "gains zero-centered": (replace(PLAIN, post_norm=True), replace(PLAIN, post_norm=True,
        norm_gain="zero_centered")),
    "gains of pre-norms away": (PLAIN, replace(PLAIN, norm_gain="none", residual_dropout=0.3, attn_dropout=0.3)),
    "gains of post-norms away": (
        replace(POST, layer_scale=1.0), replace(POST, layer_scale=1.0, norm_gain="none")),
    "QK gain by head": (replace(PLAIN, qk_norm=rms()), replace(PLAIN, qk_norm=rms(gain="per_head"))),
    "cosine scale as a logarithm": (replace(PLAIN, qk_norm=l2()), replace(PLAIN, qk_norm=l2(scale_max=100.0))),
    "cosine to QK-Norm": (replace(GROUPED, qk_norm=l2(gain="per_head")),
                          replace(GROUPED, qk_norm=rms(gain="per_head", eps=1e-12))),
    "everything untied": (replace(POST, qk_norm=rms()),
                          replace(POST, qk_norm=rms(), per_modality=PerModalityConfig(True, True, True, True))),
    "a head of its own": (replace(PLAIN, tie_embeddings=True), PLAIN),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), EXACT.values(), ids=EXACT)
def test_function_is_unchanged(before, after):
    old, new = grown(before), EarlyFusionTransformer(after, "math", seed=5).eval()
    assert distance(old, new) > 0.1  # the control: before `carry` the functions differ
    carry(old, new, BATCH)
    assert distance(old, new) < 2e-6


NEAR = {
    "QK-Norm": (PLAIN, replace(PLAIN, qk_norm=rms())),
    "QK-Norm by head, all heads together": (PLAIN, replace(PLAIN, qk_norm=rms(gain="per_head", scope="full"))),
    "QK-Norm zero-centered behind RoPE": (
        PLAIN, replace(PLAIN, qk_norm=rms(gain="zero_centered", place="after_rope"))),
    "LayerNorm": (PLAIN, replace(PLAIN, qk_norm=QKNormConfig(kind="layer", bias=True))),
    "values too": (GROUPED, replace(GROUPED, qk_norm=rms(gain="per_head", normalize_v=True))),
    "untied": (PLAIN, replace(PLAIN, qk_norm=rms(), per_modality=PerModalityConfig(qk_norm=True))),
    "post-norm silent at first": (PLAIN, replace(PLAIN, post_norm=True, post_gain_init=0.0)),
    "pre-norm": (POST, replace(POST, pre_norm=True)),
    "post-norm away": (replace(PLAIN, post_norm=True), PLAIN),
    "QK-Norm behind RoPE away": (replace(PLAIN, qk_norm=rms(place="after_rope")), PLAIN),
    "pre-norm to post-norm": (PLAIN, POST),
    "post-norm to pre-norm": (POST, PLAIN),
    "values without a gain": (PLAIN, replace(PLAIN, qk_norm=l2(normalize_v=True, scale_init=1.0))),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), NEAR.values(), ids=NEAR)
def test_function_is_nearer_than_with_gains_at_their_first_values(before, after):
    old, new, plain = (grown(before), *(EarlyFusionTransformer(after, "math", seed=5).eval() for _ in range(2)))
    plain.load_state_dict(old.state_dict(), strict=False)
    carried = carry(old, new, BATCH)
    assert distance(old, new) < 0.8 * distance(old, plain)
    # The reported change equals the measured change.
    change = change_of_function(old, new, BATCH)
    assert change.logits == pytest.approx(distance(old, new), rel=1e-4)
    known = {name for name, _ in new.named_parameters()}
    assert set(carried.added) | set(carried.from_name) == known


def measured(model: EarlyFusionTransformer, site: str) -> list[Tensor]:
    """Return the tensor of a site in each layer without padding, of shape (tokens, heads, K)."""
    found: list[Tensor] = []

    def observer(at: str, layer: int, tensor: Tensor) -> None:
        if at == site:
            found.append(tensor.detach().transpose(1, 2)[BATCH.valid_BT].double())

    model(BATCH.ids_BT, BATCH.modality_BT, None, observer)
    return found


@pytest.mark.parametrize("gain", ["per_head", "zero_centered"])
def test_gains_are_the_measured_rms(gain):
    old = grown(GROUPED)
    new = EarlyFusionTransformer(replace(GROUPED, qk_norm=rms(gain=gain, eps=1e-12)), "math")
    carried = carry(old, new, BATCH)
    weights = dict(new.named_parameters())
    for role in "qk":
        for layer, x_NHK in enumerate(measured(old, f"{role}_raw")):
            name = f"blocks.{layer}.attention.{role}_norm.weight"
            assert carried.added[name] == "the measured RMS"
            dims = (0, 2) if gain == "per_head" else (0, 1, 2)
            expected = x_NHK.square().mean(dims, keepdim=True).sqrt()[0]
            found = weights[name].double() + (gain == "zero_centered")
            expected = expected if gain == "per_head" else expected[0]
            torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=1e-6)


def test_scale_of_cosine_attention_keeps_the_size_of_the_logits():
    old = grown(GROUPED)
    new = EarlyFusionTransformer(replace(GROUPED, qk_norm=l2(gain="per_head", scale_max=1e4)), "math")
    carry(old, new, BATCH)
    for layer, (q_NHK, k_NGK) in enumerate(zip(measured(old, "q_raw"), measured(old, "k_raw"), strict=True)):
        lengths = [x.norm(dim=-1).square().mean(0).sqrt() for x in (q_NHK, k_NGK)]
        expected_H = lengths[0] * lengths[1].repeat_interleave(2) / 64**0.5
        found = new.get_parameter(f"blocks.{layer}.attention.q_norm.weight").exp().flatten()
        torch.testing.assert_close(found.double(), expected_H, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [(replace(PLAIN, layer_scale=0.5), PLAIN), (PLAIN, replace(PLAIN, norm_gain="none")),
     (replace(PLAIN, weight_reparam="sigma"), PLAIN)],
    ids=["LayerScale off", "gains away", "sigma off"],
)  # fmt: skip
def test_scales_say_what_becomes_of_gradients(before, after):
    """A matrix scaled by c has gradients scaled by 1 / c, so its moments are divided by c. With sigma reparam, σ
    depends on the matrix, so this holds only for the part of the gradient that keeps σ constant."""
    old, new = grown(before), EarlyFusionTransformer(after, "math").eval()
    carried = carry(old, new, BATCH)
    for model in (old, new):
        args = (BATCH.targets_BT, BATCH.target_modality_BT, BATCH.target_mask_BT, 2)
        modality_losses(model(BATCH.ids_BT), *args).ce.sum().backward()
    ours, theirs = dict(new.named_parameters()), dict(old.named_parameters())
    assert carried.scale
    for name, scale in carried.scale.items():
        here, there = ours[name].grad, theirs[carried.from_name[name]].grad
        assert here is not None and there is not None
        here = here * scale
        if before.weight_reparam == "sigma":
            module = old.get_submodule(name.removesuffix(".weight"))
            uv = torch.outer(module.u, module.v)  # type: ignore[arg-type]
            inner = (here * theirs[name]).sum() / module.sigma()  # type: ignore[operator]
            here = here - inner * uv
        torch.testing.assert_close(here.float(), there, rtol=1e-3, atol=2e-5 * float(there.abs().max()) + 1e-6)
