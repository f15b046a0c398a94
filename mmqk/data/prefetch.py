"""Prefetch batches to the device: the next batch is copied while the current step runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mmqk.data.batch import TokenBatch


def prefetched(batches: Iterable[TokenBatch], device: torch.device) -> Iterator[TokenBatch]:
    """Yield the batches on a GPU, in order; each is copied from pinned memory while the model trains on the previous
    batch."""
    beside = torch.cuda.Stream(device)
    ahead: tuple[TokenBatch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(beside):
            ready, ahead = ahead, (batch.to(device, non_blocking=True), beside.record_event())
        if ready is not None:
            yield _arrived(*ready, device)
    if ahead is not None:
        yield _arrived(*ahead, device)


def _arrived(batch: TokenBatch, copied: torch.cuda.Event, device: torch.device) -> TokenBatch:
    """Make the device, not the host, wait for the copy. Keep the memory of the batch until the step has read it."""
    step = torch.cuda.current_stream(device)
    step.wait_event(copied)
    batch.record_stream(step)
    return batch
