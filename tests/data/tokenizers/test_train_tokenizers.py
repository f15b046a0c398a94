import pytest
import torch

from mmqk.data.tokenizers.files import ImageTokenizerConfig, TextTokenizer
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.train import main
from mmqk.data.tokenizers.training_data import Source
from mmqk.store import cli_main

SMALL = ImageTokenizerConfig(codes=16, code_dim=8, decoder_width=16, decoder_depth=1)


def arguments(data, out, *more: str) -> list[str]:
    folders = {"shards": data / "pairs", "text": data / "text", "out": out, "log-dir": out / "log"}
    return [*(part for k, v in folders.items() for part in (f"--{k}", str(v))), *more]


def trained(data, seed: int = 0, steps: int = 2, **flags):
    pytest.importorskip("vector_quantize_pytorch")
    from mmqk.data.tokenizers.train_image import VQTrainingConfig, train_image_tokenizer

    images = Source(data / "pairs").images(64)
    flags = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "val_check_interval": 1, **flags}
    training = VQTrainingConfig(steps=steps, batch_size=8, seed=seed)
    return train_image_tokenizer(images.train_BCHW, images.val_BCHW, SMALL, training, **flags)


def test_training_is_a_function_of_the_seed(tiny_data):
    first, again, other = (trained(tiny_data, seed).to_bytes() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_exported_tokenizer_is_the_trained_one(tiny_data):
    L = pytest.importorskip("lightning")
    kept = []

    class Keep(L.Callback):
        def on_train_end(self, trainer, pl_module):
            kept.append(pl_module)

    plain = trained(tiny_data, callbacks=[Keep()])
    module = kept[0].eval()
    images = Source(tiny_data / "pairs").images(64).val_BCHW.float() / 255
    with torch.no_grad():
        reconstructed, codes, _ = module.reconstruct(images)
    assert torch.equal(plain.encode(images), codes.flatten(1))
    assert codes.unique().numel() > 1
    torch.testing.assert_close(plain.decode(codes.flatten(1)), reconstructed.clamp(0, 1), rtol=1e-4, atol=1e-4)
    # control: the same architecture untrained gives other codes
    assert not torch.equal(ImageTokenizer(SMALL).eval().encode(images), codes.flatten(1))


def test_an_existing_file_is_kept(tiny_data, tmp_path, capsys):
    (tmp_path / "text.json").write_text("precious")
    command = arguments(tiny_data, tmp_path, "--only", "text", "--text-size", "270")
    assert cli_main(main)(command) == 2
    assert "text.json exists: give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "text.json").read_text() == "precious"
    # nothing is trained if only the second of two files would be refused
    (tmp_path / "text.json").rename(tmp_path / "image.safetensors")
    assert cli_main(main)(arguments(tiny_data, tmp_path)) == 2
    assert not (tmp_path / "text.json").exists()
    (tmp_path / "text.json").write_text("old")
    assert cli_main(main)([*command, "--overwrite"]) == 0
    assert TextTokenizer.load(tmp_path).size == 270
    assert not (tmp_path / "log").exists()
