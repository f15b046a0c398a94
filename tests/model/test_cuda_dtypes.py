"""Checks the dtype of every site under CUDA's autocast without a GPU, with fake tensors that have a device, a shape
and a dtype, but no values.

CPU autocast differs: unlike CUDA's, it does not convert norms, powers and sums to fp32.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.model import backends as kernels
from mmqk.training.losses import chunked_losses, modality_losses
from tests.model.small import BLOCKS, SMALL, VARIANTS, refuses_sdpa

NARROW, WIDE = torch.bfloat16, torch.float32
MATRICES = ("q_raw", "k_raw", "q", "k", "v", "attn_out", "mlp_out")


@contextmanager
def cuda_autocast():
    """Enable CUDA's autocast to bf16 without a GPU; `torch.autocast("cuda", torch.bfloat16)` would need one."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", NARROW)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.fixture
def fake(monkeypatch):
    """Use fake tensors, so that no kernel runs.

    SDPA would query the driver for a kernel, so it is replaced by a sum of its inputs.
    """

    def same_shape(q, k, v, **_):
        return v + 0 * (q + k)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", same_shape)
    monkeypatch.setattr("mmqk.model.transformer.init_weights", lambda *_: None)
    with FakeTensorMode():
        yield


def types_of(**fields) -> tuple[dict[str, set[torch.dtype]], set[torch.dtype]]:
    """Return the dtypes of every site, and of the losses in dense and chunked form."""
    config = ModelConfig(**(SMALL | fields))
    with torch.device("cuda"):
        model = EarlyFusionTransformer(config, "math" if refuses_sdpa(fields) else "sdpa")
        ids_BT, weights_M = torch.zeros(2, 16, dtype=torch.long), torch.ones(len(BLOCKS))
        mask_BT = torch.ones(2, 16, dtype=torch.bool)
    found: dict[str, set[torch.dtype]] = {}

    def observer(site, layer, tensor):
        found.setdefault(site, set()).add(tensor.dtype)

    targets = ids_BT, ids_BT, mask_BT
    with cuda_autocast():
        dense_sums = modality_losses(model(ids_BT, ids_BT, observer=observer), *targets, len(BLOCKS))
        hidden_BTD = model(ids_BT, ids_BT, output="hidden")
        chunks = chunked_losses(hidden_BTD, model.head.weight, *targets, weights_M, 1e-5, 8)
    parts = [(sums.ce, sums.log_z, sums.log_z_sq) for sums in (dense_sums, chunks)]
    return found, {part.dtype for sums in parts for part in sums}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_arm_computes_in_the_same_types_on_a_gpu(fake, name):
    found, losses = types_of(**VARIANTS[name])
    assert {site: found[site] for site in MATRICES} == {site: {NARROW} for site in MATRICES}
    for site in ("resid", "final", "logits"):
        assert found[site] == {WIDE}, site
    assert losses == {WIDE}


def test_a_norm_that_widens_would_be_seen(fake, monkeypatch):
    """The control: torch's norm returns fp32 under CUDA autocast (from torch 2.12 on), which attention refuses."""

    def widens(self, x):
        return F.rms_norm(x, self.shape, None, self.eps).float()

    monkeypatch.setattr("mmqk.model.norms.Norm.forward", widens)
    with pytest.raises(TypeError, match=r"q, k and v must have one dtype"):
        types_of(qk_norm=QKNormConfig("rms"))
