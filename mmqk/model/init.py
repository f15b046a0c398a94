"""Initial weights. Each parameter depends only on the seed and its name, so two arms start with equal values of all
parameters that they have in common."""

import hashlib
import re

import torch
from torch import nn

from .linear import SigmaLinear

_STD_OF_CUT_NORMAL = 0.87962566103423978  # standard deviation of a unit normal truncated at -2 and 2


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
