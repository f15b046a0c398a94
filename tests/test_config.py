"""Parsing of configurations: every user error is one sentence that names the field."""

from __future__ import annotations

import math
import re

import pytest

from mmqk.config import print_yaml, resolve
from mmqk.store import UserError, cli_main, differing_fields, read_metrics
from mmqk.train import main

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--model.qknorm=rms"], "no field 'model.qknorm': did you mean 'model.qk_norm'"),
        (["lr=3"], "no field 'lr': did you mean 'optim.lr'?"),
        (["trainer.max_steps"], "trainer.max_steps has no value: write trainer.max_steps=VALUE"),
        (["model.qk_norm.kind=layers"], "model.qk_norm.kind is 'layers': it must be 'none', 'rms', 'layer' or 'l2'"),
        (["checkpoint.at=[4, x]"], "checkpoint.at[1] is 'x': it must be a valid integer"),
        (["data.batch_size=6", "trainer.accumulate_grad_batches=4"], "not a multiple of"),
        (["trainer.strategy=fsdp", "optim.qk_clip=1"], "optim.qk_clip needs whole matrices"),
        (["monitor.probe_sequences=50"], "monitor.probe_sequences 50 is more than the 8 held-out sequences"),
        (
            ["data.read=shards", "trainer.devices=2", "monitor.probe_split=current", "monitor.probe_sequences=3"],
            "is more than the 2 sequences of a micro-batch",
        ),
        (["--loss.weights={text: 0, image: 0}"], "loss.weights are 0 for text and image, which trains nothing"),
        (["--optim.decay_mode=independent", "--optim.weight_decay=2"], "optim.weight_decay is 2.0, but"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_made(tiny_args, tmp_path, capsys, extra, says):
    out = tmp_path / "run"
    assert cli_main(main)([*tiny_args, *extra, f"--out={out}"]) == 2
    notices, *said = capsys.readouterr().err.strip().split("mmqk: ")
    assert len(said) == 1 and says in said[0] and "\n" not in said[0] and "Traceback" not in notices
    assert not list(out.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("model:\n  d_modell: 3\n", "no field 'model.d_modell': did you mean 'model.d_model'"),
        ("model: [\n", "is not the YAML of a run (.*expected the node content"),
        ("", "sets no field: give a YAML mapping of fields to values"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_too(tiny_args, tmp_path, yaml, says):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml)
    good = tmp_path / "good.yaml"
    good.write_text("optim: {eps: 0.5}\n")
    for files in ([f"--config={path}"], ["--config", str(good), "--config", str(path)]):
        with pytest.raises(UserError, match=says.replace("(", "\\(")) as refusal:
            resolve([*files, *(arg for arg in tiny_args if "optim.lr" not in arg)])
        assert str(path) in str(refusal.value) and str(good) not in str(refusal.value)


def test_fields_may_be_null(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("trainer: {gradient_clip_val: null}\nmodel: {attn_softcap: }\nout:\n")
    run = resolve([f"--config={path}"])
    assert (run.trainer.gradient_clip_val, run.model.attn_softcap) == (None, None)
    assert resolve([]).trainer.gradient_clip_val == 1


@pytest.mark.parametrize(
    ("yaml", "key"),
    [
        ("optim: {lr: 0.5}\nseed: 1\noptim: {eps: 1.0e-5}\n", "optim"),
        ("data: {mix: {pair: 1, text: 1, pair: 2}}\n", "pair"),
    ],
)
def test_a_key_that_is_written_twice_is_refused(tmp_path, yaml, key):
    path = tmp_path / "a.yaml"
    path.write_text(yaml)
    with pytest.raises(UserError) as refusal:
        resolve([f"--config={path}"])
    assert f"{path} " in str(refusal.value) and f"the key '{key}' is written twice" in str(refusal.value)
    # The control: one key in two sections, and a key that replaces one of a merge key.
    merged = "model:\n  <<: {n_layers: 2, d_model: 64}\n  n_layers: 3\n"
    path.write_text(f"{merged}monitor: {{every_n_steps: 5}}\ncheckpoint: {{every_n_steps: 7}}\n")
    run = resolve([f"--config={path}"])
    assert (run.model.n_layers, run.model.d_model) == (3, 64)
    assert (run.monitor.every_n_steps, run.checkpoint.every_n_steps) == (5, 7)


def test_patterns_and_dotted_keys_of_a_file_are_looked_up_beside_it(tiny_data, tmp_path):
    (tmp_path / "own").symlink_to(tiny_data / "pairs")
    path = tmp_path / "a.yaml"
    others = [f"--data.{name}={tiny_data / name}" for name in ("text", "tokenizers", "cache")]
    patterns = ("own/train-{00000..00001}.tar", "own/train-*.tar", "own/train-0000?.tar", "own/train-[0-9]*.tar")
    for pattern in patterns:
        for yaml in (f"data: {{pairs: '{pattern}'}}\n", f"data.pairs: '{pattern}'\n"):
            path.write_text(yaml)
            run = resolve([f"--config={path}", "--data.read=shards", *others])
            assert run.data.pairs == str(tmp_path / pattern), yaml
    path.write_text("data.pairs: own\n")
    assert resolve([f"--config={path}", *others]).data.pairs == str(tmp_path / "own")
    # The control: the same patterns on the command line.
    for pattern in patterns:
        with pytest.raises(UserError, match=re.escape(pattern)):
            resolve([f"--data.pairs={pattern}", "--data.read=shards", *others])


def test_files_merge_and_the_command_line_wins(tiny_args, tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {lr: 0.5, eps: 1.0e-5}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 0.25}\n")
    files = [f"--config={tmp_path / n}.yaml" for n in "ab"]
    args = [arg for arg in tiny_args if "optim.lr" not in arg]
    run = resolve([*args, *files])
    assert (run.optim.lr, run.optim.eps) == (0.25, 1e-5)
    for words in ([*args, *files, "optim.lr=0.125"], [*args, "--optim.lr=0.125", *files]):
        assert resolve(words).optim.lr == 0.125


def test_resolved_configuration_reads_back_as_the_same_run(tiny_args, tmp_path):
    run = resolve([*tiny_args, "--model.qk_norm.kind=layer", "--loss.weights.image=0", '--data.mix={"text": 1}'])
    (tmp_path / "again.yaml").write_text(print_yaml(run))
    again = resolve([f"--config={tmp_path / 'again.yaml'}"])
    assert again.id == run.id and again.data.mix == {"text": 1.0}
    assert resolve([f"--config={tmp_path / 'again.yaml'}", "--seed=5"]).id != run.id


def test_identity_is_what_changes_the_numbers(tiny_args, tiny_data):
    base = resolve(tiny_args)
    for same in ("--data.workers=2", "--checkpoint.keep=5", "--checkpoint.at=[3]", "--optim.schedule_steps=12",
                 "--threads=2", "--compile=false", "--activation_checkpointing=true", "--out=elsewhere",
                 f"--data.cache={tiny_data}"):  # fmt: skip
        assert resolve([*tiny_args, same]).id == base.id, same
    for other in ("--seed=1", "--optim.lr=0.5", "--data.mix.text=2", "--backend=math", "--monitor.probe_sequences=2",
                  "--trainer.max_steps=13", "--trainer.precision=bf16-mixed", "--trainer.gradient_clip_val=2",
                  "--model.post_norm=true", "--loss.z_loss=1e-4", "--loss.chunk_size=64", "--compile=true",
                  "--optim.schedule_steps=6"):  # fmt: skip
        changed = resolve([*tiny_args, other])
        assert changed.id != base.id
        field = other.removeprefix("--").split("=")[0]
        assert differing_fields(base.identity, changed.identity) == [field]
    assert resolve(["--config=configs/demo.yaml"]).id == "249a79196a"  # as ever


def test_vocab_sizes_come_from_the_tokenizers(tiny_args):
    assert resolve(tiny_args).model.vocab_sizes == {"text": 305, "image": 32}
    with pytest.raises(UserError, match="the vocabulary of the data has"):
        resolve([*tiny_args, '--model.vocab_sizes={"text": 9, "image": 9}'])


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("cpu", ()),
        # A C++ compiler takes half a minute; tests/model/test_compiled.py covers compilation.
        pytest.param("gpu_25m", ("--model.n_layers=2", "--monitor.probe_sequences=2", "--compile=false"), marks=SLOW),
    ],
)
def test_every_configuration_trains_two_steps_on_a_cpu(name, smaller, tiny_data, tmp_path):
    """Train with tiny data and few sequences, in bf16-mixed if the configuration sets it. GPU models keep d_model."""
    own = [f"--data.{k}={tiny_data / k}" for k in ("pairs", "text", "tokenizers", "cache")]
    few = ["--data.batch_size=2", "--data.val_sequences=8", "--data.workers=0", "--trainer.max_steps=2"]
    args = [f"--config=configs/{name}.yaml", *own, *few, *smaller, "--trainer.accelerator=cpu", "--threads=2"]
    assert main([*args, "--quiet", f"--out={tmp_path / name}"]) == 0
    lines = read_metrics(tmp_path / name / "metrics.jsonl")
    assert lines[-1]["step"] == 2 and math.isfinite(lines[-1]["val_loss/image"])
    assert resolve(args).trainer.precision == ("32-true" if name == "cpu" else "bf16-mixed")


@pytest.mark.parametrize("name", ["demo", "cpu", "dial", "gpu_25m", "gpu_124m"])
def test_every_configuration_names_its_folder(name):
    assert resolve([f"--config=configs/{name}.yaml"]).out.parts[:2] == ("runs", name)
