"""Every planted violation is found in every family that can have it, and the sound twins get no complaint."""

from __future__ import annotations

import pytest

from mmqk.monitors import preflight
from tests.monitors.preflight.families import FAMILIES, Case, sound
from tests.monitors.preflight.violations import VIOLATIONS

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
    assert checked(case).failed == []


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation.kind)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_violation_is_found(family, violation):
    case = violation.plant(sound(family))
    if case is None:
        pytest.skip("not applicable")
    table = checked(case)
    assert violation.check in [finding.check for finding in table.failed], str(table)
