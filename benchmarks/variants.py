"""Measures the cost of each remedy relative to the plain arm, in a loop with mmqk's loss and without Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Candidate, Context, Unit, compare
from benchmarks.loops import Loop, own_loop
from benchmarks.setups import facts_of, full, toy, work_of

PLAIN = "plain"
Arms = Mapping[str, Sequence[str]]
# By unit name: the title, and the flags of each arm. The plain arm comes first.
COMPARED: dict[str, tuple[str, Arms]] = {
    "qk-norm": (
        "QK-Norm by kind and scope",
        {
            PLAIN: (),
            "rms, head": ("--model.qk_norm.kind=rms",),
            "rms, full": ("--model.qk_norm={kind: rms, scope: full, gain: per_head}",),
            "layer, head": ("--model.qk_norm.kind=layer",),
            "layer, full": ("--model.qk_norm={kind: layer, scope: full, gain: per_head}",),
            "l2, head": ("--model.qk_norm.kind=l2",),
            "rms, head, after RoPE": ("--model.qk_norm={kind: rms, place: after_rope}",),
        },
    ),
    "placement": (
        "norm placement",
        {
            PLAIN: (),
            "post (Swin, Chameleon-34B)": ("--model.pre_norm=false", "--model.post_norm=true"),
            "sandwich": ("--model.post_norm=true",),
        },
    ),
    "softcap": (
        "a cap of 50 on the attention logits, by backend",
        {
            PLAIN: (),
            "math": ("--backend=math",),
            "math, cap": ("--backend=math", "--model.attn_softcap=50"),
            "sdpa_cudnn": ("--backend=sdpa_cudnn",),
            "flex": ("--backend=flex",),
            "flex, cap": ("--backend=flex", "--model.attn_softcap=50"),
        },
    ),
    "loss": (
        "z-loss and dropout",
        {
            PLAIN: (),
            "z-loss": ("--loss.z_loss=1e-5",),
            "final softcap 30": ("--model.final_softcap=30",),
            "residual dropout 0.1": ("--model.residual_dropout=0.1",),
            "attention dropout 0.1": ("--model.attn_dropout=0.1",),
        },
    ),
}
SECONDS = {"qk-norm": 330, "placement": 170, "softcap": 330, "loss": 250}


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    return [Unit("variants", name, SECONDS[name], partial(_measure, name=name)) for name in COMPARED]


def _measure(context: Context, name: str) -> dict[str, Any]:
    about, arms = COMPARED[name]
    # Dense attention stores every T x T matrix, so a unit with dense attention uses a smaller batch.
    batch = 8 if name == "softcap" else 32

    def make(flags: Sequence[str]) -> Any:
        return full("124M", *flags, batch=batch) if context.full else toy(context, *flags)

    def build(flags: Sequence[str]) -> Loop:
        return own_loop(make(flags), context.device)

    plain = make(())
    candidates = [
        Candidate(arm, partial(build, flags), work_of(plain), compiled=plain.compile) for arm, flags in arms.items()
    ]
    size = "124M" if context.full else "the demonstration"
    return {
        "title": f"{about}; {size}",
        "facts": facts_of(plain, context.device),
        "base": PLAIN,
        "rows": compare(candidates, context, repeat=30 if context.full else 15, rounds=5, warm=4),
    }
