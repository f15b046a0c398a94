import pytest

from mmqk.lab.runner.pool import Task, TaskOutcome, standing
from mmqk.lab.runner.session import outcome_table
from mmqk.store import write_json


@pytest.mark.parametrize(
    ("text", "loss"), [("3.5", 3.5), ('"inf"', float("inf")), ('"abc"', None), ("[1]", None), ("null", None)]
)
def test_a_loss_that_is_no_number_is_left_out_of_the_table(tmp_path, text, loss):
    write_json(tmp_path / "run.json", {"id": "id", "identity": {}})
    write_json(tmp_path / "status.json", {"status": "completed", "step": 7})
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 7, "loss": {text}}}\n')
    task = Task("a", 0, (), tmp_path, "id", 100)
    assert standing(task) == TaskOutcome("completed", 7, loss=loss)
    assert "7/100" in outcome_table({task: standing(task)}).splitlines()[1]
