"""TokenBatch, the batch that every part of mmqk uses. B sequences, T tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class TokenBatch:
    """Sequences of text and image tokens in one joint vocabulary.

    Attributes:
        ids_BT: token ids, int64.
        modality_BT: modality of each token by vocabulary block (0 text, 1 image; more are allowed), int64.
        target_mask_BT: whether the position is a trained target, whose *next* token counts in the loss, bool. Always
            False at the last position, which has no next token.
        valid_BT: False at padding, bool. Every statistic must leave out padding.
        step_targets: number of trained targets in the whole optimizer step, over all micro-batches and ranks. The
            loss is divided by it, so gradient accumulation and data parallelism give the loss of one large batch.
        document_BT: number of the packed document of each token, -1 at padding; None if attention does not
            use it.
        surprise_BT: -log probability of each *token* under the source of the data, nats, fp32; None if unknown.
        target_ids_BT: id that replaces each *token* as a target, int64; None if every target is the token itself.
    """

    ids_BT: Tensor
    modality_BT: Tensor
    target_mask_BT: Tensor
    valid_BT: Tensor
    step_targets: Tensor
    document_BT: Tensor | None = None
    surprise_BT: Tensor | None = None
    target_ids_BT: Tensor | None = None

    @property
    def targets_BT(self) -> Tensor:
        """The target of every position: the next token, or the id that replaces it (`target_ids_BT`). The last
        column is meaningless and always masked."""
        return (self.ids_BT if self.target_ids_BT is None else self.target_ids_BT).roll(-1, dims=1)

    @property
    def target_modality_BT(self) -> Tensor:
        """Modality of the next token: a *prediction* has the modality of its target."""
        return self.modality_BT.roll(-1, dims=1)

    @property
    def target_surprise_BT(self) -> Tensor | None:
        """-log probability of the next token under the source of the data, nats."""
        return None if self.surprise_BT is None else self.surprise_BT.roll(-1, dims=1)

    def _map(self, function: Callable[[Tensor], Tensor]) -> TokenBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenBatch(**{name: function(t) for name, t in tensors.items() if t is not None})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TokenBatch:
        return self._map(Tensor.pin_memory)

    def first(self, n: int) -> TokenBatch:
        """Return the first ``n`` sequences; `step_targets` is unchanged."""
        return self._map(lambda t: t[:n] if t.ndim else t)
