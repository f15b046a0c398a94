"""Pack the runs of a grid of docs/bench.md with what the rules and the signs read.

python -m docs.experiments.bench_pack runs/bench reports/bench/bench.zip
"""

from __future__ import annotations

import sys
from pathlib import Path

from mmqk.store.pack import write_pack

DIGITS = 4
STATISTICS = (
    "loss", "grad_norm", "lr", "log_z", "attn_logit_absmax", "attn_entropy", "attn_rank", "q_norm", "k_norm",
    "q_norm_max", "k_norm_max", "resid_norm", "final_norm", "embed_row_norm", "update_rms", "adam_below_eps",
    "w_q_stable_rank", "w_k_stable_rank", "w_q_norm", "w_k_norm", "w_v_norm", "w_o_norm", "w_gate_norm",
    "w_up_norm", "w_down_norm", "w_q_grad_over_v", "w_k_grad_over_v", "w_v_grad_over_v", "w_o_grad_over_v",
    "w_gate_grad_over_v", "w_up_grad_over_v", "w_down_grad_over_v", "embed_grad_over_v", "head_grad_over_v",
)  # fmt: skip

if __name__ == "__main__":
    write_pack(Path(sys.argv[1]), Path(sys.argv[2]), small=True, only=STATISTICS, digits=DIGITS)
