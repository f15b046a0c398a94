import hashlib
from pathlib import Path

import pytest

from mmqk.store import canonical, differing_fields, identity_hash

RECORD = {"model": {"d_model": 64, "qk_norm": {"kind": "rms"}}, "optim": {"lr": 0.01}, "blocks": [3, 4]}


def test_the_hash_is_the_sha256_of_sorted_json_and_ignores_key_order():
    text = '{"blocks":[3,4],"model":{"d_model":64,"qk_norm":{"kind":"rms"}},"optim":{"lr":0.01}}'
    assert identity_hash(RECORD) == hashlib.sha256(text.encode()).hexdigest()[:10]
    assert identity_hash(dict(reversed(RECORD.items()))) == identity_hash(RECORD)
    assert identity_hash({**RECORD, "blocks": (3, 4)}) == identity_hash(RECORD)


def test_any_changed_field_changes_the_hash_and_is_named():
    other = {"model": {"d_model": 64, "qk_norm": {"kind": "none"}}, "optim": {}, "blocks": [3, 4], "seed": 0}
    assert identity_hash(other) != identity_hash(RECORD)
    assert differing_fields(RECORD, other) == ["model.qk_norm.kind", "optim", "optim.lr", "seed"]
    assert differing_fields(RECORD, dict(RECORD)) == []


def test_differing_fields_and_the_hash_agree_on_what_is_the_same():
    for a, b in [(1, 1.0), (1, True), (None, "None"), ([], {})]:
        assert differing_fields({"x": a}, {"x": b}) == ["x"]
        assert identity_hash({"x": a}) != identity_hash({"x": b})
    assert differing_fields({"x": (1, 2)}, {"x": [1, 2]}) == []


def test_a_value_that_is_not_plain_finite_data_is_refused():
    with pytest.raises(ValueError):
        canonical({"lr": float("nan")})
    with pytest.raises(TypeError):
        canonical({"path": Path("x")})
