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
    block itself run, hooks on its parts only where they were there before; the blocks of a forward with a sink run
    eagerly.
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

    if config.donated_buffer:
        torch.compiler.reset()  # graphs that write over what they have read, and that nothing tells apart from now on
    # Nor does torch's cache on disk (2.15): it would give such graphs back, whose second backward pass is wrong.
    config.donated_buffer, torch.compiler.config.cache_key_tag = False, "keep_graphs"
