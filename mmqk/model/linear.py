"""Matrices of the blocks, σReparam, and layers that each modality has a copy of."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .norms import at_least_fp32

TINY = 1e-30
# Power iterations after an update. With one, as in the source, sigma was up to 31 % below the true one in the first
# 30 steps of configs/demo.yaml at a learning rate of 0.03 with 5 steps of warm-up; with ten up to 6 %.
POWER_STEPS = 10


class Linear(nn.Linear):
    """`W x` without bias.

    Attributes:
        init_scale: Factor on the standard deviation of the initial weights.
    """

    def __init__(self, d_in: int, d_out: int, init_scale: float = 1.0) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.init_scale = init_scale


class SigmaLinear(Linear):
    """`gamma / sigma(W) * W x`, sigma the largest singular value of W (σReparam, Zhai et al. 2023, arXiv 2303.06296).

    sigma is `u^T W v` in fp32, which is never above the true one. The forward takes u and v as they are and never
    writes them. They start as the leading singular vectors; `power_step` brings them nearer to those of the present
    W and is called `POWER_STEPS` times after every update. Both are in the state dict, so a resumed run goes on with
    the same sigma.

    Args:
        d_in: Width of the input.
        d_out: Width of the output.
        init_scale: As of `Linear`.
        keep: Whether gamma starts at sigma(W), so that nothing changes at first, or at 1.
    """

    def __init__(self, d_in: int, d_out: int, init_scale: float = 1.0, keep: bool = True) -> None:
        super().__init__(d_in, d_out, init_scale)
        self.keep = keep
        self.gamma = nn.Parameter(torch.ones(()))
        self.initial = {"gamma": 1.0}
        self.u: Tensor
        self.v: Tensor
        self.register_buffer("u", torch.zeros(d_out))
        self.register_buffer("v", torch.zeros(d_in))

    def sigma(self) -> Tensor:
        """The present estimate of the largest singular value, differentiable in W."""
        with torch.autocast(self.weight.device.type, enabled=False):
            wide = at_least_fp32(self.weight)
            return at_least_fp32(self.u) @ (wide @ at_least_fp32(self.v))

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis of `x`."""
        with torch.autocast(self.weight.device.type, enabled=False):
            scale = self.gamma / self.sigma().clamp_min(TINY)  # a matrix of zeros stays one
            weight = (scale * at_least_fp32(self.weight)).to(self.weight.dtype)
        return F.linear(x, weight)

    def extra_repr(self) -> str:
        """Widths, and where gamma starts."""
        return f"{super().extra_repr()}, gamma starts at {'sigma(W)' if self.keep else 1}"

    @torch.no_grad()
    def power_step(self) -> None:
        """One power iteration in fp32: `v <- W^T u`, then `u <- W v`, each at length 1."""
        with torch.autocast(self.weight.device.type, enabled=False):
            wide = at_least_fp32(self.weight)
            v = _direction(at_least_fp32(self.u) @ wide, at_least_fp32(self.v))
            self.v.copy_(v)
            self.u.copy_(_direction(wide @ v, at_least_fp32(self.u)))

    @torch.no_grad()
    def start(self) -> None:
        """u, v and gamma of the present W: its leading singular vectors, by an eigendecomposition in fp64 on the CPU.

        Power iterations would need hundreds: the largest singular values of a random matrix lie close together.
        """
        wide = self.weight.detach().cpu().double().nan_to_num()
        tall = wide.shape[0] > wide.shape[1]
        leading = torch.linalg.eigh(wide.T @ wide if tall else wide @ wide.T).eigenvectors[:, -1]
        self.u.copy_(_direction(wide @ leading, self.u.cpu().double()) if tall else leading)
        self.power_step()
        if self.keep:
            self.gamma.copy_(self.sigma())


def _direction(vector: Tensor, before: Tensor) -> Tensor:
    """`vector` at length 1, or what was there before where it has none."""
    length = vector.norm()
    return torch.where((length > TINY) & length.isfinite(), vector / length, before)


def power_step(model: nn.Module) -> None:
    """`POWER_STEPS` power iterations of every σReparam matrix of `model`: call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            for _ in range(POWER_STEPS):
                module.power_step()


def linear(config: ModelConfig, d_in: int, d_out: int, init_scale: float = 1.0) -> Linear:
    """A matrix of a block, as `config.weight_reparam` says."""
    if config.weight_reparam == "none":
        return Linear(d_in, d_out, init_scale)
    return SigmaLinear(d_in, d_out, init_scale, keep=config.reparam_gamma == "sigma")


class ByModality(nn.Module):
    """A layer that every modality has a copy of; each token passes through its own.

    All copies see all tokens and one result is kept, so it costs as many times the operations as there are
    modalities, and its shapes do not depend on the data.

    Args:
        make: Makes one copy.
        n: Number of modalities.
    """

    def __init__(self, make: Callable[[], nn.Module], n: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(make() for _ in range(n))

    def forward(self, x: Tensor, modality_BT: Tensor) -> Tensor:
        """`x` is (B, T, ...); a modality number without a copy takes the first."""
        out = self.copies[0](x)
        of_token = modality_BT.view(*modality_BT.shape, *(1,) * (x.ndim - 2))
        for m, copy in enumerate(self.copies[1:], start=1):
            out = torch.where(of_token == m, copy(x), out)
        return out


def untied(make: Callable[[], nn.Module], config: ModelConfig, untie: bool) -> nn.Module:
    """What `make` makes, once or for every modality."""
    return ByModality(make, len(config.blocks)) if untie else make()


def through(layer: nn.Module, x: Tensor, modality_BT: Tensor | None) -> Tensor:
    """`layer(x)`, each token through the copy of its modality where there are copies."""
    return layer(x, modality_BT) if isinstance(layer, ByModality) else layer(x)
