"""Runs the code of docs/adapters.md with a tiny model, and reads the numbers that it logs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {name: "".join(CODE.findall(text)) for name, text in SECTION.findall(PAGE.read_text(encoding="utf-8"))}
V, IMAGE = 48, {"image": range(24, 48)}


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes))


def namespace(name):
    """Return what the page says is the reader's, and a function that returns the logged numbers."""
    torch.manual_seed(0)
    logged: dict[str, float] = {}
    given = {"IMAGE": IMAGE, "log": lambda numbers, step: logged.update(numbers)}
    ids = torch.randint(0, V, (24, 2, 9))
    if name.startswith("litgpt"):
        lightning = pytest.importorskip("lightning")
        from litgpt import GPT, Config

        given["model"] = GPT(Config(block_size=8, vocab_size=V, padded_vocab_size=V, n_layer=2, n_head=2, n_embd=16))
        given["loader"], given["fabric"] = list(ids), lightning.Fabric(accelerator="cpu", devices=1)
        given["fabric"].log_dict = given["log"]
    else:
        rows = [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        given |= {"model": llama(), "rows": rows, "loader": loader}
    given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), 1e-3)
    return given, logged


RUN = {"Plain PyTorch": "torch", "Lightning": "lightning", "transformers Trainer": "accelerate",
       "Accelerate": "accelerate", "litgpt and other loops with Fabric": "litgpt"}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_section_trains_and_logs(name, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec(RUN[name]) is None:
        pytest.skip(f"{RUN[name]} is not installed")
    monkeypatch.chdir(tmp_path)
    given, logged = namespace(name)
    before = [p.detach().clone() for p in given["model"].parameters()]
    if name == "Lightning":
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

        for logger in (CSVLogger, TensorBoardLogger):  # the Trainer takes TensorBoard's if it is installed
            monkeypatch.setattr(logger, "log_metrics", lambda self, numbers, step=None: logged.update(numbers))
    if name == "Accelerate":
        import accelerate

        monkeypatch.setattr(accelerate.Accelerator, "log", lambda self, numbers, step: logged.update(numbers))
    exec(SECTIONS[name], given)
    if name == "transformers Trainer":
        logged.update(next(x for x in reversed(given["trainer"].state.log_history) if "update_norm" in x))
    assert "forward and backward           ok" in capsys.readouterr().out
    assert any(not torch.equal(p, q) for p, q in zip(given["model"].parameters(), before, strict=True))
    assert {"loss/text", "loss/image", "grad_norm", "update_norm", "q_norm/image/layer01"} <= logged.keys()
    assert not any("_forward_module" in tag for tag in logged)
