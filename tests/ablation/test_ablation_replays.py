"""Replays use only precisions and backends that can compute the attention of the run."""

import pytest

from mmqk.lab.runner.replays import numerics_of
from mmqk.model.backend_check import check_backend


@pytest.mark.parametrize(
    ("model", "fused"),
    [({}, True), ({"attn_softcap": 50.0}, False), ({"attention": "sigmoid"}, False), ({"attn_sink": True}, False)],
    ids=["softmax", "capped", "sigmoid", "sink"],
)
def test_replays_ask_for_backends_that_can_compute_the_attention(model, fused):
    found = numerics_of({"model": model, "backend": "math"})
    wanted = [*(["bf16-fused"] if fused else []), "bf16-math", "fp32"]
    assert list(found) == wanted
    attention = model.get("attn_softcap"), model.get("attention", "softmax")
    sink = model.get("attn_sink", False)
    for fields in found.values():
        check_backend(fields["backend"], *attention, sink=sink)
    if not fused:  # the control: the fused backend, which is left out, would be refused
        with pytest.raises(ValueError, match="sdpa cannot"):
            check_backend("sdpa", *attention, sink=sink)


def test_the_fused_numerics_is_the_run_s_own_and_the_others_are_not_compiled():
    capped = {"model": {"attn_softcap": 50.0}, "backend": "flex", "compile": True}
    found = numerics_of(capped)
    assert found["bf16-fused"] == {"trainer.precision": "bf16-mixed", "backend": "flex"}
    assert found["fp32"]["compile"] is found["bf16-math"]["compile"] is False
    for fields in found.values():
        check_backend(fields["backend"], 50.0)
    assert numerics_of({"backend": "sdpa_efficient"})["bf16-fused"]["backend"] == "sdpa_efficient"
    # The control: replays of a run that is not compiled have no field `compile`, which would change their ids.
    assert all("compile" not in fields for fields in numerics_of(capped | {"compile": False}).values())
