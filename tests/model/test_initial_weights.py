"""Initial weights are a function of the seed and the parameter's name, and of nothing else."""

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig, init_weights


def weights(seed=0, **fields):
    config = ModelConfig(**({"blocks": {"text": 60, "image": 40}} | fields))
    return EarlyFusionTransformer(config, seed=seed).state_dict()


@pytest.mark.parametrize(
    "other",
    [
        {"qk_norm": QKNormConfig("layer")},
        {"pre_norm": False, "post_norm": True},
        {"post_norm": True},
        {"mlp": "gelu", "d_ff": 176},
        {"n_layers": 6},
    ],
)
def test_arms_share_every_parameter_they_both_have(other):
    here, there = weights(), weights(**other)
    assert set(here) != set(there)
    for name in set(here) & set(there):
        assert torch.equal(here[name], there[name]), name


def test_the_seed_and_the_name_decide_and_the_global_generator_does_not():
    torch.manual_seed(1)
    here = weights()
    torch.manual_seed(2)
    assert all(torch.equal(value, here[name]) for name, value in weights().items())
    matrices = [name for name, value in here.items() if value.dim() == 2]
    elsewhere = weights(seed=1)
    assert not any(torch.equal(here[name], elsewhere[name]) for name in matrices)
    assert not torch.equal(here["blocks.0.attention.w_q.weight"], here["blocks.1.attention.w_q.weight"])
    model = EarlyFusionTransformer(ModelConfig(blocks={"text": 60, "image": 40}), seed=1)
    init_weights(model, 0)
    assert all(torch.equal(value, here[name]) for name, value in model.state_dict().items())


def test_the_scales_are_those_of_the_table():
    state = weights(d_model=96, d_ff=400, n_layers=1, qk_norm=QKNormConfig("layer"))
    for name, value in state.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            std = value.shape[1] ** -0.5
            assert value.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(value.mean().item()) < 0.05 * std
            cut = name != "embed.weight"
            assert bool(value.abs().max() < 2.3 * std) == cut, name


def test_a_module_without_a_rule_is_refused():
    with pytest.raises(TypeError, match=r"1\.weight of Conv1d"):
        init_weights(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Conv1d(2, 2, 1)), 0)
