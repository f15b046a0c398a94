"""Each kind of sentence on a page is printed for runs for which it is true, and not for other runs."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest

from mmqk.lab import judge, load_study
from mmqk.lab.metrics import is_trained, trained_modalities
from mmqk.lab.page.figures.claims import claim_figure
from mmqk.lab.page.figures.papers import paper_figures
from mmqk.lab.page.figures.standard import figures
from mmqk.lab.page.figures.style import arm_colors
from mmqk.lab.page.findings import about_numbers, cannot_tell, effect_in_cell, finding, headline, medians
from mmqk.lab.page.page import _about_learning, _about_losses
from mmqk.lab.page.run_table import run_rows
from mmqk.lab.page.tables import arm_rows
from tests.analysis.fake_runs import DEMO, Planted, write_demo, write_grid, write_run
from tests.report.report_runs import write_sweep

CALM = {"high-pre": replace(DEMO["high-pre"], diverges=None, validated=True)}


def edit(folder, name, change):
    """Apply ``change`` to the JSON record ``name`` of every run."""
    for path in folder.glob(f"*/seed*/{name}"):
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
    return folder


def of_dial(record):
    record["details"]["config"] |= {"data": {"mix": {"dial": 1.0}}, "loss": {"weights": {}}}


def counted(grid):
    for claim in grid["claims"]:
        if claim["id"] in ("C2", "C10"):
            claim |= {"test": "count", "min_effect": 0.05, "positive_control": None}
    grid["claims"] = [claim for claim in grid["claims"] if claim["id"] != "C13"]


def without_shown(grid):
    grid["claims"] = grid["claims"][:3]


def without_steps(grid):
    grid["claims"] = [grid["claims"][0] | {"metric": "diverged", "min_effect": 0.5}, grid["claims"][1]]


def unmeasured(folder):
    for path in folder.glob("*/seed*/metrics.jsonl"):
        path.write_text(path.read_text().replace("attn_logit_absmax", "attn_logit_other"))
    return folder


def one_code(folder):
    path = next(folder.glob("mixed-0*/seed0/run.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "other"}))
    return folder


def lone(folder):
    write_run(folder / "alone" / "seed0", DEMO["mixed"])
    return folder


def tuned(folder):
    """Write a grid in which both arms select the same learning rate out of three."""
    runs = []
    for arm, qk in (("a", "none"), ("b", "rms")):
        for rate, loss in ((0.01, 3.6), (0.02, 3.4), (0.04, 3.8)):
            entry = {"arm": f"{arm}-lr{rate}", "family": arm, "seed": 9, "role": "selection"}
            settings = {"model.qk_norm.kind": qk, "optim.lr": rate}
            planted = Planted(10.0, {"text": loss, "image": 4.6})
            runs.append(({**entry, "point": {"optim.lr": rate}}, planted, settings))
        runs += [
            ({"arm": arm, "family": arm, "seed": s}, Planted(10.0), settings | {"optim.lr": 0.02})
            for s in range(3)
        ]
    claim = {"id": "C", "treatment": "a", "control": "b", "min_effect": 0.2}
    grid = {
        "arms": {"a": {}, "b": {}},
        "claims": [claim],
        "lr": {"rule": "own_best", "metric": "final_loss/text"},
    }
    size = {"n_layers": 2, "n_kv_heads": 0, "d_head": 0, "d_ff": 0, "mlp": "swiglu"}
    made = write_grid(folder, grid, runs)
    return edit(made, "run.json", lambda record: record["details"]["config"]["model"].update(size))


def running(record):
    record["status"] = "running"


def completed(record):
    record["status"] = "completed"


STUDIES = {
    "demo": lambda f: write_demo(f),
    "calm": lambda f: write_demo(f, CALM),
    "going on": lambda f: edit(write_demo(f, CALM), "status.json", running),
    "one seed": lambda f: write_demo(f, CALM, seeds=(0,)),
    "dial": lambda f: edit(write_demo(f, CALM), "run.json", of_dial),
    "counts": lambda f: write_demo(f, CALM, change=counted),
    "all decided": lambda f: write_demo(f, change=without_shown),
    "no course": lambda f: write_demo(f, change=without_steps),
    "unmeasured": lambda f: unmeasured(write_demo(f)),
    "two codes": lambda f: one_code(write_demo(f)),
    "failed": lambda f: write_demo(f, {"mixed": replace(DEMO["mixed"], diverges=150)}),
    "high losses": lambda f: write_demo(f, {"mixed": Planted(60.0, {"text": 12.0, "image": 12.0})}),
    "no unigrams": lambda f: write_demo(f, unigram=False),
    "unbounded": lambda f: write_demo(f, {a: replace(p, bound=False) for a, p in DEMO.items()}),
    "alone": lone,
    "tuned": tuned,
    "sweep": lambda f: write_sweep(f, widths=(64, 128)),
    "calm sweep": lambda f: edit(write_sweep(f, widths=(64, 128)), "status.json", completed),
    "sweep going on": lambda f: edit(
        write_sweep(f, widths=(64, 128)), "status.json", lambda r: r["step"] == 60 and running(r)
    ),
}


def sentences(folder):
    """Return all sentences of a page, without its drawings."""
    study = load_study(folder)
    found = judge(study)
    made = [*figures(study), *paper_figures(study), *(claim_figure(study, v) for v in found)]
    said = [part for figure in made if figure is not None for part in (figure.reading, figure.caption)]
    said += [headline(study, found), *(finding(study, v) for v in found), *cannot_tell(study, found)]
    said += [part for v in found for part in (effect_in_cell(v), f"{medians(study, v)[0]}: ", *v.notes)]
    colors = arm_colors(study)
    said += [about_numbers(found), _about_learning(study)]
    said.append("arms: " + _about_losses([row["final"] for row in arm_rows(study, colors)]))
    said.append(
        "runs: " + _about_losses([loss for row in run_rows(study, colors) for loss in row["losses"]])
    )
    return "\n".join(said)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    @cache
    def of(name):
        folder = tmp_path_factory.mktemp("said") / "made"
        folder.mkdir()
        try:
            return sentences(STUDIES[name](folder))
        finally:
            shutil.rmtree(folder)

    return of


# (Pattern of a sentence, runs for which it is printed, runs for which it must not be printed.)
WHERE = [
    ("is measured but not trained", "demo", ["dial", "sweep", "alone"]),
    ("which differ between arms: compare", "demo", ["dial", "sweep"]),
    (r"differ between arms by up to 0\.10 nats \(text\)", "demo", ["alone"]),
    ("lie within .* of each other", None, ["demo", "dial", "one seed"]),
    ("medians? over (runs|seeds)", "demo", ["one seed", "alone"]),
    (", medians: ", "demo", ["one seed", "counts"]),
    (r"attention logit ended (at|between)", "demo", ["going on", "unmeasured"]),
    ("those with the highest and the lowest final logit", "demo", ["going on", "alone"]),
    (r"(entropy|norm|text tokens|all tokens) ended (at|between)", "demo", ["going on"]),
    ("was last (at|between)", "going on", ["demo", "calm"]),
    ("last losses of trained modalities", "going on", ["demo"]),
    ("; none diverged", "calm", ["demo", "going on"]),
    ("; diverged: ", "demo", ["calm", "going on"]),
    ("Attention logits are measured before any cap.*median of its last 3 probes", "demo", ["unmeasured"]),
    ("Attention logits were not measured", "unmeasured", ["demo", "going on"]),
    ("Dotted: the QK-Norm bound", "demo", ["unbounded"]),
    ("× marks where a run was stopped", "demo", ["calm", "going on"]),
    ("× marks a run that was stopped", "failed", ["calm", "going on"]),
    ("Losses above .* are cut off", "high losses", ["demo"]),
    ("Thin lines: 3 runs per arm; thick lines: their median", "demo", ["one seed", "alone"]),
    ("One run per arm", "one seed", ["sweep"]),
    ("median over seeds", "demo", ["one seed"]),
    ("intervals are Student's t", "demo", ["counts", "alone", "one seed"]),
    ("Effects are means over shared seeds", "demo", ["counts", "alone"]),
    ("ratios are averaged on a log scale", "demo", ["no course"]),
    ("Santner and Snell", "counts", ["demo", "alone"]),
    ("Numbers above are medians over runs", "demo", ["counts", "one seed"]),
    (r"Runs that diverged: 0 of 3 \(mixed", "counts", ["demo"]),
    ("Curves are raw", "demo", ["no course"]),
    ("Right: result of each run", "demo", ["no course"]),
    ("Result of each run", "no course", ["demo"]),
    ("Gray lines join the runs of a seed", "demo", ["alone"]),
    ("no claim was registered for these runs", "alone", ["demo", "sweep"]),
    ("were not tuned separately", "demo", ["tuned", "alone", "sweep"]),
    ("Own best learning rates: ", "tuned", ["demo", "sweep"]),
    ("only selected a learning rate", "tuned", ["sweep"]),
    (r"Diverged runs \(×\) are drawn at", "sweep", ["calm sweep", "tuned"]),
    ("Not shown: .* unfinished run", "sweep going on", ["sweep"]),
    ("shown without a verdict", "demo", ["all decided", "counts"]),
    ("Results of unfinished runs", "going on", ["demo"]),
    ("Effects weaker than", "demo", ["alone", "one seed"]),
    ("the runs used several versions", "two codes", ["demo"]),
    ("the effect is a bound", "failed", ["demo", "calm"]),
    ("a bound, because 3 failed runs count", "failed", ["demo"]),
    ("a model that knows only token frequencies and the places of special tokens", "demo", ["no unigrams"]),
    ("its value at initialization", "no unigrams", ["demo"]),
    (
        r"arms: \* marks means of the last 50 training steps; the others are on held-out data",
        "demo",
        ["calm"],
    ),
    (
        r"runs: \* marks means of the last 50 training steps; the others are on held-out data",
        "demo",
        ["calm"],
    ),
    (r"runs: \* marks means of the last 50 training steps\.", "going on", ["demo", "calm"]),
    ("runs: Losses are on held-out data", "calm", ["demo", "going on"]),
    (
        "nan|not measured|ended at [.;]|inf ",
        None,
        ["demo", "going on", "one seed", "counts", "sweep going on"],
    ),
]


@pytest.mark.parametrize(("pattern", "true", "false"), WHERE, ids=lambda value: str(value)[:40])
def test_a_sentence_stands_where_it_is_true_and_nowhere_else(said, pattern, true, false):
    if true is not None:
        assert re.search(pattern, said(true)), said(true)
    for name in false:
        found = re.search(f".*(?:{pattern}).*", said(name))
        assert not found, (name, found[0])


def test_a_caption_of_one_claim_is_not_that_of_another(tmp_path):
    study = load_study(write_demo(tmp_path / "demo"))
    captions = {v.claim.id: claim_figure(study, v).caption for v in judge(study)}
    assert "Gray lines" in captions["C2"] and "Gray lines" not in captions["C13"]
    assert "that the verdict counts" in captions["C2"] and "that the claim shows" in captions["C13"]
    assert "medians over runs" in captions["C2"] and "medians" not in captions["C13"]


@pytest.mark.parametrize(
    ("mix", "weights", "trained"),
    [
        ({"dial": 1.0}, {}, ("text", "image")),
        ({"tokens": 1.0}, {}, ("text", "image")),
        ({"interleaved": 1.0}, {}, ("text", "image")),
        ({"pair": 1.0}, {}, ("text", "image")),
        ({"dial": 1.0}, {"image": 0.0}, ("text",)),
        ({"text": 1.0}, {}, ("text",)),
        ({"image": 1.0}, {}, ("image",)),
        ({"dial": 0.0, "text": 1.0}, {}, ("text",)),
    ],
)
def test_what_is_trained_is_what_the_mix_holds_and_the_loss_weighs(tmp_path, mix, weights, trained):
    write_run(tmp_path / "run" / "seed0", DEMO["mixed"])

    def change(record):
        record["details"]["config"] |= {"data": {"mix": mix}, "loss": {"weights": weights}}

    [run] = load_study(edit(tmp_path, "run.json", change)).runs
    assert trained_modalities(run) == trained
    assert [is_trained(run, m) for m in ("text", "image")] == [m in trained for m in ("text", "image")]


def test_the_curves_of_a_final_loss_are_named_for_what_they_show(tmp_path):
    """The runs measure the held-out loss once, at their end, until three more measurements are added."""
    folder = write_demo(tmp_path / "demo")
    record = json.loads((folder / "ablation.json").read_text())
    (claim,) = (c for c in record["grid"]["claims"] if c["id"] == "C13")
    claim["metric"] = "final_loss/text"
    (folder / "ablation.json").write_text(json.dumps(record))

    def curves():
        study = load_study(folder)
        (verdict,) = (v for v in judge(study) if v.claim.id == "C13")
        panel = claim_figure(study, verdict).rows[0][0]
        return panel.ylabel, max(len(line.steps) for line in panel.lines)

    training = curves()
    assert training[0] == "Training loss, text (nats per token)" and training[1] > 3
    for path in folder.glob("*/seed*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        more = [line | ({"val_loss/text": 5.0} if line["step"] in (25, 50, 75) else {}) for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in more))
    assert curves() == ("Held-out loss, text (nats per token)", 4)
