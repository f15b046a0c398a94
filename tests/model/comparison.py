"""Compares two differentiable functions of named tensors, and builds small modules to compare.

Both functions take the same leaf tensors, named like mmqk's parameters. A peer whose matrices are stacked or
permuted builds them from these leaves, so the gradients of both functions have the same names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.model.attention import Attention
from mmqk.model.backends import mask_of
from mmqk.model.linear import SigmaLinear
from mmqk.model.norms import ResidualGate, qk_norm, stream_norm
from mmqk.model.transformer import MLP, Block
from tests.model.small import BLOCKS, SMALL
from tests.peers import Peer

B, T, D, H, K, LAYERS = 2, 9, 32, 4, 8, 4
IDS_BT = torch.tensor([[1, 12, 2, 18, 3, 13, 20, 4], [11, 11, 0, 5, 19, 6, 7, 14]])

EXACT = 1e-11  # tolerance of peers that compute in fp64 throughout
FP32_INSIDE = 5e-6  # tolerance of peers whose softmax, norms or rotary tables are in fp32
MEASURED = 1e-2  # tolerance of standard deviations of random numbers
TINY = 1e-30  # epsilon of mmqk's norms for peers without epsilon

Leaves = Mapping[str, Tensor]
Function = Callable[[Leaves], Tensor]


@dataclass(frozen=True, kw_only=True)
class Comparison(Peer):
    """Functions to compare: `ours(leaves)` must equal `theirs(leaves)`, and each of the `controls` must differ.

    The name of a control describes its error.
    """

    leaves: Callable[[], Leaves] = dict
    ours: Function
    theirs: Function
    controls: Mapping[str, Function] = field(default_factory=dict)


def leaves_of(make: Callable[[], nn.Module], spread: float = 0.3, **inputs: tuple[int, ...]) -> Callable[[], Leaves]:
    """Return a function that draws fp64 values for the parameters of a module and for inputs of these shapes.

    Gains, biases and scales vary around their initial values, because unit gains hide errors.
    """

    def draw() -> Leaves:
        generator = torch.Generator().manual_seed(11)
        leaves = {}
        with torch.random.fork_rng():
            module = make()
        matrices = {f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Linear)}
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            size, first = (1.5 * parameter.shape[-1] ** -0.5, 0) if name in matrices else (spread, parameter.detach())
            leaves[name] = first + size * noise
        for name, shape in inputs.items():
            leaves[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        return leaves

    return draw


def call(module: nn.Module, parameters: Leaves, *args, **kwargs) -> Tensor:
    """Run the forward pass of a module in fp64 with these parameters; raise KeyError if one is missing."""
    own = {name: parameters[name] for name, _ in module.named_parameters()}
    return functional_call(module.double(), own, args, kwargs)


def rope64(positions: bool = True) -> tuple[Tensor, Tensor]:
    """Return rotary tables in fp64 (`rope_tables` returns fp32); without positions all angles are 0."""
    angle = torch.arange(T)[:, None] * 10.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    angle = angle * positions
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def causal(config: ModelConfig) -> Tensor:
    """Return the attention mask of the first layer."""
    return mask_of("math", T, torch.device("cpu"), config.window_of(0))


def attention(positions: bool = True, **fields) -> tuple[Callable[[], Attention], Function]:
    """Return the constructor and the forward function of our attention layer."""
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=D, n_heads=H, **fields)

    def forward(leaves: Leaves) -> Tensor:
        return call(Attention(config, "math"), leaves, leaves["x"], rope64(positions), causal(config))[0]

    return lambda: Attention(config, "math"), forward


def mlp(**fields) -> tuple[Callable[[], MLP], Function]:
    """Return the constructor and the forward function of our MLP."""
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=D, n_heads=H, **fields)
    return lambda: MLP(config), lambda leaves: call(MLP(config), leaves, leaves["x"])


def residual_gate(temperature: float) -> tuple[Callable[[], nn.Module], Function]:
    """Return the constructor and the forward function of our residual gate on `x` and `branch`."""

    def forward(leaves: Leaves) -> Tensor:
        return call(ResidualGate(D, temperature), leaves, leaves["x"], leaves["branch"])

    return lambda: ResidualGate(D, temperature), forward


def block(
    positions: bool = False, seed: int | None = None, layer: int = 0, **fields
) -> tuple[Callable[[], Block], Function]:
    """Return the constructor and the forward function of our block. With a seed the block is in training mode, and
    the seed determines its dropout."""
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=D, n_heads=H, mlp=fields.pop("mlp", "gelu"), **fields)

    def forward(leaves: Leaves) -> Tensor:
        with torch.random.fork_rng():
            module = Block(config, "math", layer).train(seed is not None)
            torch.manual_seed(seed or 0)
            return call(module, leaves, leaves["x"], rope64(positions), causal(config))[0]

    return lambda: Block(config, "math", layer), forward


def model(given: Tensor | None = None, **fields) -> tuple[Callable[[], EarlyFusionTransformer], Function]:
    """Return the constructor and the forward function of our whole model on `IDS_BT`."""
    config = ModelConfig(**(SMALL | {"n_layers": 2} | fields))

    def forward(leaves: Leaves) -> Tensor:
        return call(EarlyFusionTransformer(config), leaves, IDS_BT, given)

    return lambda: EarlyFusionTransformer(config), forward


def norm(**fields) -> tuple[Callable[[], nn.Module], Function]:
    """Return the constructor and the forward function of our QK-Norm (on `x` split into heads) or stream norm."""
    config, heads = ModelConfig(vocab_sizes=BLOCKS, d_model=D, n_heads=H, **fields), "qk_norm" in fields

    def make() -> nn.Module:
        return qk_norm(config.qk_norm, H, K, "q") if heads else stream_norm(config)

    def forward(leaves: Leaves) -> Tensor:
        return call(make(), leaves, split(leaves["x"]) if heads else leaves["x"]).view(B, T, D)

    return make, forward


def split(x: Tensor) -> Tensor:
    """Reshape (B, T, H K) to (B, T, H, K)."""
    return x.unflatten(-1, (H, K))


def sigma_leaves() -> Leaves:
    """Return a square matrix, gamma and an input."""
    return leaves_of(lambda: SigmaLinear(D, D), x=(B, T, D))()


def sigma_vectors(leaves: Leaves, steps: int) -> SigmaLinear:
    """Return a σReparam matrix with these weights, after `steps` power steps from fixed vectors."""
    module = SigmaLinear(D, D).double()
    module.weight.data = leaves["weight"].detach().clone()
    module.u.copy_(torch.linspace(-1, 1, D) / torch.linspace(-1, 1, D).norm())
    for _ in range(steps):
        module.power_step()
    return module


def sigma_linear(steps: int) -> Function:
    """Return the forward function of the matrix that `sigma_vectors` returns."""
    return lambda leaves: call(sigma_vectors(leaves, steps), leaves, leaves["x"])


def initial_sizes(of: str = "outputs", **fields) -> Function:
    """Return a function that measures standard deviations of initial weights, divided by 1 / sqrt(fan_in).

    ``of`` selects the matrices: "outputs" for the last matrix of every sublayer, "every matrix" for W_q, W_k, W_v,
    W_o and the matrices of the MLP, "embed" for the embedding rows of every modality.
    """

    def measure(_: Leaves) -> Tensor:
        blocks = {"text": 256, "image": 256, "sound": 256}
        shape = {"vocab_sizes": blocks, "d_model": 256, "n_layers": LAYERS, "d_ff": 256}
        made = EarlyFusionTransformer(ModelConfig(**(shape | fields)))
        if of == "embed":
            matrices = list(made.embed.weight.split(256))
        elif of == "every matrix":
            matrices = [m.weight for b in made.blocks for m in b.modules() if isinstance(m, nn.Linear)]
        else:
            matrices = [w for b in made.blocks for w in (b.attention.w_o.weight, b.mlp.w_down.weight)]
        return torch.stack([matrix.std() * matrix.shape[1] ** 0.5 for matrix in matrices]).detach()

    return measure


def qk(*args, **fields) -> dict:
    """Return the settings of a model with this QK-Norm."""
    return {"qk_norm": QKNormConfig(*args, **fields)}


def compare(
    remedies: tuple[str, ...],
    name: str,
    tolerance: float,
    build: Callable[..., tuple[Callable[[], nn.Module], Function]],
    fields: dict,
    theirs: Function,
    wrong: Mapping[str, dict | Function],
    spread: float = 0.3,
) -> Comparison:
    """Return a comparison of our module with `theirs`.

    A control in `wrong` is a change of the fields of our module, or another function of the leaves.
    """
    make, ours = build(**fields)
    inputs = {} if build is model else {"x": (B, T, D)}
    if build is residual_gate:
        inputs["branch"] = (B, T, D)
    controls = {what: build(**(fields | c))[1] if isinstance(c, dict) else c for what, c in wrong.items()}
    leaves = leaves_of(make, spread, **inputs)
    return Comparison(remedies, name, tolerance, leaves=leaves, ours=ours, theirs=theirs, controls=controls)


def outcome(function: Function, leaves: Leaves) -> list[Tensor]:
    """Return the value, and for every leaf the gradient of the value's dot product with a fixed random tensor."""
    inputs = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    value = function(inputs)
    if not inputs:
        return [value]
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(12), dtype=value.dtype)
    gradients = torch.autograd.grad(value, list(inputs.values()), upstream / math.sqrt(value[0].numel()))
    return [value.detach(), *gradients]
