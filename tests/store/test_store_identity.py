import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmqk
from mmqk.store import canonical, code_hash, differing_fields, identity_hash

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


def test_the_code_hash_follows_the_sources_that_decide_a_run(tmp_path):
    package = tmp_path / "mmqk"
    source = Path(mmqk.__file__).parent
    shutil.copytree(source / "store", package / "store")
    for room in ("", "model", "analysis"):
        (package / room).mkdir(exist_ok=True)
        (package / room / "__init__.py").write_text("")

    def run() -> str:
        command = [sys.executable, "-c", "from mmqk.store import code_hash; print(code_hash())"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    before = run()
    assert len(before) == 10
    (package / "analysis" / "page.py").write_text("x = 1\n")
    assert run() == before
    (package / "model" / "norms.py").write_text("x = 1\n")
    after = run()
    assert after != before
    (package / "model" / "norms.py").rename(package / "model" / "other.py")
    assert run() not in (before, after)


def test_the_code_hash_of_this_package_is_stable():
    assert code_hash() == code_hash()
    assert code_hash(("store",)) != code_hash(("model",))
