"""The table of remedies is complete and agrees with the parser; docs/remedies.md is generated from the table and the
tests."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from remedies_page import PAGE, REFERENCE, SEQUENCES, TOKENS, measure, page

from mmqk.config import LossConfig, OptimConfig, RunConfig, resolve
from mmqk.lab.remedies import REMEDIES
from mmqk.model import ModelConfig
from mmqk.store import flatten

ROOT = Path(__file__).parents[1]
DEMO = "--config=configs/demo.yaml"
# Fields that are not remedies: shape, trained modalities, positions, and details of a remedy.
NOT_REMEDIES = {
    "model": "vocab_sizes d_model n_layers n_heads n_kv_heads d_head d_ff mlp norm_gain norm_eps reparam_gamma"
    " tie_embeddings window global_every rope_theta local_rope_theta qk_norm.eps qk_norm.scale_init"
    " rope_scaling.kind rope_scaling.factor rope_scaling.low_freq_factor rope_scaling.high_freq_factor"
    " rope_scaling.original_length patch",
    "loss": "weights chunk_size",
    "optim": "lr beta1 schedule final_lr_ratio schedule_steps",
}


def names(config: type, prefix: str) -> list[str]:
    """Return the dotted names of the fields of a dataclass and of the dataclasses inside it."""
    found = []
    for f in fields(config):
        inner = f.default_factory if is_dataclass(f.default_factory) else None
        found += [f"{prefix}{f.name}"] if inner is None else names(inner, f"{prefix}{f.name}.")
    return found


def fields_of_runs() -> set[str]:
    sections = {"model": ModelConfig, "loss": LossConfig, "optim": OptimConfig}
    return {name for section, config in sections.items() for name in names(config, f"{section}.")}


def unaccounted(known: set[str]) -> set[str]:
    """Return the fields that are neither in a remedy nor in `NOT_REMEDIES`, and the entries of `NOT_REMEDIES` that
    are not fields."""
    listed = {f"{section}.{name}" for section, words in NOT_REMEDIES.items() for name in words.split()}
    switched = {name for remedy in REMEDIES for name in remedy.settings if name != "backend"}
    of_mapping = {name for name in switched if name.rpartition(".")[0] in known}
    accounted = listed | switched - of_mapping | {name.rpartition(".")[0] for name in of_mapping}
    assert not listed & switched
    return known ^ accounted


def test_every_field_is_of_a_remedy_or_listed_as_none():
    assert unaccounted(fields_of_runs()) == set()
    # The controls: an additional field, and a missing field.
    assert unaccounted(fields_of_runs() | {"model.anti_gravity"}) == {"model.anti_gravity"}
    assert unaccounted(fields_of_runs() - {"optim.qk_clip"}) == {"optim.qk_clip"}


@pytest.fixture(scope="module")
def control(tiny_args) -> RunConfig:
    return resolve(list(tiny_args))


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_its_flags_resolve_and_change_what_they_say_and_nothing_else(remedy, control, tiny_args):
    run = resolve([*tiny_args, *remedy.flags])
    before, after = flatten(control.nested()), flatten(run.nested())
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name: after[name] for name in remedy.settings} == dict(remedy.settings)
    # Fields that a remedy sets to their default (pre_norm of the sandwich) do not change.
    assert changed <= remedy.settings.keys() and run.id != control.id


# The page ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_is_what_the_code_and_the_tests_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m docs.experiments.remedies_page"


def test_the_reference_size_is_the_demonstrations(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = resolve([DEMO])
    assert (run.model, run.data.batch_size, run.data.seq_len) == (REFERENCE, SEQUENCES, TOKENS)


def test_flops_are_those_of_the_textbook():
    size, tokens = measure({}), SEQUENCES * TOKENS
    c = REFERENCE
    matrices = c.n_layers * (4 * c.d_model**2 + 3 * c.d_model * c.mlp_width) + c.d_model * c.vocab_size
    scores = 2 * SEQUENCES * c.d_model * TOKENS**2  # of one layer: q·k for every pair, masked or not
    assert size.flops == 6 * matrices * tokens + 6 * c.n_layers * scores
    norms = (2 * c.n_layers + 1) * c.d_model
    assert size.parameters == matrices + c.d_model * c.vocab_size + norms
    # QK-Clip computes every q·k once more; an additional backward pass is two thirds of a step.
    assert measure({"optim.qk_clip": 100.0}).flops - size.flops == c.n_layers * scores
    assert measure({"optim.split_second_moment": True}).flops * 3 == size.flops * 5
    assert measure({"model.per_modality.qk": True}).parameters - size.parameters == 2 * c.n_layers * c.d_model**2
