"""``python -m mmqk``: the table of all commands."""

COMMANDS = {
    "python -m mmqk.train --config configs/demo.yaml": "train one run",
    "python -m mmqk.ablate --config configs/ablations/demo.yaml": "train a grid of runs with seeds",
    "python -m mmqk.report runs/demo --out reports/demo": "run folders to one page with verdicts",
    "python -m mmqk.data.build": "rebuild data/emoji and data/text from their sources",
    "python -m mmqk.data.manifest FOLDER": "write the manifest of shards of your own",
    "python -m mmqk.tokenizers.train": "train the text and the image tokenizer",
    "python -m mmqk.tokenizers.report": "how good the tokenizers are, on held-out data",
}


def main() -> None:
    width = max(map(len, COMMANDS))
    print("mmqk: an open laboratory for multimodal training instability.\n")
    for command, purpose in COMMANDS.items():
        print(f"  {command:{width}}  {purpose}")
    print("\nEach takes --help; the first three are the ones to learn.")


if __name__ == "__main__":
    main()
