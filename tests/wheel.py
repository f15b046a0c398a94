"""Install the wheel into two new environments and use it in an empty folder: ``python -m tests.wheel``.

The script uses the standard library only, so it runs with any Python. The first environment has the wheel with the
extra lab, and mypy. The second one has the wheel without extras: its packages are links to those of the first one,
and only the packages that the wheel requires without extras, and those that they require, are linked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The commands that README and docs give to users without a checkout. They run in this order in one folder.
COMMANDS = """
mmqk --version
mmqk
mmqk remedies
mmqk train demo trainer.max_steps=20 data.val_sequences=16 --quiet
python -m mmqk.train --config configs/demo.yaml --trainer.max_steps 20 --data.val_sequences 16 --quiet
mmqk watch --once runs
mmqk report runs/demo --out page
mmqk inspect demo --sequences 2 --tokens 5000
mmqk init project
mmqk train project/config.yaml trainer.max_steps=20 data.val_sequences=16 --quiet
mmqk ablate project/grid.yaml --dry-run
mmqk ablate demo --dry-run
mmqk bench reports/bench/zoo.zip --outcomes
mmqk data tokenize --shards {data}/emoji/val-00000.tar --out project/tokens --val-fraction 0.1 --workers 0
mmqk train project/config.yaml data.pairs=project/tokens trainer.max_steps=5 data.val_sequences=8 --quiet
mypy typed.py
"""
TYPED = """\
from mmqk.config import resolve
from mmqk.monitors import attach

run = resolve(["demo"])
steps: int = run.data.batch_size
reveal_type(attach)
"""

# Links the requirements of mmqk without extras, from this environment into the folder of packages in argv[1].
LINK = """
import importlib.metadata as metadata, pathlib, sys
from pip._vendor.packaging.requirements import Requirement
names, linked, target = ["mmqk"], set(), pathlib.Path(sys.argv[1])
while names:
    name = names.pop().lower().replace("_", "-")
    if name in linked:
        continue
    linked.add(name)
    found = metadata.distribution(name)
    needed = map(Requirement, found.requires or [])
    names += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    for top in {file.parts[0] for file in found.files if name != "mmqk"} - {"..", "__pycache__"}:
        if not (target / top).exists():
            (target / top).symlink_to(pathlib.Path(found.locate_file(top)).resolve())
print(*sorted(linked))
"""
WATCH = """
import torch
from torch import nn
from mmqk.monitors import attach

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.head(mixed[:, 0])

logged = {}
model, ids = Model(), torch.arange(24).view(2, 12) % 16
watch = attach(
    model, modality={"image": range(8, 16)}, every_n_steps=1, strict=True, out="runs/mine",
    log=lambda values, step: logged.update(values),
)
model(ids).sum().backward()
watch.step()
watch.close()
assert "attn_logit_absmax/text-image/layer00" in logged and "out_log_z/text" in logged, sorted(logged)
"""
# Commands that need the extra lab, and one that does not.
LIGHT = {"mmqk --version": 0, "mmqk": 0} | dict.fromkeys(
    ("mmqk train demo", "mmqk ablate demo", "mmqk report runs", "mmqk inspect demo", "mmqk watch --once runs"), 2
)


def environment(path: Path) -> dict[str, str]:
    """Make an environment if it is missing; return the variables with which its commands run."""
    if not (path / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return variables | {"PATH": f"{path / 'bin'}{os.pathsep}{variables['PATH']}"}


def use_light(full: dict[str, str], path: Path, wheel: Path, folder: Path) -> int:
    """Install the wheel without extras and watch a model; return 0 if the other commands ask for the extra lab."""
    shutil.rmtree(path, ignore_errors=True)
    light = environment(path)
    run = partial(subprocess.run, env=light, cwd=folder, text=True)
    run(["python", "-m", "pip", "--quiet", "install", "--no-deps", wheel], check=True)
    packages = run(["python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True)
    run(["python", "-c", LINK, packages.stdout.strip()], check=True, env=full)
    without = "from importlib.util import find_spec; assert find_spec('lightning') is find_spec('yaml') is None"
    run(["python", "-c", f"{without}\n{WATCH}"], check=True)
    for line, code in LIGHT.items():
        print(f"without extras $ {line}", flush=True)
        done = run(line.split(), capture_output=True)
        is_asked = done.stderr.count("\n") == 1 and done.stderr.endswith("pip install 'mmqk[lab]'\n")
        if done.returncode != code or is_asked != (code == 2):
            print(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
            return 1
    return 0


def main() -> int:
    """Build, install and use the wheel; return the exit code of the first command that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", type=Path, default=ROOT / ".venv-wheel", help="the environment, made if missing")
    env = parser.parse_args().env.resolve()
    variables = environment(env)
    pip = [str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty"
        empty.mkdir()
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT)], check=True, env=variables)
        (wheel,) = Path(folder).glob("*.whl")
        subprocess.run([*pip, "install", "--force-reinstall", "--no-deps", wheel], check=True, env=variables)
        subprocess.run([*pip, "install", f"{wheel}[lab]", "mypy"], check=True, env=variables)
        where = "from mmqk.store.files import SHIPPED; print(SHIPPED)"
        found = subprocess.run(
            [env / "bin/python", "-c", where], check=True, env=variables, cwd=empty, capture_output=True, text=True
        )
        (empty / "typed.py").write_text(TYPED)
        for line in COMMANDS.strip().splitlines():
            print(f"$ {line}", flush=True)
            command = line.format(data=Path(found.stdout.strip()) / "data")
            done = subprocess.run(command.split(), env=variables, cwd=empty, capture_output=True, text=True)
            if done.returncode:
                print(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
                return done.returncode
        if use_light(variables, env.with_name(f"{env.name}-light"), wheel, empty):
            return 1
    print(f"The wheel works in an empty folder: {len(COMMANDS.strip().splitlines())} commands.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
