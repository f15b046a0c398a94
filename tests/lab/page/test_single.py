"""The page of a single run lists its alarms."""

import json

import pytest

from tests.lab.page.test_page import pages_of


@pytest.mark.parametrize("low", [0.01, 0.9])
def test_the_page_of_attach_applies_the_rules(tmp_path, low):
    """`attach` writes no alarms. The entropy falls to 1 % of its first value, in the control to 90 %."""
    lines = [{"step": n, "attn_entropy/text/layer00": 2.0 * (1 if n < 50 else low)} for n in range(10, 100, 10)]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(json.dumps({"status": "completed", "step": 90, "reason": "", "seconds": 1}))
    page = pages_of(folder)["index.html"]
    assert ("Alarms: 1</summary>" in page) == (low < 0.1) and ("Alarms: none" in page) == (low > 0.1)
