"""Install the wheel into a new environment and use it in an empty folder: ``python -m tests.wheel``.

The script uses the standard library only, so it runs with any Python. The new environment has the wheel, its
dependencies and mypy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
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
mmqk tokenize --shards {data}/emoji/val-00000.tar --out project/tokens --val-fraction 0.1 --workers 0
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


def main() -> int:
    """Build, install and use the wheel; return the exit code of the first command that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", type=Path, default=ROOT / ".venv-wheel", help="the environment, made if missing")
    env = parser.parse_args().env.resolve()
    if not (env / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", env], check=True)
    pip = [str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    variables["PATH"] = f"{env / 'bin'}{os.pathsep}{variables['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty"
        empty.mkdir()
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT)], check=True, env=variables)
        (wheel,) = Path(folder).glob("*.whl")
        subprocess.run([*pip, "install", "--force-reinstall", "--no-deps", wheel], check=True, env=variables)
        subprocess.run([*pip, "install", wheel, "mypy"], check=True, env=variables)
        where = "from mmqk.store.shipped import SHIPPED; print(SHIPPED)"
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
    print(f"The wheel works in an empty folder: {len(COMMANDS.strip().splitlines())} commands.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
