"""Tests the adapter in docs/monitors.md and mmqk's own adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mmqk.monitors import attach
from mmqk.monitors.adapters import adapter_for
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, H, Net, V, batches
from tests.monitors.attach.test_exact import HUGGING_FACE, IMAGE, NAMES, hugging_face, modality_of, same

PAGE = Path(__file__).parents[3] / "docs" / "monitors.md"


def adapter_of_the_page():
    """Return the ADAPTER that a Python block of the page defines."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ADAPTER" in c]
    assert len(code.splitlines()) <= 24
    space: dict = {}
    exec(code, space)
    return space["ADAPTER"]


class OwnNet(Net):
    def __init__(self, calls):
        super().__init__(calls)
        self.final_norm = nn.LayerNorm(D)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.final_norm(x))


def test_the_adapter_of_the_documentation_adds_what_lies_beyond_the_attention_call():
    net, (ids,) = OwnNet(["sdpa"] * 8), batches(1, B=3)
    plain = attach(net, modality=IMAGE).probe(ids=ids).flat()
    measured = attach(net, modality=IMAGE, adapter=adapter_of_the_page()).probe(ids=ids).flat()
    assert plain.keys() < measured.keys() and same(measured, plain)

    sites = {}
    for n, layer in enumerate(net.layers):
        for name, module in (("q_raw", layer.attention.q), ("k_raw", layer.attention.k)):
            module.register_forward_hook(
                lambda m, x, out, at=(name, n): sites.update(
                    {at: out.unflatten(-1, (H, -1)).transpose(1, 2), ("attn_in", at[1]): x[0]}
                )
            )
        for name, module in (("attn_out", layer.attention), ("mlp_out", layer.mlp), ("resid", layer)):
            module.register_forward_hook(lambda m, x, out, at=(name, n): sites.update({at: out}))
    net.final_norm.register_forward_hook(lambda m, x, out: sites.update({("final", -1): x[0]}))
    net(ids)
    arrays = {at: x.detach().double().numpy() for at, x in sites.items()}
    expected = brute_force.streams(arrays, modality_of(ids), np.ones(ids.shape, bool), NAMES)
    beyond = ("attn_in_", "q_raw_", "k_raw_", "q_weight_", "k_weight_")
    assert measured.keys() - plain.keys() == {name for name in expected if name.startswith(beyond)}
    assert same(measured, expected) and len(expected) == 8 * 28 + 4
    # The residual stream is measured without the adapter too.
    assert same(plain, {name: x for name, x in expected.items() if not name.startswith(beyond)})
    # Control: with the layers of the sites in reverse order, the comparison fails.
    turned = {(site, 7 - layer if layer >= 0 else layer): x for (site, layer), x in arrays.items()}
    assert not same(measured, brute_force.streams(turned, modality_of(ids), np.ones(ids.shape, bool), NAMES))


@pytest.mark.parametrize("swin", [False, True])
def test_sublayer_outputs_of_chameleon_add_up_to_its_residual_stream(swin):
    """For both placements of the norms, attn_out and mlp_out are the tensors added to the residual stream."""
    model = hugging_face("chameleon", "ChameleonForConditionalGeneration", "ChameleonConfig", {"swin_norm": swin})
    adapter, (ids,), recorded = adapter_for(model), batches(1, B=2), {}
    assert adapter is not None
    for path, module in model.named_modules():
        for site in adapter.at(path):
            module.register_forward_hook(
                lambda m, x, out, site=site, path=path: recorded.update(
                    {(site.name, path.split(".")[2] if site.name != "final" else ""):
                     site.tensor(x[0] if x else None, out[0] if isinstance(out, tuple) else out)}
                )
            )  # fmt: skip
    model(input_ids=ids)
    added = recorded["attn_out", "1"] + recorded["mlp_out", "1"]
    torch.testing.assert_close(recorded["resid", "0"] + added, recorded["resid", "1"])
    torch.testing.assert_close(recorded["final", ""], recorded["resid", "1"])
    assert not torch.allclose(recorded["resid", "0"] + recorded["mlp_out", "1"], recorded["resid", "1"])


def test_no_adapter_is_found_for_what_is_not_known():
    assert adapter_for(Net()) is None


def test_the_adapter_is_found_behind_fully_shard():
    """fully_shard replaces the class of a module with a subclass in torch's package."""
    model, plain = (hugging_face(*HUGGING_FACE["llama"][:4]) for _ in range(2))
    other, (ids,) = hugging_face(*HUGGING_FACE["llama"][:4]), batches(1, B=2)
    for changed, package in ((model, "torch.distributed.fsdp._fully_shard"), (other, "mine")):
        for layer in changed.model.layers:
            layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {"__module__": package})
    assert adapter_for(model) == adapter_for(plain) is not None
    expected = attach(plain, modality=IMAGE).probe(input_ids=ids).flat()
    assert attach(model, modality=IMAGE).probe(input_ids=ids).flat() == expected
    assert "q_raw_norm/text/layer01" in expected
    assert adapter_for(other) is None  # the control: a subclass that does other things


class TimmNames(nn.Module):
    """A decoder whose modules have the names of timm's, beside a vision tower of timm."""

    def __init__(self, tower):
        super().__init__()
        net = OwnNet(["sdpa"] * 2)
        self.embed, self.blocks, self.norm, self.head = net.embed, net.layers, net.final_norm, net.head
        for block in self.blocks:
            block.attn = nn.Module()
            block.attn.qkv = nn.Linear(D, 3 * D)  # called, but not used for the attention
        self.tower = tower

    def forward(self, ids, pixels):
        x = self.embed(ids) + 0 * self.tower(pixels).sum()
        for block in self.blocks:
            block.attn.qkv(x)
            x = block(x)
        return self.head(self.norm(x))


def test_an_adapter_reads_only_the_layers_of_its_class():
    """The tower selects timm's adapter; the decoder's modules only have the same names."""
    timm = pytest.importorskip("timm")
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 0}
    model, (ids,) = TimmNames(timm.create_model("vit_tiny_patch16_224", **size)), batches(1, B=3)
    adapter = adapter_for(model)
    assert adapter is not None and adapter.layers == {"tower.blocks.0"}
    assert adapter.at("tower.blocks.0.attn.qkv") and adapter.at("tower.norm") and adapter.at("tower.blocks.0")
    assert not adapter.at("blocks.0.attn.qkv") and not adapter.at("norm") and not adapter.at("tower.blocks.0.norm")
    measured = attach(model, modality=IMAGE).probe(ids=ids, pixels=torch.zeros(3, 3, 8, 8)).flat()
    net = OwnNet(["sdpa"] * 2)
    net.embed, net.layers, net.final_norm, net.head = model.embed, model.blocks, model.norm, model.head
    expected = attach(net, modality=IMAGE).probe(ids=ids).flat()
    assert measured.keys() == expected.keys() and same(measured, expected) and "final_norm/text" in measured
    # The control: without the limit to the tower's layers, the adapter reads the decoder.
    everywhere = attach(model, modality=IMAGE, adapter=replace(adapter, layers=None))
    wrong = everywhere.probe(ids=ids, pixels=torch.zeros(3, 3, 8, 8)).flat()
    assert "q_raw_norm/text/layer00" in wrong and "q_raw_norm/text/layer00" not in measured


def test_layers_of_a_model_in_a_numbered_list_keep_their_numbers():
    """In parts.0.model.layers.1 only the last number is the number of the layer."""
    model = hugging_face("llama", "LlamaForCausalLM", "LlamaConfig", {}, layers=3)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([model, nn.Linear(V, V)])

        def forward(self, input_ids):
            return self.parts[1](self.parts[0](input_ids=input_ids).logits)

    (ids,) = batches(1, B=3)
    expected = attach(model, modality=IMAGE).probe(input_ids=ids).flat()
    measured = attach(Inside(), modality=IMAGE).probe(input_ids=ids).flat()
    series = {tag for tag in expected if not tag.startswith("out_")}
    assert series == {tag for tag in measured if not tag.startswith("out_")}
    assert same(measured, {tag: expected[tag] for tag in series})
    assert {f"attn_in_norm/text/layer{n:02d}" for n in range(3)} <= series
