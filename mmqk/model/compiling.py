"""torch.compile of a model, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from .transformer import Block, EarlyFusionTransformer

MOST_GRAPHS = 64


def compile_blocks(model: EarlyFusionTransformer) -> None:
    """Compile what a block computes, once for all blocks that are alike, and the final norm.

    Names of parameters and modules stay as they are. Each graph is whole: what would break it is an error. Hooks on a
    block itself still run; a forward with a sink runs as if nothing were compiled.
    """
    allow_many_graphs()
    blocks = [cast("Block", block) for block in model.blocks]
    run = torch.compile(type(blocks[0]).compute, fullgraph=True, dynamic=False)
    for block in blocks:
        block.run = run
    model.final_norm.compile(fullgraph=True, dynamic=False)


def allow_many_graphs() -> None:
    """Training, validation and a shorter last batch have a graph each, and blocks may differ by window."""
    from torch._dynamo import config

    config.recompile_limit = max(MOST_GRAPHS, config.recompile_limit)


def keep_graphs() -> None:
    """More than one backward pass goes through what is compiled from now on, at the price of some memory."""
    from torch._functorch import config

    config.donated_buffer = False
