"""Every planted violation is found in the plain model and in one family of transformers, and the sound twins of all
families get no complaint. reports/preflight/table.md has every violation in every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmqk.monitors import preflight
from mmqk.monitors.preflight.attention import documents
from mmqk.monitors.preflight.context import Context
from tests.monitors.preflight.families import FAMILIES, Case, D, T, sound
from tests.monitors.preflight.violations import VIOLATIONS, with_new_optimizer

pytest.importorskip("transformers")


def checked(case: Case):
    return preflight(case.model, case.batch, case.loss, case.optimizer, case.modality)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_gets_no_complaint(family):
    case = sound(family)
    table = checked(case)
    assert table.failed == []
    assert [f.check for f in table.findings if "Error" in f.text] == []
    case.batch = case.packed
    # The packed batch of Qwen2.5-VL has no image, which the checks of its loss and parameters report.
    ofs = ("leaks", "attention") if family == "qwen2.5-vl" else ("leaks", "attention", "loss", "parameters")
    assert [f for f in checked(case).failed if f.check.startswith(ofs)] == []


@pytest.mark.parametrize("number", range(len(VIOLATIONS)), ids=lambda number: VIOLATIONS[number].kind)
def test_a_violation_is_found(number):
    violation, others = VIOLATIONS[number], FAMILIES[1:]
    planted = [violation.plant(sound(family)) for family in (FAMILIES[0], others[number % len(others)])]
    assert any(planted)
    for case in planted:
        if case is not None:  # the family can have this mistake
            table = checked(case)
            assert violation.check in [finding.check for finding in table.failed], str(table)


def test_a_factor_that_starts_at_0_is_no_complaint():
    """The first matrix of LoRA gets no gradient before the second one has moved."""
    case = sound("plain")
    case.model.a, case.model.b = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.zeros(2, D))
    case.embedding.register_forward_hook(lambda module, args, x: x + x @ case.model.a @ case.model.b)
    table = checked(with_new_optimizer(case))
    assert table.failed == [] and any("1 of them when the zeros" in f.text for f in table.findings)


def test_a_leak_to_the_document_after_the_next_is_found():
    case = sound("plain")
    batch = case.packed | {"document_ids": (torch.arange(T) // (T // 3)).expand(4, T)}
    assert documents(Context(case.model, batch, case.loss, None, None)).result == "ok"

    def leak(module, args, x):
        x[:, 2 * T // 3 :] += 0.1 * x[:, : T // 3].mean(1, keepdim=True)

    case.embedding.register_forward_hook(leak)
    assert documents(Context(case.model, batch, case.loss, None, None)).result == "FAILED"
