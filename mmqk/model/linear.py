"""Matrices of the blocks, σReparam, layers with one copy per modality, and initial weights.

Each initial parameter depends only on the seed and its name, so two arms start with equal values of all parameters
that they have in common.
"""

import hashlib
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .norms import at_least_fp32

TINY = 1e-30
# Power iterations after an update. In the first 30 steps of configs/demo.yaml, at a learning rate of 0.03 with 5
# warm-up steps, sigma was up to 31 % too low with one iteration (as in the authors' code), and up to 6 %
# with ten.
POWER_STEPS = 10
_STD_OF_CUT_NORMAL = 0.87962566103423978  # standard deviation of a unit normal truncated at -2 and 2


class Linear(nn.Linear):
    """`W x` without bias.

    Attributes:
        init_scale: Factor on the standard deviation of the initial weights.
    """

    def __init__(self, d_in: int, d_out: int, init_scale: float = 1.0) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.init_scale = init_scale


class SigmaLinear(Linear):
    """`gamma / sigma(W) * W x`, with the largest singular value sigma (σReparam, Zhai et al. 2023, arXiv 2303.06296).

    sigma is computed as `u^T W v` in fp32, which never exceeds the largest singular value. The forward pass does not
    change u and v. They start as the leading singular vectors, and `POWER_STEPS` calls of `power_step` after every
    update adapt them to W. u and v are in the state dict, so a resumed run has the same sigma.

    Args:
        d_in: Width of the input.
        d_out: Width of the output.
        init_scale: See `Linear`.
        keep: Whether gamma starts at sigma(W), which gives the plain `W x`, or at 1.
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
        """Return the estimate of the largest singular value, differentiable in W."""
        with torch.autocast(self.weight.device.type, enabled=False):
            wide = at_least_fp32(self.weight)
            return at_least_fp32(self.u) @ (wide @ at_least_fp32(self.v))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the matrix to the last axis of `x`."""
        with torch.autocast(self.weight.device.type, enabled=False):
            scale = self.gamma / self.sigma().clamp_min(TINY)  # the output of a zero matrix is zero
            weight = (scale * at_least_fp32(self.weight)).to(self.weight.dtype)
        return F.linear(x, weight)

    def extra_repr(self) -> str:
        """Return the widths and the initial value of gamma."""
        return f"{super().extra_repr()}, gamma starts at {'sigma(W)' if self.keep else 1}"

    @torch.no_grad()
    def power_step(self) -> None:
        """Run one power iteration in fp32: `v <- W^T u`, then `u <- W v`, each scaled to length 1."""
        with torch.autocast(self.weight.device.type, enabled=False):
            wide = at_least_fp32(self.weight)
            v = _direction(at_least_fp32(self.u) @ wide, at_least_fp32(self.v))
            self.v.copy_(v)
            self.u.copy_(_direction(wide @ v, at_least_fp32(self.u)))

    @torch.no_grad()
    def start(self) -> None:
        """Set u and v to the leading singular vectors of W and gamma to its initial value, in fp64 on the CPU.

        This uses an eigendecomposition. Power iteration would need hundreds of steps, because the largest singular
        values of a random matrix lie close together.
        """
        wide = self.weight.detach().cpu().double().nan_to_num()
        tall = wide.shape[0] > wide.shape[1]
        leading = torch.linalg.eigh(wide.T @ wide if tall else wide @ wide.T).eigenvectors[:, -1]
        self.u.copy_(_direction(wide @ leading, self.u.cpu().double()) if tall else leading)
        self.power_step()
        if self.keep:
            self.gamma.copy_(self.sigma())


def _direction(vector: Tensor, before: Tensor) -> Tensor:
    """Return `vector` scaled to length 1, or `before` if the length of `vector` is zero or not finite."""
    length = vector.norm()
    return torch.where((length > TINY) & length.isfinite(), vector / length, before)


def power_step(model: nn.Module) -> None:
    """Run `POWER_STEPS` power iterations of every σReparam matrix; call it after each optimizer step."""
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            for _ in range(POWER_STEPS):
                module.power_step()


def linear(config: ModelConfig, d_in: int, d_out: int, init_scale: float = 1.0) -> Linear:
    """Return a matrix of a block: a `Linear`, or a `SigmaLinear` if `config.weight_reparam` is sigma."""
    if config.weight_reparam == "none":
        return Linear(d_in, d_out, init_scale)
    return SigmaLinear(d_in, d_out, init_scale, keep=config.reparam_gamma == "sigma")


class ByModality(nn.Module):
    """A layer with one copy per modality; each token uses the copy of its modality.

    Every copy processes all tokens and one result per token is kept. This multiplies the operations by the number
    of modalities, but the shapes do not depend on the data.

    Args:
        make: Creates one copy.
        n: Number of modalities.
    """

    def __init__(self, make: Callable[[], nn.Module], n: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(make() for _ in range(n))

    def forward(self, x: Tensor, modality_BT: Tensor, *more: Tensor) -> Tensor:
        """Call each copy with `(x, *more)` and select each token's result; `x` is (B, T, ...).

        A token whose modality number has no copy uses the first copy.
        """
        out = self.copies[0](x, *more)
        of_token = modality_BT.view(*modality_BT.shape, *(1,) * (x.ndim - 2))
        for m, copy in enumerate(self.copies[1:], start=1):
            out = torch.where(of_token == m, copy(x, *more), out)
        return out


def untied(make: Callable[[], nn.Module], config: ModelConfig, untie: bool) -> nn.Module:
    """Return the layer of `make`, or, if ``untie`` is true, a `ByModality` with one copy for every modality."""
    return ByModality(make, len(config.vocab_sizes)) if untie else make()


def through(layer: nn.Module, x: Tensor, modality_BT: Tensor | None, *more: Tensor) -> Tensor:
    """Return `layer(x, *more)`; if the layer has copies, each token uses the copy of its modality."""
    return layer(x, modality_BT, *more) if isinstance(layer, ByModality) else layer(x, *more)


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on `seed` and the parameter's name only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Set every parameter of `model` (Wortsman et al. 2023, arXiv 2309.14322, section 2.2).

    | parameter      | values                                                                                 |
    | -------------- | -------------------------------------------------------------------------------------- |
    | embedding      | normal, standard deviation 1 / sqrt(d_model), times `embed_init` of its modality       |
    | matrices       | normal truncated at two standard deviations; its standard deviation after truncation   |
    |                | is 1 / sqrt(fan_in); `output_init` scales the last matrix of a sublayer                |
    | gains, scales  | `initial` of their module: gains 1, biases 0                                           |

    Adding or removing a parameter does not change the others. All copies of a layer for different modalities start
    equal. The values are drawn in fp32 on the CPU, so they are the same on every device.

    Raises:
        TypeError: the table has no row for a parameter.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # a checkpoint provides the values
    done = set()
    for module_name, module in model.named_modules():
        shared_name = re.sub(r"\.copies\.\d+", "", module_name)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in done:  # a tied head is initialized as the embedding
                continue
            done.add(parameter)
            values = torch.empty(parameter.shape)
            generator = parameter_generator(seed, f"{shared_name}.{name}".removeprefix("."))
            if isinstance(module, nn.Embedding):
                values.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                for start, end, factor in getattr(module, "row_scales", ()):
                    values[start:end] *= factor
            elif isinstance(module, nn.Linear) and name == "weight":
                std = parameter.shape[1] ** -0.5 / _STD_OF_CUT_NORMAL * getattr(module, "init_scale", 1.0)
                nn.init.trunc_normal_(values, 0.0, std, -2 * std, 2 * std, generator=generator)
            elif name in getattr(module, "initial", {}):
                values.fill_(module.initial[name])
            else:
                raise TypeError(f"{module_name}.{name} of {type(module).__name__} has no initial values.")
            parameter.copy_(values)
        if isinstance(module, SigmaLinear):
            module.start()
