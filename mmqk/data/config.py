"""The configuration of the data of a run, and the fields that identify its samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mmqk.data.dial import Dial, DialConfig
from mmqk.data.mixture import Mixture
from mmqk.data.shards.manifest import MANIFEST, SHARE, stream_hash
from mmqk.data.shards.names import is_remote
from mmqk.data.tokenizers.files import tokenizers_hash
from mmqk.data.tokens.encode import source_hash
from mmqk.data.tokens.folder import Layout, is_token_folder, layout_of, read_header, tokens_hash
from mmqk.model.patch import allow_patch
from mmqk.model.ranges import BELOW_ONE, MOST_STEPS, check_fields, number
from mmqk.store import UserError, check_local, find_file

# Kinds of data.mix that share a vocabulary: the vocabulary of mmqk's tokenizers, of the user's ids, or of the dial.
# All kinds of a mixture must share one vocabulary.
FAMILIES = (("pair", "text", "image", "interleaved"), ("tokens",), ("dial",))
# Fields of DataConfig that name a source, by kind.
SOURCE_FIELDS = {"pair": "pairs", "text": "text", "interleaved": "interleaved"}
# The same for every kind of data.mix that reads a folder.
FOLDER_FIELDS = {"image": "pairs", **SOURCE_FIELDS, "tokens": "tokens"}
# Fields of DataConfig that change no sample, or that `data_identity` adds in another form.
NOT_IDENTITY = ("cache", "shard_cache", "shard_cache_gb", "workers", "dial", "patch")


@dataclass(frozen=True)
class DataConfig:
    """The data of a run.

    Args:
        pairs: image-caption pairs: shards with their manifest, or a folder from mmqk data tokenize; empty for none.
        read: how to read sources that are no token folders: tokens (from token arrays, which are written once) or
            shards (tokenize them while training). With shards, a source is a folder with a manifest, a pattern such
            as path/{00000..00099}.tar, or a URL.
        val_fraction: share of the shards of a pattern to hold out, chosen by a hash of their names, at least one
            shard; used only if `read` is shards. null: 0.01.
        text: text-only documents: shards with their manifest or a token folder; empty for none.
        interleaved: documents of text and images: a folder from mmqk data tokenize --interleaved; empty for none.
        tokens: documents that other tokenizers have converted to ids: a folder from mmqk data ids; empty for none.
        tokenizers: folder with text.json and image.safetensors.
        cache: folder for the token arrays that are made from shards.
        shard_cache: folder for copies of remote shards; empty for no copies.
        shard_cache_gb: limit of these copies in gigabytes; the least recently used one is deleted first.
        seq_len: tokens in a sequence.
        batch_size: sequences in an optimizer step, over all micro-batches and devices.
        mix: relative weight of each kind of sequence. The kinds pair, text, image and interleaved can be mixed;
            tokens or dial must be the only kind. {"text": 1} is text only.
        image_first_prob: share of the pairs in which the image comes before its caption.
        pairing: matched (each image with its caption), shuffled (each image with the caption of another pair) or
            captions (without the images).
        pack: documents (several documents in a sequence) or none (one document, or one window of text, in each
            sequence).
        document_mask: attention stays inside each packed document.
        dial: the synthetic source with known entropies, for mix {"dial": 1}.
        val_sequences: sequences in the validation set; the set is the same for every arm and seed.
        val_every_n_steps: optimizer steps between two validations; 0 validates only at the end. Every run validates
            at the end.
        workers: loader processes, which do not change the samples. 0 is fastest for token arrays; if `read` is
            shards, one per core is faster.
        patch: module:function that changes the training rows of each optimizer step: (rows, step, order) -> rows, a
            pure function; empty for none.
    """

    pairs: str = "data/emoji"
    read: Literal["tokens", "shards"] = "tokens"
    val_fraction: float | None = number(None, 1e-9, BELOW_ONE)
    text: str = "data/text"
    interleaved: str = ""
    tokens: str = ""
    tokenizers: str = "data/tokenizers"
    cache: str = ".cache/tokens"
    shard_cache: str = ""
    shard_cache_gb: float = number(50.0, 1e-6, 1e9)
    seq_len: int = number(128, 2, 2**22)
    batch_size: int = number(16, 1, 2**24)
    mix: dict[str, float] = number(lambda: {"pair": 3.0, "text": 1.0}, 1e-9, 1e9, zero=True)
    image_first_prob: float = number(0.5, 0.0, 1.0)
    pairing: Literal["matched", "shuffled", "captions"] = "matched"
    pack: Literal["none", "documents"] = "none"
    document_mask: bool = True
    dial: DialConfig = field(default_factory=DialConfig)
    val_sequences: int = number(128, 1, 2**24)
    val_every_n_steps: int = number(0, 0, MOST_STEPS)
    workers: int = number(0, 0, 1024)
    patch: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "data")
        for name in (*SOURCE_FIELDS.values(), "tokens", "tokenizers", "cache"):
            if self.read == "tokens" or name not in SOURCE_FIELDS.values():
                check_local(getattr(self, name), f"data.{name}", "download the files, or set data.read to shards")
        if self.read == "shards" and self.patch:
            raise ValueError("data.patch needs token arrays: set data.read to tokens.")
        if self.pairing != "matched":
            if self.read == "shards":
                raise ValueError(f"data.pairing '{self.pairing}' needs token arrays: set data.read to tokens.")
            if self.pairing == "captions" and self.mix.get("image", 0) > 0:
                raise ValueError(
                    "data.pairing 'captions' removes the images that data.mix asks for: set data.mix.image to 0."
                )
        Mixture(self.mix, self.image_first_prob, seed=0)  # raises for an invalid mixture
        kinds = [kind for kind, weight in self.mix.items() if weight > 0]
        if sum(any(kind in family for kind in kinds) for family in FAMILIES) > 1:
            raise ValueError(
                f"data.mix cannot mix {', '.join(kinds)}: tokens and dial have their own vocabularies; use each alone."
            )
        for kind in kinds:
            folder = FOLDER_FIELDS.get(kind)
            if folder and not getattr(self, folder):
                raise ValueError(f"data.mix asks for {kind}, but data.{folder} is empty: name its folder.")
        for kind in ("tokens", "interleaved"):  # the other sources have defaults
            if getattr(self, kind) and kind not in kinds:
                raise ValueError(
                    f"data.{kind} is given, but data.mix has no {kind}, so it would not be read: set data.mix"
                    f" '{{\"{kind}\": 1}}', or leave data.{kind} out."
                )

    @property
    def documents_apart(self) -> bool:
        """Whether a sequence can have several documents that do not attend to each other."""
        return self.pack == "documents" and self.document_mask

    @property
    def family(self) -> tuple[str, ...]:
        """The kinds of data.mix that have this configuration's vocabulary."""
        return next(f for f in FAMILIES if any(self.mix.get(kind, 0) > 0 for kind in f))

    @property
    def sources(self) -> dict[str, Path]:
        """Source folder of each kind in data.mix, except ``tokens`` and those of `streams`."""
        return {kind: find_file(source) for kind, source in self._read.items() if kind not in self.streams}

    @property
    def streams(self) -> dict[str, str]:
        """Shards of each kind that is read from them during training: a folder, a pattern or a URL."""
        if self.read == "tokens":
            return {}
        found = {}
        for kind, source in self._read.items():
            folder = find_file(source)
            # Text with a manifest is small enough to be tokenized once.
            if is_remote(source) or not (is_token_folder(folder) or (kind == "text" and (folder / MANIFEST).exists())):
                found[kind] = source if is_remote(source) else str(folder)
        return found

    @cached_property
    def stream_hashes(self) -> dict[str, str]:
        """Identity of the shards of each kind in `streams`. Hashing the names of a million shards takes 16 s."""
        return {kind: stream_hash(pattern) for kind, pattern in self.streams.items()}

    @property
    def _read(self) -> dict[str, str]:
        wanted = {"pair" if kind == "image" else kind for kind, weight in self.mix.items() if weight > 0}
        return {kind: getattr(self, name) for kind, name in SOURCE_FIELDS.items() if kind in wanted}

    @property
    def tokenizers_folder(self) -> Path:
        """The folder of the tokenizers, which may be the shipped one."""
        return find_file(self.tokenizers)


def layout(config: DataConfig) -> Layout:
    """Return the layout of the ids of a configuration.

    Raises:
        UserError: tokenizers or a token folder are missing or damaged. ValueError: the dial is infeasible.
    """
    if "dial" in config.family:
        return Layout(Dial(config.dial).vocab_sizes)
    if "tokens" in config.family:
        header = read_header(config.tokens)
        if header.kind != "tokens":
            raise UserError(
                f"{config.tokens} has documents of kind {header.kind}: name it in the field of that kind, not in"
                " data.tokens."
            )
        return header.layout
    return layout_of(config.tokenizers_folder)


def data_identity(config: DataConfig) -> dict[str, Any]:
    """Return the fields that determine the samples, with the hash of each source in place of its folder.

    Raises:
        UserError: a source is missing or damaged.
    """
    fields = {k: v for k, v in asdict(config).items() if k not in NOT_IDENTITY}
    if config.patch:
        fields |= {"patch": config.patch, "patch_source": allow_patch(config.patch)}
    # A field that changes no sample of this configuration is stored as a constant.
    fields |= {"read": "tokens", "val_fraction": 0.0}
    if config.stream_hashes:
        fields |= {"read": "streams", "val_fraction": config.val_fraction or SHARE}
    fields |= {} if config.mix.get("pair", 0) > 0 else {"image_first_prob": 0.0}
    if config.pairing == "matched" or "pair" not in config._read:
        del fields["pairing"]  # older runs do not have this field
    fields |= {} if config.pack == "documents" else {"document_mask": True}
    fields |= dict.fromkeys((*SOURCE_FIELDS.values(), "tokens", "tokenizers"), "")
    for kind, path in config.sources.items():
        fields[SOURCE_FIELDS[kind]] = source_hash(path, kind)
    for kind, hashed in config.stream_hashes.items():
        fields[SOURCE_FIELDS[kind]] = hashed
    if "dial" in config.family:
        # identity_hash sorts keys, but the order of modalities matters.
        fields["dial"] = {**asdict(config.dial), "modalities": list(config.dial.names)}
        if not config.dial.target_noise:
            del fields["dial"]["target_noise"]  # older runs do not have this field
    elif "tokens" in config.family:
        fields["tokens"] = tokens_hash(config.tokens)
    else:
        fields["tokenizers"] = tokenizers_hash(config.tokenizers_folder)
    return fields
