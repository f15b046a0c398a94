"""With `use_lean_torchmetrics`, Lightning imports only a part of torchmetrics, and the rest still works when used."""

from __future__ import annotations

import subprocess
import sys

LEAN = "from mmqk.training.loop.lean_torchmetrics import use_lean_torchmetrics as use; use()\n"
# Prints whether importing Lightning imports one of these.
REST = "torchmetrics.functional.image", "torchmetrics.functional.text", "scipy", "torchvision", "transformers"
IMPORTED = f"import sys, lightning\nprint(any(name in sys.modules for name in {REST}))\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_it_lightning_imports_all_metrics_and_these_stay():
    """The control: without `use_lean_torchmetrics`, Lightning imports everything. A later call changes nothing."""
    later = "import torchmetrics\nbefore = torchmetrics\n" + LEAN + "import torchmetrics\n"
    assert run(f"{IMPORTED}{later}print(torchmetrics is before)") == "True\nTrue"


def test_lightning_imports_no_metric_and_one_is_loaded_when_it_is_used():
    code = """
import lightning as L, torch, torchmetrics
from torchmetrics.classification import BinaryAccuracy
assert issubclass(torchmetrics.Accuracy, torchmetrics.Metric)
assert issubclass(BinaryAccuracy, torchmetrics.Metric)
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.accuracy = BinaryAccuracy()
    def training_step(self, batch, index):
        self.accuracy(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1]))
        self.log("accuracy", self.accuracy, on_epoch=True)
        return self.weight.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
trainer = L.Trainer(max_steps=1, enable_model_summary=False, **quiet)
trainer.fit(Module(), [1])
print(float(trainer.callback_metrics["accuracy_epoch"]))
"""
    assert run(LEAN + IMPORTED + code) == "False\n0.75"
