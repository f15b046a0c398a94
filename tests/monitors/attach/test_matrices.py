"""Compares norm, spectral norm and stable rank of a third-party model's matrices with numpy's singular values."""

from __future__ import annotations

import numpy as np
import pytest

from mmqk.monitors import attach
from tests.monitors.attach.nets import batches
from tests.monitors.attach.test_exact import IMAGE
from tests.monitors.attach.test_sides import random_
from tests.monitors.attach.test_stream import FAMILIES, L


@pytest.mark.parametrize("name, expected", [
    ("GPT2LMHeadModel", {"attn_c_attn": "attn.c_attn", "mlp_c_fc": "mlp.c_fc"}),
    ("GPTNeoXForCausalLM", {"attention_query_key_value": "attention.query_key_value"}),
])  # fmt: skip
def test_sizes_equal_those_of_the_singular_values(name, expected):
    transformers = pytest.importorskip("transformers")
    config, options, layer, *_ = FAMILIES[name]
    model = random_(getattr(transformers, name)(getattr(transformers, config)(**options)))
    (ids,) = batches(1, B=2)
    flat = attach(model, modality=IMAGE, matrices=True).probe(input_ids=ids).flat()
    for n in range(L):
        matrices = [m for m in model.get_submodule(layer.format(n)).parameters() if m.ndim == 2]
        assert sum(tag.endswith(f"_stable_rank/layer{n:02d}") for tag in flat) == len(matrices) == 4
        for tag, path in expected.items():
            s = np.linalg.svd(model.get_submodule(f"{layer.format(n)}.{path}").weight.detach().numpy())[1]
            values = [flat[f"{tag}_{size}/layer{n:02d}"] for size in ("norm", "spectral", "stable_rank")]
            norm = np.sqrt((s**2).sum())
            np.testing.assert_allclose(values, [norm, s[0], (norm / s[0]) ** 2], rtol=1e-5)
    # Control: another layer has another stable rank. By default no matrix is measured.
    assert values[2] != flat[f"{tag}_stable_rank/layer00"]
    assert not any("stable_rank" in tag for tag in attach(model, modality=IMAGE).probe(input_ids=ids).flat())
