"""Compares `attach` with brute force in float64 for mixed dtypes and empty sequences."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from mmqk.monitors import attach
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, Net, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, causal, modality_of, norms, same


class Padded(Net):
    """Gets the mask of the padding, and does not use it."""

    def forward(self, ids, attention_mask):
        return super().forward(ids, None)


def test_weights_of_several_dtypes_are_measured_in_fp32():
    """A forward with several dtypes runs under autocast; the statistics are computed outside autocast."""
    net, (ids,) = Net(["sdpa", "alibi"]), batches(1, B=3)
    net.layers[0].mlp.bfloat16()
    dtypes = {}
    net.layers[1].attention.register_forward_hook(lambda m, x, out: dtypes.update(inside=out.dtype))
    for layer in net.layers:
        layer.attention.keep = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
        assert dtypes["inside"] == torch.bfloat16
        net(ids)
    modality = modality_of(ids)
    for n, layer in enumerate(net.layers):
        q, k = (x.float().double().numpy() for x in layer.attention.keep[0])
        scale = (0.5, 8**-0.5)[n]
        expected = norms(q, k, modality, n)
        expected |= brute_force.attention(q, k, scale, modality, causal, NAMES, n, softmax=n == 0)
        assert same(measured, expected)
        # Control: products in bf16 give other numbers.
        z = (torch.tensor(q).bfloat16() @ torch.tensor(k).bfloat16().mT).double().numpy()
        eye = np.broadcast_to(np.eye(16), z.shape)
        rough = brute_force.attention(z, eye, scale, modality, causal, NAMES, n, softmax=False)
        assert not same(measured, {t: x for t, x in rough.items() if t.startswith("attn_logit_m")})


class Pixels(Net):
    """Adds a linear projection of pixels to the embeddings."""

    def __init__(self):
        super().__init__(["sdpa"] * 2)
        self.patch = nn.Linear(4, D)

    def forward(self, ids, pixels):
        x = self.embed(ids) + self.patch(pixels)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_model_in_half_precision_that_is_called_under_autocast_is_probed():
    """Autocast converts the fp32 pixels, so the probe's forward needs it too."""
    model, (ids,), logged = Pixels().bfloat16(), batches(1, B=3), []
    pixels = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0))
    watch = attach(model, modality=IMAGE, every_n_steps=1, log=lambda values, step: logged.append(values))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids, pixels)
    watch.step()
    # The controls: without autocast the model takes pixels in bf16 only, and it is probed with them.
    with pytest.raises(RuntimeError, match="dtype"):
        model(ids, pixels)
    model(ids, pixels.bfloat16())
    watch.step()
    assert logged[0].keys() == logged[1].keys() and "attn_entropy/image/layer01" in logged[0]
    series = {tag: x for tag, x in logged[1].items() if tag.startswith(("attn_entropy", "q_norm", "resid_norm"))}
    assert same(logged[0], series, rel=0.05)


def test_a_sequence_that_is_all_padding_counts_for_nothing():
    """The attention has a bias, so `Collector.weights` computes the weights. A sequence of padding has no rank."""

    net, (ids,) = Padded(["alibi"]), batches(1, B=3)
    attention_mask = torch.ones_like(ids)
    attention_mask[0] = 0
    watch = attach(net, modality=IMAGE)
    padded = watch.probe(ids=ids, attention_mask=attention_mask).flat()
    alone = watch.probe(ids=ids[1:], attention_mask=attention_mask[1:]).flat()
    assert padded.pop("probe_sequences") == 3 and alone.pop("probe_sequences") == 2
    assert padded.keys() == alone.keys() and same(padded, alone)
    whole = watch.probe(ids=ids, attention_mask=torch.ones_like(ids)).flat()  # control
    assert not same(whole, {"attn_rank/layer00": alone["attn_rank/layer00"]})


def pairs_of(keep_BT, kind):
    """Return a causal mask (B, 1, T, T) with this padding."""
    T = keep_BT.shape[1]
    visible = keep_BT[:, None, None].bool() & torch.ones(T, T, dtype=torch.bool).tril()
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if kind == "additive" else visible


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_mask_of_pairs_marks_the_padding_that_no_token_sees(kind, side):
    net, (ids,) = Padded(["sdpa"]), batches(1, B=3)
    keep = torch.ones_like(ids)
    keep[0, 12:] = keep[1, 15:] = 0
    keep = keep if side == "right" else keep.flip(1)
    watch = attach(net, modality=IMAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = watch.probe(ids=ids, attention_mask=pairs_of(keep, kind)).flat()
        assert measured == watch.probe(ids=ids, attention_mask=keep).flat()
        assert int(watch.prober.tokens_M.sum()) == int(keep.sum()) == 43
        whole = watch.probe(ids=ids, attention_mask=pairs_of(torch.ones_like(ids), kind)).flat()
    assert whole == watch.probe(ids=ids, attention_mask=torch.ones_like(ids)).flat() != measured  # the control
