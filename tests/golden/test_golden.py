"""The golden runs cover every group of remedies, and their comparison detects a small change."""

from __future__ import annotations

import copy
import json

import pytest
import yaml

from mmqk.lab.remedies import REMEDIES
from tests.golden import verdicts
from tests.golden.__main__ import (
    HERE,
    KEPT,
    RUNS,
    TOLERANCE,
    differences,
    digests_of,
    keep,
    measure,
    this_platform,
    write_documents,
)
from tests.versions import draws_other_weights

KEPT_VALUES = json.loads(KEPT.read_text())
KEPT_RUNS = KEPT_VALUES["runs"]


def settings(name: str) -> dict:
    """Return the fields that a golden run sets, by dotted name."""

    def flat(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            yield f"{prefix}{key}", value

    return dict(flat(yaml.safe_load((HERE / f"{name}.yaml").read_text())))


def test_every_group_of_remedies_is_in_a_golden_run():
    fields = {field for name in RUNS for field in settings(name)}
    for group in {remedy.group for remedy in REMEDIES}:
        of_group = [set(remedy.settings) - {"backend"} for remedy in REMEDIES if remedy.group == group]
        assert any(wanted <= fields for wanted in of_group), group


@pytest.fixture(scope="module")
def ids(tmp_path_factory) -> dict:
    scratch = tmp_path_factory.mktemp("golden")
    write_documents(scratch)
    return measure("ids", scratch)


@pytest.mark.skipif(draws_other_weights(), reason="this torch draws other initial weights")
def test_a_golden_run_has_its_kept_numbers(ids):
    assert differences(KEPT_RUNS["ids"], ids, digests_of(KEPT_VALUES).get("ids")) == []


def test_a_change_is_seen():
    kept = {**KEPT_RUNS["plain"], "digest": "of here"}
    assert differences(kept, kept, "of here") == differences(kept, kept, None) == []
    changed = copy.deepcopy(kept) | {"digest": "other"}
    changed["values"]["loss@3"] *= 1 + 1e-15
    assert any("bits differ" in line for line in differences(kept, changed, "of here"))
    assert differences(kept, changed, None) == []
    changed["values"]["loss@3"] *= 1 + 2 * TOLERANCE
    for digest in ("of here", None):
        assert any("loss@3" in line for line in differences(kept, changed, digest))
        assert any("run id" in line for line in differences(kept, {**kept, "id": "other"}, digest))
    del changed["values"]["loss@3"]
    assert any("missing" in line for line in differences(kept, changed, None))


def test_digests_of_other_platforms_go_where_numbers_have_moved():
    run = {"id": "1", "values": {"loss@1": 2.0}, "digest": "new"}
    for loss, left in ((2.001, {"a": "old"}), (3.0, {})):
        kept = {
            "platforms": [{"platform": {"cpu": "another"}, "digests": {"a": "old"}}],
            "runs": {"a": {"id": "1", "values": {"loss@1": loss}}},
        }
        keep(kept, {"a": run})
        assert kept["platforms"][0]["digests"] == left
        assert kept["platforms"][1] == {"platform": this_platform(), "digests": {"a": "new"}}
        assert kept["runs"]["a"]["values"] == run["values"] and digests_of(kept) == {"a": "new"}


def test_two_sets_of_verdicts_are_compared_by_their_numbers():
    kept = json.loads((HERE.parents[1] / "reports/examples/demo/verdicts.json").read_text())
    prose = [{**claim, "note": "other words", "runs": ["another/id"]} for claim in kept]
    assert verdicts.differences(kept, prose) == []
    for field, value in (
        ("effect", 1.0),
        ("verdict", "not run"),
        ("adjusted", {"p": 1.0}),
        ("claim", "other"),
        ("p", kept[0]["p"] * (1 + 1e-8)),
    ):
        planted = [{**kept[0], field: value}, *kept[1:]]
        assert verdicts.differences(kept, planted), field


def test_a_shipped_pack_gives_its_kept_verdicts(capsys):
    """The demonstration; `python -m tests.golden.verdicts` compares all packs."""
    assert verdicts.main(["demo"]) == 0
    assert capsys.readouterr().out == "demo: 6 claims, no difference\n"
