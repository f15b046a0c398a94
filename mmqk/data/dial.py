"""The entropy dial: unlimited new documents with statistics that are known in closed form.

A document has every modality once, one after the other. Within a modality each token is a root or has one parent, an
earlier token at a fixed distance. `mmqk.data.dial_coupling` defines the joint distribution of parent and child;
the configuration sets their conditional entropy. The j-th roots of two consecutive modalities are tied: they have a
joint distribution of the same kind, and the configuration sets their mutual information.
So a document is a forest, every token has the unigram of its modality, and `Dial.log_prob` is exact. Ties join only
roots, so in either order of the modalities each token depends on at most one earlier token.

Shapes: N documents, T tokens of a document. *Canonical* positions are those in a document with the modalities in the
order of the configuration.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from mmqk.data.config import DialConfig
from mmqk.data.dial_coupling import UNITS, Edge, Level, unigram_entropy, zipf
from mmqk.data.mixture import IndexedCache, random_stream

_CHUNK = 512  # number of documents drawn together (fewer if they are long); another number gives other documents
_CHUNK_TOKENS = 2**19


# Random streams of the documents and of the noise of the targets; the order of samples uses other streams.
_DOCUMENTS, _NOISE = 101, 103
# Smallest number of times that the average transition must occur in training. In a trial with lag 1, a model learned
# two thirds of the predictability if the average transition occurred 115 times, and almost nothing if it occurred
# fewer than 30 times. With lag 4, learning as much took 370 occurrences. So 100 is necessary but may not suffice.
# The model had 2 layers, d_model 64 and vocabularies of 512, and was trained with AdamW at learning rate 3e-3.
SEEN = 100


class _Modality:
    """One modality of a `DialConfig`, whose first token has canonical position ``start``; positions are canonical."""

    def __init__(self, config: DialConfig, name: str, start: int) -> None:
        roots, *levels = [Level(child + start, parent + start) for child, parent in config.levels(name)]
        none = np.empty(0, dtype=np.int64)
        units_V = zipf(*config.unigram(name))
        self.name, self.places = name, slice(start, start + config.tokens[name])
        self.roots_T, self.levels = roots.child, levels  # levels below the roots
        self.child_T, self.parent_T = (np.concatenate([none, *(level[side] for level in levels)]) for side in (0, 1))
        self.log_unigram_V = np.log(units_V / UNITS)
        self.entropy = unigram_entropy(units_V)  # nats
        self.inner = Edge(config.inner(name), self.entropy - config.entropy[name])
        self.noise = float(config.target_noise.get(name, 0.0))  # fraction of the targets that are replaced
        self.noisy = self.inner.noisy(self.noise)  # of a parent token and its child's target, which noise may replace


class _Tie:
    """The tied roots of two consecutive modalities."""

    def __init__(self, config: DialConfig, before: _Modality, after: _Modality) -> None:
        n = config.ties(before.name, after.name)
        self.before_T, self.after_T = before.roots_T[:n], after.roots_T[:n]
        self.edge = Edge(config.tie(before.name, after.name), config.mutual_information / n)
        self.noisy_before = self.edge.noisy(before.noise)  # of an after root and its before root's target
        self.noisy_after = self.edge.noisy(after.noise)


class Dial(IndexedCache):
    """A source of documents with chosen statistics.

    Args:
        config: the statistics.

    Attributes:
        vocab_sizes: number of ids by modality, contiguous from id 0 in this order; within a modality the most
            frequent id is the first.
        length: number of tokens in a document, equal for all documents.
    """

    _cached = 8

    def __init__(self, config: DialConfig):
        self.config = config
        self.vocab_sizes = dict(config.vocabulary)
        self.length = sum(config.tokens.values())
        tokens = [config.tokens[m] for m in config.names]
        starts = np.cumsum([0, *tokens])
        self._modalities = [_Modality(config, m, t) for m, t in zip(config.names, starts, strict=False)]
        self._ties = [_Tie(config, before, after) for before, after in pairwise(self._modalities)]
        sizes = list(self.vocab_sizes.values())
        self._first_id_T1 = np.repeat(np.cumsum([0, *sizes[:-1]]), tokens)[:, None]
        places = np.split(np.arange(self.length), starts[1:-1])
        self._backward_T = np.concatenate(places[::-1])  # canonical position of each position in a backward document
        self._canonical_T = np.argsort(self._backward_T)
        self._last = int(starts[-2])  # first position of the last modality, with which a backward document begins
        # With one modality there is only one order, so the order has no entropy.
        share = {"forward": 0.0, "backward": 1.0, "both": 0.5}[config.order]
        self._backward_share = share if len(tokens) > 1 else 0.0
        self._chunk_size = min(_CHUNK, max(1, _CHUNK_TOKENS // self.length))

    def documents(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return the documents ``first`` to ``first + count - 1`` of a seed: ids_NT, int64.

        Each document is a function of (config, seed, number), and ``order`` only reorders its modalities. Documents
        are drawn and cached 512 at a time, so consecutive numbers are fast.
        """
        return self._read(0, seed, first, count)

    def targets(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return the ids that a model must predict: those of `documents`, of which a fraction ``target_noise`` is
        replaced."""
        return self._read(1, seed, first, count)

    def _read(self, which: int, seed: int, first: int, count: int) -> np.ndarray:
        ids_NT = np.empty((count, self.length), dtype=np.int64)
        done = 0
        while done < count:
            chunk, place = divmod(first + done, self._chunk_size)
            part_NT = self._kept(seed, chunk)[which][place : place + count - done]
            ids_NT[done : done + len(part_NT)] = part_NT
            done += len(part_NT)
        return ids_NT

    def _make(self, seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and the targets of a chunk."""
        random = random_stream(seed, _DOCUMENTS, chunk)
        backward_N = random.random(self._chunk_size) < self._backward_share
        uniform_TN = random.random((self.length, self._chunk_size))
        ids_TN = np.empty((self.length, self._chunk_size), dtype=np.int64)
        # The distribution does not depend on the order of modalities, so all documents are drawn forward.
        for m in self._modalities:
            ids_TN[m.roots_T] = m.inner.coupling.draw_b(uniform_TN[m.roots_T])
        for tie in self._ties:
            ids_TN[tie.after_T] = tie.edge.draw(ids_TN[tie.before_T], uniform_TN[tie.after_T])
        for m in self._modalities:
            for child_T, parent_T in m.levels:
                ids_TN[child_T] = m.inner.draw(ids_TN[parent_T], uniform_TN[child_T])
        targets_TN = ids_TN.copy() if self.config.target_noise else ids_TN
        random = random_stream(seed, _NOISE, chunk)
        for m in self._modalities:
            if m.noise:
                part_TN = targets_TN[m.places]
                drawn_TN = m.inner.coupling.draw_b(random.random(part_TN.shape))
                targets_TN[m.places] = np.where(random.random(part_TN.shape) < m.noise, drawn_TN, part_TN)
        ids_NT = self._joined(ids_TN, backward_N)
        return ids_NT, ids_NT if targets_TN is ids_TN else self._joined(targets_TN, backward_N)

    def _joined(self, ids_TN: np.ndarray, backward_N: np.ndarray) -> np.ndarray:
        """Return documents in ids of the joint vocabulary, in their own order of the modalities. Changes
        ``ids_TN``."""
        ids_TN += self._first_id_T1
        ids_NT = ids_TN.T.copy()
        ids_NT[backward_N] = ids_NT[backward_N][:, self._backward_T]
        return ids_NT

    def log_prob(self, ids_NT: np.ndarray, targets_NT: np.ndarray | None = None) -> np.ndarray:
        """Return the log-probability of each target given all earlier tokens of its document, nats: float64, at most
        0.

        The value is exact; −inf for an impossible token. If documents come in both orders, the first token reveals
        the order, and its log-probability includes −ln 2.

        Args:
            ids_NT: documents.
            targets_NT: their `targets`; by default the tokens themselves.
        """
        targets_NT = ids_NT if targets_NT is None else targets_NT
        backward_N = np.full(len(ids_NT), self._backward_share == 1)
        if self._backward_share == 0.5:
            backward_N = ids_NT[:, 0] >= self._first_id_T1[self._last]
        ids_TN = self._canonical(ids_NT, backward_N)
        targets_TN = ids_TN if targets_NT is ids_NT else self._canonical(targets_NT, backward_N)
        nats_TN = np.empty(ids_TN.shape)
        for m in self._modalities:
            nats_TN[m.places] = m.log_unigram_V[targets_TN[m.places]]
            nats_TN[m.child_T] += m.noisy.gain(ids_TN[m.parent_T], targets_TN[m.child_T])
        for tie in self._ties:
            # Add the gain to the tied root that comes later in the sequence.
            forward_TN = tie.noisy_after.gain(ids_TN[tie.before_T], targets_TN[tie.after_T])
            backward_TN = forward_TN
            if targets_TN is not ids_TN:
                backward_TN = tie.noisy_before.gain(targets_TN[tie.before_T], ids_TN[tie.after_T])
            nats_TN[tie.after_T] += np.where(backward_N, 0, forward_TN)
            nats_TN[tie.before_T] += np.where(backward_N, backward_TN, 0)
        if self._backward_share == 0.5:
            nats_TN[np.where(backward_N, self._last, 0), np.arange(len(ids_NT))] -= math.log(2)
        np.minimum(nats_TN, 0, out=nats_TN)  # a token with probability 1 may be rounded to above 0 nats
        nats_NT = nats_TN.T.copy()
        nats_NT[backward_N] = nats_NT[backward_N][:, self._backward_T]
        return nats_NT

    def _canonical(self, ids_NT: np.ndarray, backward_N: np.ndarray) -> np.ndarray:
        """Return ids in canonical positions, from 0 in each modality."""
        ids_NT = ids_NT.astype(np.int64)
        ids_NT[backward_N] = ids_NT[backward_N][:, self._canonical_T]
        return ids_NT.T - self._first_id_T1

    def floors(self) -> dict[str, float]:
        """Return the floor by modality, nats per token: the mean of −`log_prob` of the targets over all
        documents."""
        first, last = self._modalities[0].name, self._modalities[-1].name
        backward = self._backward_share
        order = math.log(2) if backward == 0.5 else 0.0
        floors = {}
        for m, earlier, later in zip(self._modalities, [None, *self._ties], [*self._ties, None], strict=True):
            nats = len(m.roots_T) * m.entropy + len(m.child_T) * max(0.0, m.entropy - m.noisy.information)
            nats += order * ((1 - backward) * (m.name == first) + backward * (m.name == last))
            if earlier:
                nats -= (1 - backward) * len(earlier.after_T) * earlier.noisy_after.information
            if later:
                nats -= backward * len(later.before_T) * later.noisy_before.information
            floors[m.name] = nats / self.config.tokens[m.name]
        return floors

    def describe(self, training_tokens: int) -> list[dict[str, str | int | float]]:
        """Return one table row of derived statistics per modality; entropies in nats per token.

        Keys: modality; unigram entropy; predictability (unigram entropy minus the entropy given the parent); token
        share; redundancy inside (mutual information of the tokens of the modality, nats per document); floor;
        transitions (distinct pairs of the coupling); seen (times that the average transition occurs in training).
        """
        floors = self.floors()
        return [
            {
                "modality": m.name,
                "unigram entropy": m.entropy,
                "predictability": m.inner.information,
                "token share": self.config.tokens[m.name] / self.length,
                "redundancy inside": len(m.child_T) * m.inner.information,
                "floor": floors[m.name],
                "transitions": m.inner.coupling.transitions,
                "seen": self._seen(m.inner, len(m.child_T), training_tokens),
            }
            for m in self._modalities
        ]

    def unlearnable(self, training_tokens: int) -> list[str]:
        """Return a sentence for each distribution that a run with ``training_tokens`` tokens cannot learn.

        In such a run, the average transition of the distribution occurs fewer than 100 times (see `SEEN`).
        Distributions with less than 0.1 nat of mutual information are left out.
        """
        edges = [(f"Tokens of {m.name}", m.inner, len(m.child_T)) for m in self._modalities]
        for (a, b), tie in zip(pairwise(self.vocab_sizes), self._ties, strict=True):
            edges.append((f"Ties of {a} and {b}", tie.edge, len(tie.after_T)))
        sentences = []
        for name, edge, places in edges:
            seen = self._seen(edge, places, training_tokens)
            if places and edge.information >= 0.1 and seen < SEEN:
                needed = math.ceil(SEEN / self._seen(edge, places, 1))
                sentences.append(
                    f"{name} cannot be learned in this run: each of the {edge.coupling.transitions:,} transitions"
                    f" occurs {seen:.1f} times on average in {training_tokens:,} training tokens, and {SEEN} are"
                    f" needed; train on at least {needed:,} tokens or lower the vocabulary."
                )
        return sentences

    def _seen(self, edge: Edge, places: int, training_tokens: int) -> float:
        return training_tokens / self.length * places * edge.rho / edge.coupling.transitions
