"""``python -m mmqk``: the table of all commands."""

from __future__ import annotations

import sys

from mmqk.store import UserError, run_main

COMMANDS = {
    "python -m mmqk.train --config configs/demo.yaml": "train one run",
    "python -m mmqk.ablate --config configs/ablations/demo.yaml": "train a grid of runs with seeds",
    "python -m mmqk.report runs/demo --out reports/demo": "run folders to one page with verdicts",
    "python -m mmqk.watch runs/demo": "runs in a terminal while they train",
    "python -m mmqk.remedies": "every remedy, its switch and its source",
    "python -m mmqk.interop --from path/to/checkpoint --to runs/imported": "weights from and to transformers",
    "python -m mmqk.data.tokenize --shards 'path/{00000..00099}.tar' --out tokens/mine": "your own shards to tokens",
    "python -m mmqk.data.ids --train 'ids/*.npy' --vocab-sizes text=65536,image=8192 --out tokens": "ids of others",
    "python -m mmqk.inspect --config configs/demo.yaml": "what a model will see, on one page",
    "python -m mmqk.shards FOLDER": "write the manifest of shards of your own",
    "python -m mmqk.tokenizers.train": "train the text and the image tokenizer",
    "python -m mmqk.tokenizers.report": "how good the tokenizers are, on held-out data",
    "python -m mmqk.training.caption_gain --run runs/cpu/<id>": "do image tokens gain from their captions",
}

WIDTH = 62


def main(argv: list[str] | None = None) -> int:
    """Print the table, whether or not ``--help`` asks for it.

    Raises:
        UserError: any other argument.
    """
    argv = sys.argv[1:] if argv is None else argv
    if unknown := [word for word in argv if word not in ("-h", "--help")]:
        raise UserError(
            f"unrecognized arguments: {' '.join(unknown)}: python -m mmqk takes none and lists the commands"
        )
    print("mmqk: an open laboratory for multimodal training instability.\n")
    for command, purpose in COMMANDS.items():
        # A long command has a line of its own.
        print(
            f"  {command:{WIDTH}}  {purpose}"
            if len(command) <= WIDTH
            else f"  {command}\n  {'':{WIDTH}}  {purpose}"
        )
    print("\nEach takes --help; the first three are the ones to learn.")
    return 0


if __name__ == "__main__":
    run_main(main)
