"""Check that batches are copied one step ahead: with fake CUDA streams, and on a GPU if there is one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mmqk.data import batch as prefetch
from mmqk.data.batch import TokenBatch, prefetched
from mmqk.data.datamodule import PositionedLoader
from mmqk.store import UserError

CUDA = torch.device("cuda", 0)


def batch_of(i: int) -> TokenBatch:
    ids_BT = torch.full((2, 5), i)
    on = torch.ones(2, 5, dtype=torch.bool)
    return TokenBatch(ids_BT, ids_BT * 0, on, on, on.sum(), None, None if i % 2 else ids_BT.float())


class Told:
    """Records the order of loads, copies, events and steps."""

    def __init__(self, monkeypatch, device: torch.device = CUDA) -> None:
        self.happened: list[tuple] = []
        self.stream = "step"
        self.copies = 0
        monkeypatch.setattr(prefetch.torch.cuda, "Stream", lambda d: Side(self))
        monkeypatch.setattr(prefetch.torch.cuda, "stream", self.on)
        monkeypatch.setattr(prefetch.torch.cuda, "current_stream", lambda d: Step(self))
        monkeypatch.setattr(TokenBatch, "to", lambda batch, *a, **k: self.to(batch, *a, **k))
        monkeypatch.setattr(TokenBatch, "record_stream", lambda batch, stream: self.keep(batch, stream))

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    def to(self, batch: TokenBatch, device, non_blocking: bool = False) -> TokenBatch:
        assert non_blocking, "the host would wait for the copy"
        self.happened.append(("copied", int(batch.ids_BT[0, 0]), self.stream))
        return batch

    def keep(self, batch: TokenBatch, stream) -> None:
        self.happened.append(("keeps", int(batch.ids_BT[0, 0]), stream.name))

    def loaded(self, n: int):
        for i in range(n):
            assert self.stream == "step", "the loader must not run on the stream of the copies"
            self.happened.append(("loaded", i))
            yield batch_of(i)


class Side:
    name = "side"

    def __init__(self, told: Told) -> None:
        self.told = told

    def record_event(self) -> int:
        self.told.copies += 1
        self.told.happened.append(("recorded", self.told.copies - 1))
        return self.told.copies - 1


class Step:
    name = "step"

    def __init__(self, told: Told) -> None:
        self.told = told

    def wait_event(self, event: int) -> None:
        self.told.happened.append(("waits", event))


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_the_next_copy_begins_before_a_batch_is_handed_out_and_only_its_own_is_waited_for(monkeypatch, n):
    told = Told(monkeypatch)
    for batch in prefetched(told.loaded(n), CUDA):
        assert told.stream == "step"
        told.happened.append(("step", int(batch.ids_BT[0, 0])))
    at = {what: place for place, what in enumerate(told.happened)}
    assert len(at) == len(told.happened) == 6 * n  # no call is repeated
    for i in range(n):
        own = [("loaded", i), ("copied", i, "side"), ("recorded", i), ("waits", i), ("keeps", i, "step"), ("step", i)]
        assert [at[what] for what in own] == sorted(at[what] for what in own)
        if i + 1 < n:
            assert at["copied", i + 1, "side"] < at["step", i]  # one batch ahead
        if i + 2 < n:
            assert at["loaded", i + 2] > at["step", i]  # not more than one batch ahead
    if n > 1:  # the control: without prefetching the order is different
        assert told.happened != [what for i in range(n) for what in sorted(at, key=at.get) if what[1] == i]


class Few:
    """Micro-batches in which every token is the number of the batch."""

    ahead, batch_size, accumulate = 0, 1, 1

    def __init__(self, n: int = 6, breaks_at: int | None = None) -> None:
        self.n, self.breaks_at = n, breaks_at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> TokenBatch:
        if i == self.breaks_at:
            raise UserError("a shard is damaged")
        return batch_of(i)


def loader_of(monkeypatch, **few) -> PositionedLoader:
    """Return a loader for a fake GPU, without pinned memory."""
    Told(monkeypatch)
    import mmqk.data.datamodule as module

    plain = module.DataLoader
    monkeypatch.setattr(module, "DataLoader", lambda *a, **k: plain(*a, **{**k, "pin_memory": False}))
    return PositionedLoader(Few(**few), 0, CUDA)  # type: ignore[arg-type]


def test_the_position_counts_what_was_handed_out_not_what_was_copied(monkeypatch):
    loader = loader_of(monkeypatch)
    got = []
    for batch in loader:
        got.append(int(batch.ids_BT[0, 0]))
        assert loader.state_dict()["position"] == len(got)
        if len(got) == 3:  # an interruption: batch 3 is on the device, but no step used it
            break
    again = loader_of(monkeypatch)
    again.load_state_dict(loader.state_dict())
    assert got + [int(batch.ids_BT[0, 0]) for batch in again] == list(range(6))
    assert again.position == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: streams, pinned memory, the allocator")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_nothing_is_lost_however_long_a_step_takes(workers):
    loader, device = PositionedLoader(Few(40), workers, CUDA), CUDA  # type: ignore[arg-type]
    sums, waste = [], torch.randn(2048, 2048, device=device)
    for i, batch in enumerate(loader):
        assert all(t.device == device for t in vars(batch).values() if t is not None)
        for _ in range(20):  # the step is slower than loading and copying, and frees the memory that it used
            waste = (waste @ waste).clamp(-1, 1)
        sums.append(batch.ids_BT.double().mean() + 0 * waste[0, 0])
        del batch
        assert loader.position == i + 1
    assert torch.stack(sums).tolist() == [float(i) for i in range(40)]
