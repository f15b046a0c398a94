"""The result of a preflight, the command, and that a preflight changes nothing, bit for bit."""

from __future__ import annotations

import copy
import json
import random
import sys
from itertools import chain

import numpy as np
import pytest
import torch

from mmqk.cli import main
from mmqk.monitors import preflight
from mmqk.monitors.preflight.context import Context
from mmqk.store import UserError
from tests.monitors.preflight.families import FAMILIES, PAD, Case, sound

pytest.importorskip("transformers")


def state_of(case: Case) -> dict[str, object]:
    """Return copies of everything that a preflight must leave as it is."""
    names = dict(chain(case.model.named_parameters(), case.model.named_buffers()))
    return {
        "tensors": {name: x.detach().clone() for name, x in names.items()},
        "places": {name: x.data_ptr() for name, x in names.items()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in names.items()},
        "optimizer": copy.deepcopy(case.optimizer.state_dict()),
        "modes": {name: module.training for name, module in case.model.named_modules()},
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        "batch": copy.deepcopy(case.batch),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in case.model.modules()],
    }


def is_equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(is_equal, a, b))  # type: ignore[arg-type]
    return a == b


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes(family):
    case = sound(family)
    case.model.train()
    for _ in range(2):
        case.loss(case.model, case.batch).backward()
        case.optimizer.step()
    before = state_of(case)
    assert before["optimizer"]["state"] and any(g is not None for g in before["gradients"].values())
    table = preflight(case.model, case.batch, case.loss, case.optimizer, case.modality)
    assert len(table.findings) > 5
    after = state_of(case)
    for name, value in before.items():
        assert is_equal(value, after[name]), name
    # Control: a step changes all of these but the modes.
    case.loss(case.model, case.batch).backward()
    case.optimizer.step()
    assert not is_equal(before["tensors"], state_of(case)["tensors"])


def test_a_forward_that_fails_is_a_line():
    case = sound("plain")
    case.batch["input_ids"] = case.batch["input_ids"] + 90
    (finding,) = preflight(case.model, case.batch, case.loss).failed
    assert finding.check == "forward and backward" and finding.text.startswith("IndexError: index out of range")


def test_several_optimizers_count_together_and_another_object_is_refused():
    case = sound("plain")
    parameters = list(case.model.parameters())
    two = [torch.optim.AdamW(half, 1e-3, weight_decay=0.0) for half in (parameters[:5], parameters[5:])]
    found = {f.check: f.result for f in preflight(case.model, case.batch, case.loss, two).findings}
    one = {f.check: f.result for f in preflight(case.model, case.batch, case.loss, two[:1]).findings}
    assert (found["parameters: in no group"], one["parameters: in no group"]) == ("ok", "FAILED")
    with pytest.raises(UserError, match=r"pass the nn\.Module"):
        preflight(case.batch, case.model)


MODULE = """
from tests.monitors.preflight.families import sound
from tests.monitors.preflight.violations import look_ahead

def good():
    case = sound("plain")
    return {"model": case.model, "batch": case.batch, "loss": case.loss}

def bad():
    case = look_ahead(sound("plain"))
    return case.model, case.batch, case.loss, case.optimizer, case.modality
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "of_a_user.py").write_text(MODULE)
    assert main(["preflight", "of_a_user:good"]) == 0
    assert "leaks: causality" in capsys.readouterr().out
    assert main(["preflight", "of_a_user:bad", "--json", "checks.json"]) == 1
    records = json.loads((tmp_path / "checks.json").read_text())
    assert "leaks: causality" in [r["check"] for r in records if r["result"] == "FAILED"]


def test_positions_that_begin_after_left_padding_are_no_packed_documents():
    case = sound("llama")
    ids = case.batch["input_ids"].clone()
    ids[:, :3] = PAD
    mask = (ids != PAD).long()
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # 1, 1, 1, 0, 1, 2, ... as transformers writes them
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    assert Context(case.model, batch, None, None, None).document_BT is None
    assert Context(case.model, case.packed, None, None, None).document_BT is not None
