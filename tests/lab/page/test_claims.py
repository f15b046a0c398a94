"""What a page prints of a claim: values that the verdict uses, and what was tested."""

import shutil

import pytest

from mmqk.lab.page.claims import claim_rows
from mmqk.lab.page.sweeps import learning_rates
from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from tests.lab.fake_runs import Planted, write_demo
from tests.lab.page.report_runs import RATES, write_sweep


def test_a_family_without_all_its_points_has_no_number_anywhere(tmp_path):
    """Neither the table nor the figure of a claim shows values that the verdict does not use."""
    folder = write_sweep(tmp_path / "sweep", widths=(64,))

    def shown():
        study = load_study(folder)
        [row] = claim_rows(study, judge(study)[:1])
        cells = {name.text: [cell.text for cell in rest] for name, *rest in row["values"].rows}
        panel = next(p for p in learning_rates(study).rows[-1] if p.statistic.startswith("lr_sensitivity"))
        points = [line for line in panel.lines if line.marker and line.group == "no QK-Norm"]
        return cells["no QK-Norm"], sum(len(line.x) for line in points)

    assert "not measured" not in shown()[0] and shown()[1] == 2
    shutil.rmtree(next(folder.glob(f"plain-lr{RATES[1]}-*/seed1")))
    cells, points = shown()
    assert cells[1] == "not measured" and float(cells[0]) > 0 and points == 1


@pytest.mark.parametrize(
    ("direction", "verdict", "tested"),
    [("less", "contradicted", "at least 0.1 nats lower"), ("greater", "reproduced", "at least 0.1 nats higher")],
)
def test_the_opposite_of_a_claim_is_not_its_reproduction(tmp_path, direction, verdict, tested):
    """The image loss of the treatment ends 0.17 nats higher. If the claim says "lowers", the runs contradict it; the
    control, which asks for a rise, shows what was tested wherever the verdict is printed."""
    claim = {"statement": "a tenth of the learning rate lowers the final image loss", "metric": "final_loss/image",
             "treatment": "mixed", "control": "mixed-qk", "min_effect": 0.1, "direction": direction}  # fmt: skip
    planted = {"mixed": Planted(60.0, {"text": 3.4, "image": 4.77}), "mixed-qk": Planted(8.5)}
    study = load_study(write_demo(tmp_path, planted, change=lambda grid: grid["claims"][0].update(claim)))
    found = judge(study)
    row = next(row for row in claim_rows(study, found) if row["id"] == "C2")
    assert row["verdict"] == verdict and row["tested"].startswith(tested) and row["effect"].startswith("+0.17")
    assert found[0].as_record()["tested"] == tested
