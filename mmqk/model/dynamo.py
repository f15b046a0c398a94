"""Compiles a model in place with torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from .transformer import Block, EarlyFusionTransformer

MOST_GRAPHS = 64


def compile_blocks(model: EarlyFusionTransformer) -> None:
    """Compile the blocks, with one graph for equal blocks, and the final norm.

    Names of parameters and modules do not change. A graph break raises an error. Hooks on a block are called;
    hooks on its submodules are called only if they were registered before compilation. With an observer the blocks run
    eagerly.
    """
    allow_many_graphs()
    blocks = [cast("Block", block) for block in model.blocks]
    run = torch.compile(type(blocks[0]).compute, fullgraph=True, dynamic=False)
    for block in blocks:
        block.run = run
    model.final_norm.compile(fullgraph=True, dynamic=False)


def allow_many_graphs() -> None:
    """Raise the recompile limit: training, validation, a shorter last batch and each window need their own graph."""
    from torch._dynamo import config

    config.recompile_limit = max(MOST_GRAPHS, config.recompile_limit)


def keep_graphs() -> None:
    """Allow several backward passes through graphs compiled from now on. This costs some memory."""
    from torch._functorch import config

    if config.donated_buffer:
        torch.compiler.reset()  # torch would reuse earlier graphs, which overwrite their inputs
    # Without the tag, torch 2.15's disk cache could return a graph that was compiled with donated buffers. Its second
    # backward pass would be wrong.
    config.donated_buffer, torch.compiler.config.cache_key_tag = False, "keep_graphs"
