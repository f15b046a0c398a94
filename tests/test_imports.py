"""Rules for imports between the parts of mmqk: each rule is checked in a new process, and planted violations fail."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.wheel import WATCH

ROOT = Path(__file__).parents[1]

# An import finder that runs before all others; a forbidden import ends the process, even inside a try block.
GUARD = """
import importlib, importlib.machinery, json, os, pkgutil, sys

root, rule = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, root)

class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in rule["absent"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if refused(name, top):
            print(f"broken: {rule['modules']} imports {name}", flush=True)
            os._exit(3)
        return None

def refused(name, top):
    if any(name == r or name.startswith(r + ".") for r in rule["never"]):
        return True
    if top == "mmqk":
        return bool(rule["mmqk"]) and not any(
            name == a or name.startswith(a + ".") or a.startswith(name + ".") for a in rule["mmqk"]
        )
    # The standard library tries to import modules that do not exist here; only installed modules are refused.
    other = rule["stdlib_only"] and top not in sys.stdlib_module_names
    return other and importlib.machinery.PathFinder.find_spec(top) is not None

sys.meta_path.insert(0, Guard())
for module in rule["modules"]:
    found = importlib.import_module(module)
    assert found.__file__.startswith(root), found.__file__
    for part in pkgutil.walk_packages(getattr(found, "__path__", []), module + "."):
        if part.name not in rule["leave_out"]:
            importlib.import_module(part.name)
exec(rule["then"], {})
print("kept")
"""


@dataclass(frozen=True)
class Rule:
    """The modules that may be loaded when ``modules`` and their submodules are imported and ``then`` is run.

    Attributes:
        mmqk: the parts of mmqk that may be imported; empty for all.
        never: modules that must not be imported, not even by a library.
        absent: packages that are treated as not installed.
        stdlib_only: whether only the standard library and mmqk may be imported.
        leave_out: submodules that are not imported.
    """

    modules: tuple[str, ...]
    mmqk: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    stdlib_only: bool = False
    leave_out: tuple[str, ...] = ()
    then: str = ""


PROBE = """
import torch
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors import probe
model = EarlyFusionTransformer(ModelConfig(d_model=8, n_layers=1, n_heads=2, vocab_sizes={"text": 6, "image": 4}))
ids = torch.arange(10).repeat(2, 2)
seen = torch.ones_like(ids, dtype=torch.bool)
flat = probe(model, TokenBatch(ids, (ids >= 6).long(), seen, seen, torch.tensor(38.0))).flat()
assert "attn_logit_absmax/text-image/layer00" in flat, sorted(flat)
"""
ELSEWHERE = "import os, tempfile; os.chdir(tempfile.mkdtemp())\n"
# Write a run and its report.
REPORT = f"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.lab.fake_runs import DEMO, write_run
from mmqk.report import main
with tempfile.TemporaryDirectory() as folder:
    write_run(Path(folder) / "runs/one", DEMO["mixed"])
    assert main([folder + "/runs", "--out", folder + "/report"]) == 0
    assert (Path(folder) / "report/index.html").exists()
"""
RESOLVE = f"""
import os
from mmqk.config import resolve
os.chdir({str(ROOT)!r})
assert resolve(["--config=configs/demo.yaml"]).out.parts[:2] == ("runs", "demo")
"""
# The packages of the extra lab. pandas is not listed, because torch.compiler tries to import it.
LAB = (
    *("lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "transformers", "tensorboard"),
    *("webdataset", "braceexpand", "timm", "tokenizers", "safetensors", "torchvision", "pydantic", "yaml", "PIL"),
    *("scipy", "matplotlib", "jinja2", "rich", "vector_quantize_pytorch"),
)
WITHOUT_LAB = """
from mmqk.cli import main
from mmqk.store import UserError
for command in ("train", "ablate", "report", "watch", "inspect", "data tokenize"):
    try:
        main([*command.split(), "demo"])
    except UserError as error:
        assert str(error).endswith("pip install 'mmqk[lab]'"), error
    else:
        raise AssertionError(command)
"""
RULES = {
    "commands": Rule(("mmqk.cli",), absent=LAB, then=WITHOUT_LAB),
    "ranges": Rule(("mmqk.model.ranges",), mmqk=("mmqk.model.ranges",), stdlib_only=True),
    "store": Rule(("mmqk.store",), mmqk=("mmqk.store",), never=("torch", "numpy"), absent=LAB),
    "model": Rule(("mmqk.model",), mmqk=("mmqk.model",), absent=LAB),
    "monitors": Rule(
        ("mmqk.monitors",), absent=LAB, then=PROBE + ELSEWHERE + WATCH,
        mmqk=("mmqk.monitors", "mmqk.model", "mmqk.data.batch", "mmqk.distributed", "mmqk.store"),
        leave_out=("mmqk.monitors.own.callback", "mmqk.monitors.lightning", "mmqk.monitors.transformers"),
    ),
    "interop": Rule(
        ("mmqk.interop",), mmqk=("mmqk.interop", "mmqk.model", "mmqk.store"), never=("transformers", "lightning"),
        leave_out=("mmqk.interop.folders", "mmqk.interop.surgery"),  # need a run
    ),
    "config": Rule(
        ("mmqk.config",), then=RESOLVE,
        never=("torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"),
    ),
    "shards": Rule(("mmqk.data.shards",), never=("mmqk.data.tokenizers", "tokenizers")),
    "analysis": Rule(
        ("mmqk.lab.runner.watch", "mmqk.lab.runs", "mmqk.lab.metrics", "mmqk.lab.effects", "mmqk.lab.counts",
         "mmqk.lab.verdicts.judge", "mmqk.lab.formatting", "mmqk.lab.remedies"),
        never=("torch", "lightning", "matplotlib"),
    ),
    "report": Rule(
        ("mmqk.lab.runs", "mmqk.lab.metrics", "mmqk.lab.verdicts.judge", "mmqk.lab.page", "mmqk.report"),
        never=("torch", "lightning"), then=REPORT,
    ),
}  # fmt: skip


def check(rule: Rule, root: Path) -> str:
    """Check a rule for the mmqk under ``root`` in a new process; return "kept" or a line with the violation."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD, str(root), json.dumps(asdict(rule))], capture_output=True, text=True, cwd=root
    )
    said = done.stdout.strip().splitlines() or [done.stderr]
    assert (done.returncode == 0) == (said[-1] == "kept"), done.stderr
    return said[-1]


@pytest.mark.parametrize("name", RULES)
def test_the_rule_is_kept(name):
    assert check(RULES[name], ROOT) == "kept"


@pytest.mark.parametrize(
    ("name", "file", "line", "says"),
    [
        ("store", "store/metrics.py", "import numpy", "imports numpy"),
        ("model", "model/__init__.py", "from mmqk.store import tag", "imports mmqk.store"),
        ("config", "data/tokenizers/files.py", "from torch import Tensor", "imports torch"),  # by `resolve` only
        ("report", "report.py", "def main(argv): import torch", "imports torch"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, name, file, line, says):
    shutil.copytree(ROOT / "mmqk", tmp_path / "mmqk", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "mmqk" / file
    text = path.read_text()
    if line.startswith("def"):  # inside a function, so that importing the file alone does not fail
        guard = 'if __name__ == "__main__":'
        planted = text.replace(guard, f"{line}\n\n{guard}")
    else:
        first = re.search(r"^(?:from (?!__future__)|import )", text, re.MULTILINE)
        assert first is not None
        planted = f"{text[: first.start()]}{line}\n{text[first.start() :]}"
    assert planted != text
    path.write_text(planted)
    assert says in check(RULES[name], tmp_path)
