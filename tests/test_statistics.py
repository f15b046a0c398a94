"""Each logged tag has a row in the tables of docs/statistics.md, and each row matches a logged tag."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.monitors import attach, probe
from mmqk.monitors.formulas.reduce import over_layers
from mmqk.monitors.own.probe import block_matrices, residual_absorption
from mmqk.store import tag as tag_of
from mmqk.train import main
from mmqk.training.guards import RowLog
from tests.monitors.attach.nets import Net
from tests.one_step import token_batch

ROOT = Path(__file__).parents[1]
# The texts that a placeholder of the page stands for.
PLACES = {
    "PARAMETER": r"[^/]+\.[^/]+", "KIND": "[a-z_]+", "layerNN": r"layer\d{2,}", "headNN": r"head\d{2,}",
    **dict.fromkeys(("MODALITY", "QUERY", "KEY", "TARGET", "BLOCK", "OTHER"), "[^/-]+"),
}  # fmt: skip
EVERYTHING = [
    "--data.batch_size=4", "--data.val_sequences=8", "--model.d_model=16", "--model.n_layers=2", "--model.n_heads=2",
    "--optim.warmup_steps=2", "--optim.qk_clip=0.5", "--trainer.max_steps=4", "--monitor.every_n_steps=2",
    "--monitor.probe_sequences=4", "--monitor.probe_split=current", "--monitor.heads=true",
    "--monitor.parameters=true", "--monitor.matrices=true", "--model.attn_gate=head",
    "--monitor.second_moment=true", "--monitor.precision=true",
    "--monitor.gradient_agreement=true", "--monitor.sharpness=true", "--monitor.budget_every_n_steps=2",
    "--monitor.budget_steps=2", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    """Return the tags of a run with all compatible options, and those of `of_other_models`."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:  # any attention entropy counts as collapsed
        patch.setattr("mmqk.store.rules.COLLAPSE_SHARE", 1e9)
        assert main([f"--config={ROOT / 'configs/dial.yaml'}", f"--out={out}", *EVERYTHING]) == 0
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {tag for line in lines for tag in json.loads(line)} - {"step"} | of_other_models()


def of_other_models() -> set[str]:
    """Return the tags that the run of `logged` cannot have.

    These are the tags of QK-Norm (which QK-Clip excludes), of a bf16 residual stream, of a third-party model, and of
    a kernel that needs a GPU.
    """
    config = ModelConfig(
        vocab_sizes={"text": 20, "image": 12}, d_model=16, n_layers=2, n_heads=2, qk_norm=QKNormConfig("rms")
    )
    model = EarlyFusionTransformer(config, backend="sdpa")
    batch = token_batch(torch.arange(24).view(2, 12) % 32, config.vocab_sizes)
    found = set(probe(model, batch).flat())
    copies = PerModalityConfig(qk=True, mlp=True)
    with_sinks = EarlyFusionTransformer(replace(config, attn_sink=True), backend="math")
    found |= set(probe(with_sinks, batch, heads=True).flat())
    untied = EarlyFusionTransformer(replace(config, per_modality=copies), backend="sdpa")
    found |= set(probe(untied, batch, matrices=True).flat())
    ends = EarlyFusionTransformer(replace(config, attn_gate="head", separate_first=1), backend="sdpa")
    found |= set(probe(ends, batch, matrices=True).flat())
    found |= {
        tag_of(f"{name}_grad_over_v", *of, layer=layer)
        for some in (untied, ends)
        for name, of, layer, _ in block_matrices(some)
    }
    sigma = EarlyFusionTransformer(replace(config, weight_reparam="sigma"), backend="sdpa")
    found |= set(probe(sigma, batch).flat())
    watch = attach(
        model, modality={"image": range(20, 32)}, every_n_steps=1,
        log=lambda values, step: found.update(values.keys() - over_layers(values).keys()),
    )  # fmt: skip
    model(batch.ids_BT)
    watch.step()
    watch.close()
    masked, added = Net(["sdpa"]), torch.full((12, 12), -1e4).triu(1)
    found |= set(attach(masked, modality={"image": range(20, 32)}).probe(ids=batch.ids_BT, mask=added).flat())
    packed = {"attention_mask": torch.ones(2, 12).triu()[:, :12], "document_ids": torch.arange(12)[None] // 6}

    class Packed(Net):  # its attention sees padding and other documents
        def forward(self, ids, attention_mask, document_ids):
            return super().forward(ids)

    found |= set(attach(Packed(["sdpa"]), modality={"image": range(20, 32)}).probe(ids=batch.ids_BT, **packed).flat())
    rows = RowLog(config.modalities).values([1.0] * 8)  # largest logits and log-sum-exps of 2 layers, 2 modalities
    return found | set(rows) | set(residual_absorption(model.bfloat16(), batch).flat())


def forms_of(pattern: str) -> list[str]:
    """Return the pattern with and without each optional part in brackets, and with the name of each matrix."""
    parts = [("", part[1:-1]) if part.startswith("[") else (part,) for part in re.split(r"(\[[^]]*\])", pattern)]
    matrices = ("q", "k", "v", "o", "g", "gate", "up", "down") if "MATRIX" in pattern else ("",)
    return ["".join(choice).replace("MATRIX", name) for choice in product(*parts) for name in matrices]


def forms(page: str) -> dict[str, re.Pattern[str]]:
    """Return the forms of tags in the first column of the page's tables of statistics."""
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    found = [form for cell in cells for pattern in re.findall("`(.*?)`", cell) for form in forms_of(pattern)]
    pieces = {form: re.split(f"({'|'.join(PLACES)})", form) for form in found}
    return {form: re.compile("".join(PLACES.get(x, re.escape(x)) for x in of)) for form, of in pieces.items()}


PAGE = (ROOT / "docs/statistics.md").read_text(encoding="utf-8")
FORMS = forms(PAGE[PAGE.index("## Every step") :])


def missing(tags: Iterable[str], known: dict[str, re.Pattern[str]] = FORMS) -> list[str]:
    """Return the tags that match no form."""
    return [tag for tag in tags if not any(form.fullmatch(tag) for form in known.values())]


def unused(tags: Iterable[str]) -> set[str]:
    """Return the forms that match no tag."""
    return {form for form, pattern in FORMS.items() if not any(map(pattern.fullmatch, tags))}


def test_every_tag_has_a_row_and_every_row_a_tag(logged):
    assert missing(logged) == []
    assert unused(logged) == set()
    # The controls: a missing row, missing tags, a new tag, and a known statistic in a new place.
    assert set(missing(logged, {form: of for form, of in FORMS.items() if form != "loss"})) == {"loss"}
    assert unused(logged - {"attn_rank/layer00", "attn_rank/layer01"}) == {"attn_rank/layerNN"}
    assert unused({tag for tag in logged if "head" not in tag.split("/")[-1]}) >= {"attn_entropy/QUERY/layerNN/headNN"}
    new = ["attn_vibes/text/layer00", "attn_rank/text/layer00", "q_norm/layer00", "loss/text-image", "lr/text"]
    assert missing([*logged, *new]) == new
