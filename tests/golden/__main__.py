"""Golden runs: nine short runs whose losses, norms and logits are compared with stored values.

``python -m tests.golden`` (`make golden`) trains the runs and compares them with the stored values. ``--write``
stores the current values. On a platform with stored digests every value must be equal, bit for bit. On another
platform, where kernels sum in another order, losses, norms and logits may differ by `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.tokens.ids import main as write_ids
from mmqk.store import read_metrics
from mmqk.train import main as train

HERE = Path(__file__).parent
KEPT = HERE / "values.json"
RUNS = ("plain", "chameleon", "capped", "sigmoid", "untied", "clipped", "gated", "dial", "ids")
# A time, and statistics newer than the stored values.
LEFT_OUT = {"tokens_per_s", "update_unchanged", "clip_factor", "qk_update_rank"}
# Largest difference of losses, norms and logits on another platform, relative to the larger of the two values. Other
# values are compared on the same platform only, because some of them amplify rounding: differences of nearly equal
# numbers (offsets, biases) and the maxima of a clipped run.
TOLERANCE = 2e-2
COMPARED_ELSEWHERE = ("loss", "val_loss", "log_z", "logits", "final_norm", "resid_norm", "q_norm", "k_norm", "v_norm")


def arguments(name: str, scratch: Path) -> list[str]:
    """Return the command line of a golden run."""
    more = [f"--data.tokens={scratch / 'ids'}"] if name == "ids" else []
    return [f"--config={HERE / 'base.yaml'}", f"--config={HERE / name}.yaml", *more, "--quiet"]


def write_documents(scratch: Path) -> None:
    """Write a token folder of two modalities whose ids do not depend on any library's random numbers."""
    ids = np.array([(i * i * 31 + i * 7) % 60 for i in range(64 * 200)], dtype=np.int64).reshape(200, 64)
    ids[:, 32:] += 60
    np.save(scratch / "ids.npy", ids)
    argv = [f"--train={scratch / 'ids.npy'}", "--val-fraction=0.2", "--vocab-sizes=text=60,image=60"]
    with contextlib.redirect_stdout(io.StringIO()):
        write_ids([*argv, f"--out={scratch / 'ids'}"])


def measure(name: str, scratch: Path) -> dict[str, Any]:
    """Train one run; return its id, a digest of all its values, and the values to compare: the loss of each step, the
    last line of metrics, and logits."""
    argv = arguments(name, scratch)
    out = scratch / "runs" / name
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        code = train([*argv, f"--out={out}"])
    if code:
        raise SystemExit(f"the golden run {name} ended with {code}: {said.getvalue()}")
    run = resolve(argv)
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    batch = data.probe_batch(run.monitor.probe_sequences)
    with torch.no_grad():
        logits_BTV = load_model(out)(batch.ids_BT, batch.modality_BT, batch.document_BT)
    lines = [
        {k: v for k, v in line.items() if k.partition("/")[0] not in LEFT_OUT}
        for line in read_metrics(out / "metrics.jsonl")
    ]
    digest = hashlib.sha256(json.dumps(lines, sort_keys=True).encode())
    digest.update(logits_BTV.contiguous().numpy().tobytes())
    kept = {f"loss@{line['step']}": line["loss"] for line in lines if "loss" in line}
    kept |= {tag: value for tag, value in lines[-1].items() if tag != "step"}
    rows_BT = logits_BTV.logsumexp(-1)
    kept |= {f"logits/row{b}/position{t}": rows_BT[b, t].item() for b in range(2) for t in range(0, 96, 16)}
    return {"id": run.id, "digest": digest.hexdigest(), "values": kept}


def this_platform() -> dict[str, str]:
    """Return the properties of this machine that decide which kernels run, and so the last bits of the results."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "torch": torch.__version__.split("+")[0],
        "processor": names[0] if names else platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
    }


def differences(old: dict[str, Any], new: dict[str, Any], digest: str | None) -> list[str]:
    """Return one line for each value of a run that differs from the stored one.

    Args:
        old: the stored run.
        new: the new run.
        digest: the stored digest of the run on this platform; None if none is stored; `TOLERANCE` then applies.
    """
    lines = [f"run id: {old['id']} -> {new['id']}"] if old["id"] != new["id"] else []
    if digest == new["digest"]:
        return lines
    before, after = old["values"], new["values"]
    lines += [f"{tag}: stored, but missing now" for tag in before.keys() - after.keys()]
    lines += [f"{tag}: not among the stored values" for tag in after.keys() - before.keys()]
    for tag in sorted(before.keys() & after.keys()):
        a, b = float(before[tag]), float(after[tag])  # NaN and infinities are strings in metrics.jsonl
        if re.split("[@/]", tag)[0] not in COMPARED_ELSEWHERE:
            continue
        if not (a == b or abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) or (a != a and b != b)):
            lines.append(f"{tag}: {a!r} -> {b!r}")
    if digest is not None and not lines:
        lines.append(
            f"bits differ from those stored on this platform, but losses, norms and logits by at most "
            f"{100 * TOLERANCE:g} %"
        )
    return lines


def digests_of(kept: dict[str, Any]) -> dict[str, str]:
    """Return the stored digests of this platform by run; empty on a new platform."""
    here = this_platform()
    return next((entry["digests"] for entry in kept["platforms"] if entry["platform"] == here), {})


def keep(kept: dict[str, Any], new: dict[str, Any]) -> None:
    """Store the results of runs. If the values of a run have changed, remove its digests on other platforms."""
    here = this_platform()
    for name, run in new.items():
        old = kept["runs"].get(name)
        moved = old is not None and differences(old | {"id": run["id"]}, run, None)
        for entry in kept["platforms"] if moved else ():
            entry["digests"].pop(name, None)
        kept["runs"][name] = {part: run[part] for part in ("id", "values")}
    if all(entry["platform"] != here for entry in kept["platforms"]):
        kept["platforms"].append({"platform": here, "digests": {}})
    digests = next(entry["digests"] for entry in kept["platforms"] if entry["platform"] == here)
    digests.update({name: run["digest"] for name, run in new.items()})


def main(argv: list[str] | None = None) -> int:
    """Train the runs and compare them with the stored values; return 1 if a value differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the current values")
    parser.add_argument("runs", nargs="*", default=list(RUNS), help=f"some of {', '.join(RUNS)} (default: all)")
    args = parser.parse_args(argv)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"platforms": [], "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder))
        new = {name: measure(name, Path(folder)) for name in args.runs}
    if args.write:
        keep(kept, new)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"kept {', '.join(new)} in {KEPT}")
        return 0
    digests, failed = digests_of(kept), 0
    for name, run in new.items():
        lines = differences(kept["runs"][name], run, digests.get(name))
        bound = "bit for bit" if name in digests else f"within {100 * TOLERANCE:g} % (stored on another platform)"
        print(f"{name}: {'the same ' + bound if not lines else f'{len(lines)} differences'}")
        for line in lines[:10]:
            print(f"    {line}")
        failed += bool(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
