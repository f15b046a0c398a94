"""Tests how a probe cuts a batch: objects, lists, and images that are not listed by sequence."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from mmqk.monitors import attach
from tests.monitors.attach.nets import Net, batches
from tests.monitors.preflight.families import IMAGE_TOKEN, VISION_START, model_of

IMAGE = {"image": range(10, 40)}
T = 40
PLACEHOLDER = {"image": range(IMAGE_TOKEN, IMAGE_TOKEN + 1)}


@dataclasses.dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    name: str = "a batch"
    shape: tuple = dataclasses.field(init=False, default=(6, 16))


class Slotted:
    __slots__ = ("ids", "loader")

    def __init__(self, ids):
        self.ids, self.loader = ids, object()


class Pair(NamedTuple):
    ids: torch.Tensor
    step: int


@pytest.mark.parametrize(
    ("make", "by_name"),
    [(Batch, False), (Slotted, True), (lambda ids: Pair(ids, 3), False), (lambda ids: {"inner": Batch(ids)}, True)],
    ids=["dataclass", "slots", "named tuple", "nested"],
)
def test_a_batch_that_is_an_object_is_cut_like_its_tensor(make, by_name):
    class OfObject(Net):
        def forward(self, batch):
            seen.append(batch)
            batch = batch["inner"] if isinstance(batch, dict) else batch
            return super().forward(batch.ids)

    model, (ids,), logged, seen = OfObject(["sdpa"]), batches(1), [], []
    watch = attach(model, modality=IMAGE, every_n_steps=1, log=lambda values, step: logged.append(values))
    batch = make(ids)
    model(batch=batch) if by_name else model(batch)
    watch.step()
    expected = attach(Net(["sdpa"]), modality=IMAGE).probe(ids=ids).flat()
    assert logged[0]["probe_sequences"] == 4 and {t: logged[0][t] for t in expected} == expected
    assert type(seen[1]) is type(batch) and seen[0] is batch and seen[1] is not batch
    whole = batch["inner"].ids if isinstance(batch, dict) else batch.ids
    assert whole is ids


def with_images(images: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    """Return a batch of Qwen-VL: for each row, the height and width in patches of its images."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 48, (8, T), generator=random)
    grids, pixels = [], []
    for row, of_row in enumerate(images):
        at = 1
        for h, w in of_row:
            ids[row, at] = ids[row, at + 1 + h * w // 4] = VISION_START
            ids[row, at + 1 : at + 1 + h * w // 4] = IMAGE_TOKEN
            at += h * w // 4 + 3
            grids.append([1, h, w])
            pixels.append(torch.randn(h * w, 96, generator=random))
    batch = {"input_ids": ids[: len(images)], "attention_mask": torch.ones(len(images), T, dtype=torch.long)}
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
    return batch | ({"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)} if grids else {})


@pytest.mark.parametrize("rows", [4, 1], ids=["", "no image in the first rows"])
def test_images_go_with_the_rows_that_own_them(rows, capsys):
    """Four images of eight belong to the first four rows; eight images also equal the number of rows."""
    images = [[(4, 4)], [(2, 4), (4, 4)], [], [(8, 4)], [(2, 2)], [(4, 4)], [(4, 2)], [(4, 4)]]
    images = images if rows == 4 else [[], *images[1:4], *images[:1], *images[5:]]
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = model_of("qwen2.5-vl").train()
    logged = []
    watch = attach(model, modality=PLACEHOLDER, every_n_steps=1, sequences=rows,
                   log=lambda values, step: logged.append(values))  # fmt: skip
    model(**with_images(images))
    watch.step()
    assert "the probe uses all" not in (said := capsys.readouterr().out) and "no probe" not in said
    alone = watch.probe(**with_images(images[:rows])).flat()
    assert logged[0]["probe_sequences"] == rows
    assert alone == pytest.approx({t: logged[0][t] for t in alone}, rel=1e-4, abs=1e-5)
    # Control: the images of other rows give other numbers.
    other = with_images(images[:rows])
    if rows == 4:
        other["pixel_values"] = other["pixel_values"].flip(0)
        assert alone != pytest.approx(watch.probe(**other).flat(), rel=1e-4, abs=1e-5)


def test_images_with_equally_many_tokens_are_counted(capsys):
    """As in LLaVA: one axis of images, and the number of image tokens of a row gives the number of its images."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = model_of("llava").train()
    ids, pixels = torch.randint(4, 48, (8, T)), torch.randn(8, 3, 8, 8)
    for row, n in enumerate([1, 2, 0, 2, 1, 1, 1, 0]):
        ids[row, 1 : 1 + 4 * n] = IMAGE_TOKEN
    watch = attach(model, modality=PLACEHOLDER)
    values = watch.probe(input_ids=ids, pixel_values=pixels).flat()
    assert values["probe_sequences"] == 4 and "probe uses all" not in capsys.readouterr().out
    alone = watch.probe(input_ids=ids[:4], pixel_values=pixels[:5]).flat()
    assert values == alone != watch.probe(input_ids=ids[:4], pixel_values=pixels[1:6]).flat()
