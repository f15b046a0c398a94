"""Tests `attach` in an environment that has PyTorch and lacks mmqk's other dependencies."""

from __future__ import annotations

from dataclasses import replace

from tests.test_imports import ROOT, RULES, check

ATTACH = """
import torch, tempfile
from torch import nn
from mmqk.monitors import attach
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model, ids, logged = Net(), torch.arange(20).repeat(3, 1), []
watch = attach(model, modality={"image": range(5, 9)}, every_n_steps=2, out=tempfile.mkdtemp(),
               log=lambda values, step: logged.append(values))
for _ in range(2):
    model(ids).sum().backward()
    watch.step()
watch.close()
assert logged[0]["attn_layers_seen"] == 2 and "attn_entropy/text/layer01" in logged[0], logged
"""


def test_pytorch_alone_is_enough():
    assert check(replace(RULES["monitors"], then=ATTACH), ROOT) == "kept"
