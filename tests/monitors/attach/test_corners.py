"""Compares `attach` with brute force in float64 for mixed dtypes and empty sequences."""

from __future__ import annotations

import numpy as np
import torch

from mmqk.monitors import attach
from tests.monitors import brute_force
from tests.monitors.attach.nets import Net, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, causal, modality_of, norms, same


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
    modality = modality_of(ids)
    assert dtypes["inside"] == torch.bfloat16
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


def test_a_sequence_that_is_all_padding_counts_for_nothing():
    """The attention has a bias, so `Collector.weights` computes the weights. A sequence of padding has no rank."""

    class Padded(Net):
        def forward(self, ids, attention_mask):
            return super().forward(ids, None)

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
