"""Write the pack of a study that the repository keeps: `python docs/experiments/thin_pack.py RUNS_OR_ZIP OUT.zip`.

The rule: a pack has the statistics that its report reads and those that other scripts of this folder read, with 5
digits. A training loss is the mean over ten steps with 3 decimals, but the first one is kept; in the packs of
`EVERY_STEP` all are. coordinates.zip has all statistics. `python -m tests.golden.verdicts` compares the verdicts
with the kept ones.

Until commit 21709ad6 the packs had the losses of each step and more statistics:

    git show 21709ad6:reports/examples/size.zip > size.zip
"""

import sys
import tempfile
from pathlib import Path

import failure_order

from mmqk.cli import main
from mmqk.lab.runs import Run
from mmqk.store.pack import THINNED, unpacked, write_pack

LATE = {*failure_order.PROBED, *failure_order.STEPPED}
GROWTH = {"w_q_growth_total", "w_k_growth_total"}  # norm_competition_check.py
EVERY_STEP = ("demo", "late", "late_rescue", "logit_scale", "tournament")


def read_by_report(runs: Path) -> set[str]:
    """Return the statistics that the report of these runs reads, besides those of the validation."""
    names: set[str] = set()
    series = Run.series
    Run.series = lambda run, name: names.add(name) or series(run, name)
    with tempfile.TemporaryDirectory() as page:
        main(["report", str(runs), "--out", page])
    Run.series = series
    return {name.partition("/")[0] for name in names if not name.startswith("val_")}


if __name__ == "__main__":
    out = Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        write_pack(unpacked(Path(sys.argv[1])), whole := Path(folder) / out.name)
        runs = unpacked(whole)  # a copy: a run that is thinned already is thinned again
    for record in runs.rglob(THINNED):
        record.unlink()
    kept = read_by_report(runs)
    kept |= (LATE if out.stem == "late" else set()) | (GROWTH if "w_q_growth" in kept else set())
    write_pack(runs, out, small=True, only=kept, steps=1 if out.stem in EVERY_STEP else 10)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, {', '.join(sorted(kept))}")
