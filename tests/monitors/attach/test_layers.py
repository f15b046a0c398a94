"""Tests which layers are measured, their numbers, and the report of layers that are not measured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmqk.monitors import attach
from mmqk.monitors.foreign.layers import layer_numbers, layer_of
from mmqk.monitors.summary import summary_line
from tests.monitors.attach.nets import H, Net, SelfAttention, batches

IMAGE = {"image": range(10, 40)}


def probed(model, **inputs):
    watch = attach(model, modality=IMAGE)
    values = watch.probe(**(inputs or {"ids": batches(1)[0]})).flat()
    assert watch.layers is not None
    return values, watch.layers, summary_line(watch.layers, {}, watch.prober.records, 0.1, [1.0], 100)


def test_layers_whose_attention_is_not_seen_are_named():
    hidden = {2: "by log", 5: "by log"}
    values, layers, line = probed(Net([hidden.get(n, "sdpa") for n in range(8)]))
    assert layers.numbers == [0, 1, 3, 4, 6, 7] and layers.hidden == ["layers.2", "layers.5"] and layers.total == 8
    assert "attention measured in 6 of 8 layers, not in layers.2, layers.5 (maxima over layers" in line
    assert "attn_entropy/image/layer03" in values and not any("layer02" in name for name in values)
    all_values, layers, line = probed(Net())
    assert layers.hidden == [] and "not in" not in line and "attn_entropy/image/layer02" in all_values


def test_a_mask_that_differs_between_heads_is_left_out_and_said():
    values, layers, line = probed(Net(["sdpa", "by head", "by head"]))
    assert layers.numbers == [0] and layers.hidden == ["layers.1", "layers.2"] and layers.total == 3
    assert not any("layer01" in name for name in values)
    assert "attention measured in 1 of 3 layers, not in layers.1, layers.2 (maxima over layers" in line
    assert "not measured (its mask differs between heads): layers.1.attention and 1 more" in line


def test_numbers_are_those_of_the_path_or_of_the_calls():
    assert layer_of("model.layers.12.self_attn") == ("model.layers", 12) and layer_of("attn") is None
    assert layer_numbers(["a.layers.1.x", "a.layers.3.x"]) == [1, 3]
    assert layer_numbers(["a.0.blocks.0", "a.0.blocks.1", "a.1.blocks.0"]) == [0, 1, 2]

    class Shared(Net):  # calls one layer eight times
        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(8):
                x = self.layers[0](x)
            return self.head(x)

    values, layers, _ = probed(Shared(["sdpa"]))
    assert layers.numbers == list(range(8)) and values["q_norm/text/layer00"] != values["q_norm/text/layer07"]


def test_weights_that_are_not_those_of_the_logits_are_left_out(monkeypatch):
    """The eager attention of transformers is patched: it multiplies the keys of the measured call by 3."""
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    from tests.monitors.attach.test_exact import hugging_face

    dense = modeling_llama.eager_attention_forward

    def louder(module, query, key, value, attention_mask, **options):
        return dense(module, query, 3 * key, value, attention_mask, **options)

    model, (ids,) = hugging_face("llama", "LlamaForCausalLM", "LlamaConfig", {}), batches(1)
    whole = probed(model, input_ids=ids)[0]
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", louder)
    values, layers, line = probed(model, input_ids=ids)
    assert "without entropy, mass and rank (its weights are not the softmax of its logits)" in line
    assert {
        name for name in whole if name.startswith(("attn_entropy", "attn_mass", "attn_rank"))
    } == whole.keys() - values.keys()
    assert (
        layers.numbers == [0, 1]
        and values["attn_logit_max/text-text/layer00"] == whole["attn_logit_max/text-text/layer00"]
    )


def test_several_calls_in_one_module_are_one_layer():
    class ByHead(SelfAttention):
        def forward(self, x, mask=None):
            q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            heads = [x.split(1, 1) for x in (q, k, v)]
            out = [F.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in zip(*heads, strict=True)]
            return self.out(torch.cat(out, 1).transpose(1, 2).flatten(2))

    net = Net(["sdpa"] * 3)
    for layer in net.layers:
        layer.attention = ByHead()
    values, layers, line = probed(net)
    assert layers.numbers == list(range(3 * H)) and "attention measured in 3 of 3 layers" in line
    assert layers.seen == layers.total == 3 and "attn_entropy/image/layer11" in values
