"""The configuration of the data of a run and of its synthetic source, and the fields that identify its samples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mmqk.data.dial_coupling import Coupling, Level, coupling, forest, unigram_entropy, zipf
from mmqk.data.mixture import Mixture, source_of
from mmqk.data.shards.files import is_remote
from mmqk.data.shards.manifest import MANIFEST, SHARE, stream_hash
from mmqk.data.tokenizers.files import tokenizers_hash
from mmqk.data.tokens.folder import Layout, is_token_folder, layout_of, read_header, source_hash, tokens_hash
from mmqk.model.patch import allow_patch
from mmqk.model.ranges import BELOW_ONE, MOST_SEED, MOST_STEPS, check_fields, number, refuse
from mmqk.store import UserError, check_local, find_file, identity_hash, tag

# Kinds of data.mix that share a vocabulary: the vocabulary of mmqk's tokenizers, of the user's ids, or of the dial.
# All kinds of a mixture must share one vocabulary.
FAMILIES = (("pair", "text", "image", "interleaved"), ("tokens",), ("dial",))
# Fields of DataConfig that name a source, by kind.
SOURCE_FIELDS = {"pair": "pairs", "text": "text", "interleaved": "interleaved"}
# The same for every kind of data.mix that reads a folder.
FOLDER_FIELDS = {"image": "pairs", **SOURCE_FIELDS, "tokens": "tokens"}
# Fields of DataConfig that change no sample, or that `data_identity` adds in another form.
NOT_IDENTITY = ("cache", "shard_cache", "shard_cache_gb", "workers", "dial", "patch")


_SLACK = 1e-9  # nats; a bound that the user computed may differ in the last digits
_INNER, _TIE = 0, 1  # transitions and ties have different random token orders


@dataclass(frozen=True)
class DialConfig:
    """Statistics of a synthetic source. All dictionaries have the same modalities; only ``grid`` and ``target_noise``
    may leave some out.

    ``entropy`` changes only the entropy gap between modalities: unigrams, shares and lags do not change. The mean
    entropy of two modalities does not change either if one gains as many nats as the other loses. Modalities with
    equal values have equal statistics over disjoint tokens, so their gap is exactly 0.

    Args:
        vocabulary: number of ids of each modality; the order of names is the order of modalities in a document.
        skew: Zipf exponent of each unigram: p(rank r) ∝ r^-skew; 0 is uniform.
        entropy: entropy of a token given its parent, nats.
        tokens: number of tokens of each modality in a document.
        lag: distance from a token to its parent. With 1 the parent is the previous token; with 2 or more the model
            needs attention. The first ``lag`` tokens of a chain have no parent: they are roots. If the lag is at
            least ``tokens``, all tokens are roots and independent.
        grid: number of columns of a grid that is read row by row: the parent is ``lag`` rows above or, in the first
            ``lag`` rows, ``lag`` columns to the left. A modality with 0, or without an entry, is a chain.
        target_noise: fraction of the targets of a modality that are replaced by a token drawn from its unigram. The
            model predicts the replaced token, but it reads the original one at the next position. So the floor
            rises and the inputs do not change. A modality without an entry has no noise.
        mutual_information: mutual information of each modality and the modality before it, nats per document. All
            of it is between their tied roots.
        order: order of the modalities: forward, backward, or both (each in a random half of the documents).
        language: seed of the random token orders of the transitions, independent of the seed of the run.

    Raises:
        ValueError: infeasible values; the message has the feasible interval.
    """

    vocabulary: dict[str, int] = number(lambda: {"text": 128, "image": 128}, 2, 2**20)
    skew: dict[str, float] = number(lambda: {"text": 0.7, "image": 0.7}, 0.0, 10.0)
    entropy: dict[str, float] = number(lambda: {"text": 2.75, "image": 2.75}, -_SLACK, 14.0)
    tokens: dict[str, int] = number(lambda: {"text": 48, "image": 48}, 1, 2**20)
    lag: dict[str, int] = number(lambda: {"text": 4, "image": 4}, 1, 2**20)
    grid: dict[str, int] = number(dict, 0, 2**20)
    target_noise: dict[str, float] = number(dict, 0.0, 1.0)
    mutual_information: float = number(0.0, -_SLACK, 2e7)
    order: Literal["forward", "backward", "both"] = "both"
    language: int = number(0, 0, MOST_SEED)

    def __post_init__(self) -> None:
        check_fields(self, "data.dial")
        names = tuple(self.vocabulary)
        if not names:
            raise ValueError("data.dial.vocabulary is empty: give the number of ids of at least 1 modality.")
        try:
            for m in names:
                tag("loss", m)
        except ValueError as error:
            raise ValueError(f"data.dial.vocabulary has an invalid name: {error}.") from None
        for name in ("skew", "entropy", "tokens", "lag", "grid", "target_noise"):
            given, optional = set(getattr(self, name)), name in ("grid", "target_noise")
            if given - set(names) or (given != set(names) and not optional):
                raise ValueError(
                    f"data.dial.{name} has {', '.join(getattr(self, name)) or 'no modality'} and data.dial.vocabulary"
                    f" has {', '.join(names)}: use {'no other' if optional else 'the same'} modalities."
                )
        for m in names:
            if (width := self.grid.get(m, 0)) and self.tokens[m] % width:
                raise ValueError(
                    f"data.dial.grid.{m} is {width}: give 0 (a chain) or a divisor of data.dial.tokens.{m}, which is"
                    f" {self.tokens[m]}."
                )
            low, high = self.entropy_interval(m)
            shape = f"with vocabulary {self.vocabulary[m]} and skew {self.skew[m]:g} "
            _check(f"entropy.{m}", self.entropy[m], low, high, shape)
        most, limits = self.greatest_mutual_information()
        _check("mutual_information", self.mutual_information, 0.0, most, limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Modalities in the order of the configuration."""
        return tuple(self.vocabulary)

    def unigram(self, m: str) -> tuple[int, float]:
        """Return the vocabulary and skew of a modality."""
        return self.vocabulary[m], float(self.skew[m])

    def inner(self, m: str) -> Coupling:
        """Return the coupling of parents and children inside a modality."""
        return coupling(self.unigram(m), self.unigram(m), self.language, _INNER)

    def tie(self, before: str, after: str) -> Coupling:
        """Return the coupling of the roots of two consecutive modalities."""
        return coupling(self.unigram(before), self.unigram(after), self.language, _TIE)

    def entropy_interval(self, m: str) -> tuple[float, float]:
        """Return the least and greatest feasible ``entropy`` of a modality, nats."""
        high = unigram_entropy(zipf(*self.unigram(m)))
        low = high - self.inner(m).greatest
        return (low if low > 1e-5 else 0.0), high  # for uniform vocabularies low is 0 up to rounding

    def greatest_mutual_information(self) -> tuple[float, str]:
        """Return the greatest feasible ``mutual_information``, nats, and a phrase with the ties that limit it."""
        best, given = math.inf, ""
        for before, after in pairwise(self.names):
            ties = self.ties(before, after)
            if (most := ties * self.tie(before, after).greatest) < best:
                best, given = most, f"with {ties} {'tie' if ties == 1 else 'ties'} of {before} and {after} "
        return (best, given) if given else (0.0, "with a single modality ")

    def ties(self, before: str, after: str) -> int:
        """Return the number of tied roots of two consecutive modalities."""
        return min(len(self.levels(m)[0].child) for m in (before, after))

    def levels(self, m: str) -> list[Level]:
        """Return the forest of a modality."""
        return forest(self.tokens[m], self.lag[m], self.grid.get(m, 0))


def _check(name: str, value: float, low: float, high: float, given: str) -> None:
    # The printed bounds are rounded inwards, so that each is feasible.
    if not low - _SLACK <= value <= high + _SLACK:
        inside = math.ceil(low * 1e4) / 1e4, math.floor(high * 1e4) / 1e4
        bounds = " and ".join(f"{bound:.4f}".rstrip("0").rstrip(".") for bound in inside)
        raise ValueError(f"data.dial.{name} is {value}: {given}give a value between {bounds} nats.")


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
        Mixture(self.mix, self.image_first_prob, seed=0)  # raises for an invalid mixture
        kinds = self.kinds
        shards = self.read == "shards"
        refuse({
            "data.patch needs token arrays: set data.read to tokens.": shards and self.patch,
            f"data.pairing '{self.pairing}' needs token arrays: set data.read to tokens.":
                shards and self.pairing != "matched",
            "data.pairing 'captions' removes the images that data.mix asks for: set data.mix.image to 0.":
                self.pairing == "captions" and "image" in kinds,
            f"data.mix cannot mix {', '.join(kinds)}: tokens and dial have their own vocabularies; use each alone.":
                sum(any(kind in family for kind in kinds) for family in FAMILIES) > 1,
        } | {
            f"data.mix asks for {kind}, but data.{FOLDER_FIELDS[kind]} is empty: name its folder.":
                not getattr(self, FOLDER_FIELDS[kind])
            for kind in kinds if kind in FOLDER_FIELDS
        } | {
            f"data.{kind} is given, but data.mix has no {kind}, so it would not be read: set data.mix"
            f" '{{\"{kind}\": 1}}', or leave data.{kind} out.": getattr(self, kind) and kind not in kinds
            for kind in ("tokens", "interleaved")  # the other sources have defaults
        })  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        """The kinds of data.mix that have a weight."""
        return [kind for kind, weight in self.mix.items() if weight > 0]

    @property
    def documents_apart(self) -> bool:
        """Whether a sequence can have several documents that do not attend to each other."""
        return self.pack == "documents" and self.document_mask

    @property
    def family(self) -> tuple[str, ...]:
        """The kinds of data.mix that have this configuration's vocabulary."""
        return next(family for family in FAMILIES if any(kind in family for kind in self.kinds))

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

    def stream_identity(self, seed: int) -> str:
        """Return the hash of the shards and the seed, which decide the order of their samples."""
        return identity_hash({"seed": seed, **self.stream_hashes})

    @property
    def _read(self) -> dict[str, str]:
        wanted = {source_of(kind) for kind in self.kinds}
        return {kind: getattr(self, name) for kind, name in SOURCE_FIELDS.items() if kind in wanted}

    @property
    def tokenizers_folder(self) -> Path:
        """The folder of the tokenizers, which may be the shipped one."""
        return find_file(self.tokenizers)


def layout(config: DataConfig) -> Layout:
    """Return the layout of the ids of a configuration.

    Raises:
        UserError: tokenizers or a token folder are missing or damaged.
    """
    if "dial" in config.family:
        return Layout(dict(config.dial.vocabulary))
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
    fields |= {} if "pair" in config.kinds else {"image_first_prob": 0.0}
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
