"""Tests the adapter in docs/monitors.md and mmqk's own adapters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from torch import nn

from mmqk.monitors import attach
from mmqk.monitors.adapters import adapter_for
from tests.monitors import brute_force
from tests.monitors.attach.nets import D, H, Net, batches
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
