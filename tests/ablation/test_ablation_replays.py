"""Every numerics of a replay is one that the run's attention has."""

import pytest

from mmqk.ablation.replays import numerics_of
from mmqk.model import check_backend


@pytest.mark.parametrize(
    ("model", "fused"),
    [({}, True), ({"attn_softcap": 50.0}, False), ({"attention": "sigmoid"}, False)],
    ids=["softmax", "capped", "sigmoid"],
)
def test_replays_ask_for_backends_that_can_compute_the_attention(model, fused):
    found = numerics_of({"model": model, "backend": "math"})
    wanted = [*(["bf16-fused"] if fused else []), "bf16-math", "fp32"]
    assert list(found) == wanted
    for fields in found.values():
        check_backend(fields["backend"], model.get("attn_softcap"), model.get("attention", "softmax"))
    if not fused:  # the control: the one that is left out would have been refused
        with pytest.raises(ValueError, match="sdpa cannot"):
            check_backend("sdpa", model.get("attn_softcap"), model.get("attention", "softmax"))
