"""Every planted violation is found in the plain model and in one family of transformers, and the sound twins of all
families get no complaint. reports/preflight/table.md has every violation in every family."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmqk.monitors import preflight
from mmqk.monitors.preflight.attention import documents
from mmqk.monitors.preflight.context import Context
from tests.monitors.preflight.families import FAMILIES, Case, D, K, T, logits_and_labels, sound
from tests.monitors.preflight.violations import VIOLATIONS, config_of, look_ahead, with_new_optimizer

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


def result(case: Case, check: str) -> str:
    return next(finding.result for finding in checked(case).findings if finding.check == check)


@pytest.mark.parametrize(
    ("family", "factor", "expected"),
    [
        ("llama", K**-0.5, "ok"),
        ("llama", 1, "FAILED"),
        ("llama", 0.5, "FAILED"),
        ("gemma3", K**-0.5, "ok"),
        ("gemma3", 1, "FAILED"),
        ("gemma3", 0.5, "not checked"),
    ],
)
def test_queries_may_be_scaled_before_the_call(family, factor, expected):
    """After a QK-Norm, as in Gemma 3, the factor of the queries is known from their size."""
    case = sound(family)
    for attention in case.attention:
        config_of(attention).query_pre_attn_scalar, attention.scaling = K, 1.0
        last = getattr(attention, "q_norm", attention.q_proj)
        last.register_forward_hook(lambda module, args, y: y * factor)
    assert result(case, "attention: scale") == expected


@pytest.mark.parametrize("steps", [0, 30])
@pytest.mark.parametrize(("smoothing", "weight", "expected"), [(0.1, 1, "not checked"), (0, 0.9, "FAILED")])
def test_label_smoothing_is_no_wrong_number_of_targets(smoothing, weight, expected, steps):
    def loss(model, batch):
        logits, labels = logits_and_labels(model, batch)
        return weight * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    case = sound("plain")
    case.loss, case.optimizer = loss, torch.optim.AdamW(case.model.parameters(), 3e-3)
    for _ in range(steps):
        loss(case.model, case.batch).backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
    assert result(case, "loss: weights") == expected


@pytest.mark.parametrize(
    ("plant", "first", "expected"), [(None, 8, "ok"), (None, 6, "FAILED"), (look_ahead, 8, "FAILED")]
)
def test_a_prefix_without_targets_may_see_itself(plant, first, expected):
    """The prefix has 8 tokens; the first target is token ``first``."""
    case = sound("plain")
    sees = torch.ones(T, T, dtype=torch.bool).tril()
    sees[:8, :8] = True
    case.batch["attention_mask"] = sees.expand(4, 1, T, T)
    case.batch["labels"][:, :first] = -100
    assert result(plant(case) if plant else case, "leaks: causality") == expected


def test_decayed_embeddings_are_named_only():
    case = sound("plain")
    trained = list(case.model.parameters())
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0})
    case.optimizer = torch.optim.AdamW(groups)
    assert result(case, "parameters: decay") == "ok" and "1 embeddings (embed.weight)" in str(checked(case))


@pytest.mark.parametrize("leak", [0, 1])
def test_half_precision_with_parts_in_fp32_runs_under_the_autocast_of_the_loss(leak):
    case = sound("plain")
    case.model.bfloat16().head.float()
    case.embedding.register_forward_hook(lambda module, args, x: x + leak * x.roll(-1, 1))

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(model, batch)

    table = preflight(case.model, case.batch, loss, None, case.modality)
    assert [finding.check for finding in table.failed][:1] == ["leaks: causality"] * leak
