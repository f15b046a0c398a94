"""Compilation is part of the identity of a run where it is on, and a fork names what it changes."""

from __future__ import annotations

from pathlib import Path

from mmqk.config import resolve
from mmqk.training.fork.start import changes

CONFIGS = Path(__file__).parents[2] / "configs"


def test_compile_is_of_the_identity_where_it_is_on_and_recompute_never(tiny_args):
    plain, compiled, off, recomputed = (
        resolve([*tiny_args, *flags])
        for flags in ([], ["--compile=true"], ["--compile=false"], ["--activation_checkpointing=true"])
    )
    assert plain.identity == off.identity == recomputed.identity and plain.id == recomputed.id
    assert compiled.identity == {**plain.identity, "compile": True} and compiled.id != plain.id


def test_the_demonstration_is_the_run_that_it_was():
    demo = [f"--config={CONFIGS / 'demo.yaml'}"]
    assert resolve(demo).id == "249a79196a" != resolve([*demo, "--seed=1"]).id


def test_what_a_fork_changes():
    """The configuration of an older parent lacks the fields that later versions added."""
    old = {"seed": 0}
    new = {"seed": 0, "compile": False, "activation_checkpointing": False}
    assert (
        changes(old, new)
        == changes(old, {**new, "activation_checkpointing": True})
        == changes({**new, "activation_checkpointing": True}, new)
        == []
    )
    assert changes(old, {**new, "compile": True}) == [{"field": "compile", "from": False, "to": True}]
    assert changes({**new, "compile": True}, new) == [{"field": "compile", "from": True, "to": False}]
    old, new = {"alarm": {"stop": []}}, {"compile": False, "alarm": {"stop": [], "stop_diverged": True}}
    assert changes(old, new) == []
    new["alarm"]["stop_diverged"] = False
    assert changes(old, new) == [{"field": "alarm.stop_diverged", "from": True, "to": False}]
