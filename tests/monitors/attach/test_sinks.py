"""Compares the statistics of learned sinks with the attention weights that a third-party model returns."""

from __future__ import annotations

import pytest
import torch

from mmqk.monitors import attach
from mmqk.monitors.foreign.calls import Call, of_transformers, of_transformers_flash
from tests.monitors.attach import test_sides as sides
from tests.monitors.attach.nets import Net, SelfAttention, V, alibi, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, modality_of, same
from tests.monitors.attach.test_sides import random_, summary

CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]


def gpt_oss():
    t = pytest.importorskip("transformers")
    config = t.GptOssConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=64,
        layer_types=["full_attention"] * 2, attn_implementation="eager",
    )  # fmt: skip
    model = random_(t.GptOssForCausalLM(config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 8  # sinks as large as the largest logits
    return model


def of_weights(weights, modality) -> dict[str, float]:
    """Return the expected statistics by tag. The weights sum to less than 1; the rest is the weight of the sink."""
    return sides.of_weights(dict(enumerate(weights)), modality, modality, NAMES, NAMES, sink=True)


def test_the_weights_of_gpt_oss_have_a_sink():
    model, (ids,) = gpt_oss(), batches(1, B=3)
    watch = attach(model, modality=IMAGE)
    measured = watch.probe(input_ids=ids).flat()
    with torch.no_grad():
        expected = of_weights(model(input_ids=ids, output_attentions=True).attentions, modality_of(ids))
    assert len(expected) == 16 and same(measured, expected)
    assert 0.05 < measured["sink_mass/text/layer00"] < 0.95 and "attn_rank/layer01" in measured
    assert "without" not in summary(watch)
    # Control: other sinks give other weights.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 1
        other = of_weights(model(input_ids=ids, output_attentions=True).attentions, modality_of(ids))
    assert not same(measured, other)


class Sinks(torch.nn.Module):
    def __init__(self, sinks) -> None:
        super().__init__()
        self.sinks, self.is_causal = sinks, True


def test_dense_attention_in_place_of_a_kernel_has_the_sink():
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, generator=random) for _ in range(3))
    sinks = torch.randn(4, generator=random)
    z = (q @ k.mT * 8**-0.5).masked_fill(~CAUSAL, -torch.inf)
    rest = sinks.exp()[:, None, None]
    expected = (z.exp() / (z.exp().sum(-1, keepdim=True) + rest)) @ v
    flash = of_transformers_flash(Sinks(None), q, k, v, s_aux=sinks)
    torch.testing.assert_close(flash.output(), expected)
    eager = of_transformers(q, k, v, module=Sinks(sinks), attention_mask=CAUSAL)
    torch.testing.assert_close(eager.output(), expected)
    plain = Call(q, k, v, 8**-0.5, CAUSAL)
    assert not torch.allclose(plain.output(), expected, rtol=1e-2)


def test_the_sinks_that_a_layer_adds_after_flex_attention():
    """As in transformers, the layer has the sinks, and the operator does not get them."""

    class WithSinks(SelfAttention):
        def __init__(self):
            super().__init__("flex")
            self.sinks = torch.nn.Parameter(torch.full((4,), 3.0))

    net, (ids,) = Net(["flex"] * 2), batches(1, B=3)
    net.layers[1].attention = WithSinks()
    net.layers[1].attention.keep = kept = []
    watch = attach(net, modality=IMAGE)
    measured = watch.probe(ids=ids).flat()
    with torch.no_grad():
        net(ids)
    q, k = (x.double() for x in kept[0])
    hidden = ~torch.ones(16, 16, dtype=torch.bool).tril()
    z = (8**-0.5 * q @ k.mT + alibi(16)).masked_fill(hidden, -torch.inf)
    for sink in (0.0, 3.0):  # 0 is the control
        weights = torch.cat([z, torch.full((3, 4, 16, 1), sink)], -1).softmax(-1)[..., :-1]
        expected = of_weights([weights], modality_of(ids))
        layer1 = {tag.replace("layer00", "layer01"): x for tag, x in expected.items()}
        assert same(measured, layer1) == (sink == 3) and len(layer1) == 8
    s_sq = torch.linalg.svdvals(weights).square()
    rank = float((s_sq.sum(-1).square() / s_sq.square().sum(-1)).mean())
    assert measured["attn_rank/layer01"] == pytest.approx(rank, rel=1e-4)
    assert "sink_mass/text/layer00" not in measured and "without" not in summary(watch)
