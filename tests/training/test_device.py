"""Compilation is part of the identity of a run where it is on, and a fork names what it changes."""

from __future__ import annotations

from pathlib import Path

from mmqk.config import resolve

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
