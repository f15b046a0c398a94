"""Every pair of remedies either trains or is refused by a sentence that names both; the refused pairs are listed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from mmqk.lab.remedies import REMEDIES, Remedy
from mmqk.model import ModelConfig
from mmqk.model.ranges import check_backend
from tests.one_step import build, step, token_batch

BLOCKS = {"text": 24, "image": 16}
MODEL = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=2, n_heads=2)
MIXED, TEXT, IMAGE = [1, 2, 30, 31, 32, 33, 3, 4], [*range(8)], [*range(24, 32)]
BATCH = token_batch([MIXED, TEXT, IMAGE, [5] + [-1] * 7], BLOCKS)
ALONE = token_batch([[5], [30]], BLOCKS)

BY_KEY = {remedy.key: remedy for remedy in REMEDIES}
WITH_QK_NORM = {remedy.key for remedy in REMEDIES if "model.qk_norm.kind" in remedy.settings}
L2 = {"qk_norm_l2", "qk_norm_l2_per_head", "qk_norm_cosine"}
WITH_BIAS = {"qk_norm_layer_bias", "qk_norm_per_head"}
# A QK-Norm remedy with a bias needs kind layer, so it is refused together with a remedy of another kind.
BIAS_OF_ANOTHER_KIND = {(a, b) for a in WITH_BIAS for b in WITH_QK_NORM - WITH_BIAS - {"qk_norm_layer"}}
IN_ITS_PLACE = {
    "post_norm", "sandwich", "post_gain_zero", "residual_gate", "depth_scale_norm", "depth_scale_branch",
    "output_init_total", "output_init_depth",
}  # fmt: skip
REFUSED = {
    frozenset(pair)
    for pair in (
        *(("attn_scale_inverse", key) for key in L2),
        *(("qk_clip", key) for key in WITH_QK_NORM | {"sigma_reparam", "adamh"}),
        ("msign", "sigma_reparam"),
        *(("mup", key) for key in ("muon", "adamh")),
        *BIAS_OF_ANOTHER_KIND,
        *(("qk_norm_full", key) for key in L2),
        ("qk_norm_zero_centered", "qk_norm_l2"),
        ("qk_norm_no_gain", "untie_qk_norm"),
        *(("depth_scale_norm", key) for key in ("post_norm", "post_gain_zero")),
        *(("deep_norm", key) for key in IN_ITS_PLACE),
        ("attn_sink", "sigmoid_attention"),
        ("attn_sink", "separate_ends"),
        *((key, other) for key in ("muon", "adamh") for other in ("split_second_moment", "update_clip")),
        *(("split_second_moment", key) for key in ("update_clip", "adagc")),
    )
}


def merged(a: Remedy, b: Remedy) -> Iterator[dict]:
    """Yield the settings of both remedies; if they set a field to different values, yield them once in each order."""
    yield {**a.settings, **b.settings}
    if any(a.settings[name] != b.settings[name] for name in a.settings.keys() & b.settings.keys()):
        yield {**b.settings, **a.settings}


def unfinished(settings: dict, backends: tuple[str, ...] = ("math", "sdpa")) -> list[str]:
    """Train one step with these settings and return the names of values that are not finite, if any.

    Raises:
        ValueError: `build` refuses the settings.
    """
    module = build(settings, MODEL)
    found = []
    for backend in ("math",) if settings.get("backend") == "math" else backends:
        check_backend(backend, module.model_config.attn_softcap, module.model_config.attention)
        for block in module.model.blocks:
            block.attention.backend = backend
        with torch.no_grad():
            if not module.model(ALONE.ids_BT).isfinite().all():
                found.append(f"{backend}: logits of one token")
        if not torch.tensor(step(module, BATCH)).isfinite():
            found.append(f"{backend}: loss")
        for name, parameter in module.named_parameters():
            if parameter.grad is None or not parameter.grad.isfinite().all():
                found.append(f"{backend}: gradient of {name}")
            if not parameter.isfinite().all():
                found.append(f"{backend}: {name}")
    return found


def names_both(sentence: str, a: Remedy, b: Remedy) -> bool:
    """Return whether the message is one sentence that names two different fields, one of each remedy. The last part
    of a dotted field name is enough."""
    named = [
        {name for name in remedy.settings if re.search(rf"\b{name.rpartition('.')[2]}\b", sentence)}
        for remedy in (a, b)
    ]
    return bool(named[0] and named[1]) and len(named[0] | named[1]) > 1 and sentence.count(". ") == 0


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_alone_it_trains(remedy):
    assert unfinished(dict(remedy.settings)) == []


@pytest.mark.slow
@pytest.mark.parametrize("a", REMEDIES[:-1], ids=lambda remedy: remedy.key)
def test_with_any_other_it_trains_or_is_refused_by_name(a):
    refused = set()
    others = REMEDIES[REMEDIES.index(a) + 1 :]
    for b in others:
        for settings in merged(a, b):
            try:
                # With one backend, which halves the time; `test_alone_it_trains` has both.
                assert unfinished(settings, ("math",)) == [], (b.key, settings)
            except ValueError as error:
                assert names_both(str(error), a, b), (b.key, str(error))
                refused.add(b.key)
    assert refused == {b.key for b in others if frozenset((a.key, b.key)) in REFUSED}


def test_what_is_not_finite_is_found():
    assert any("loss" in found for found in unfinished({"model.embed_scale.image": 1e38, "optim.lr": 1e30}))


@pytest.mark.parametrize(
    "sentence",
    [
        "model.qk_norm.kind rms is refused.", "these two do not go together.",
        "optim.qk_clip_logit needs no model.qk_norm.kinds.",
    ],
)  # fmt: skip
def test_a_refusal_that_names_one_or_none_is_found(sentence):
    assert names_both("optim.qk_clip needs model.qk_norm.kind none.", BY_KEY["qk_clip"], BY_KEY["qk_norm_rms"])
    assert not names_both(sentence, BY_KEY["qk_clip"], BY_KEY["qk_norm_rms"])
