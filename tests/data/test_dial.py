"""Check the entropy dial: its statistics, probabilities, configuration, parents of tokens and error messages."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

from mmqk.data.config import DialConfig
from mmqk.data.dial import Dial
from mmqk.data.dial_coupling import forest


def three(*fields: tuple[float, float, float], **more) -> DialConfig:
    """Return a dial of three modalities; ``fields`` are vocabulary, skew, entropy, tokens and lag of each."""
    return DialConfig(*(dict(zip(("text", "image", "audio"), values, strict=True)) for values in fields), **more)


THREE = three(
    (12, 16, 8), (0.5, 1.0, 0.0), (1.5, 1.8, 0.9), (12, 24, 10), (3, 2, 4), grid={"image": 6}, mutual_information=1.2
)
# A dial so small that all its sequences can be enumerated.
TINY = three((3, 2, 2), (0.6, 1.0, 0.2), (0.9, 0.5, 0.6), (3, 2, 2), (2, 1, 2), mutual_information=0.15)
ORDERS = ("forward", "backward", "both")


def chain(**fields) -> DialConfig:
    """Return a dial with text of lag 3 and images of lag 2, and so few ids that all pairs can be counted."""
    base = {"vocabulary": (12, 12), "skew": (0.8, 0.8), "entropy": (1.2, 2.0), "tokens": (24, 24), "lag": (3, 2)}
    return DialConfig(**{name: {"text": text, "image": image} for name, (text, image) in base.items()} | fields)


def by_modality(dial: Dial, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens of each modality in each document, selected by the id range of the modality."""
    edges = np.cumsum([0, *dial.vocab_sizes.values()])
    return {
        m: ids[(ids >= low) & (ids < high)].reshape(len(ids), -1) - low
        for m, low, high in zip(dial.vocab_sizes, edges[:-1], edges[1:], strict=True)
    }


def counted_entropy(*columns: np.ndarray) -> float:
    """Return the joint entropy in nats, from counts, plus the bias correction of Miller and Madow."""
    keys = sum(column.ravel() * 1000**k for k, column in enumerate(columns))
    _, counts = np.unique(keys, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum()) + (len(counts) - 1) / (2 * counts.sum())


def counted_information(a: np.ndarray, b: np.ndarray) -> float:
    return counted_entropy(a) + counted_entropy(b) - counted_entropy(a, b)


def every_sequence(config: DialConfig) -> np.ndarray:
    """Return every possible sequence, in both orders of the modalities unless the order is fixed."""
    starts = dict(zip(config.names, np.cumsum([0, *config.vocabulary.values()]), strict=False))
    rows = []
    for names in {"forward": [1], "backward": [-1]}.get(config.order, [1, -1]):
        places = [
            range(starts[m], starts[m] + config.vocabulary[m])
            for m in config.names[::names]
            for _ in range(config.tokens[m])
        ]
        rows += list(itertools.product(*places))
    return np.array(rows)


# Compare the statistics of a dial with counts of its tokens


@pytest.mark.parametrize("order", ORDERS)
def test_counts_find_the_entropy_and_the_lag(order):
    config = chain(order=order)
    dial = Dial(config)
    for name, ids in by_modality(dial, dial.documents(1, 0, 20_000)).items():
        by_distance = {k: counted_entropy(ids[:, k:], ids[:, :-k]) - counted_entropy(ids[:, :-k]) for k in range(1, 7)}
        # With 4e5 pairs in 144 cells, the bias correction is 2e-4 and the remaining error is a few 1e-3.
        assert by_distance[config.lag[name]] == pytest.approx(config.entropy[name], abs=0.006)
        others = [h for k, h in by_distance.items() if k % config.lag[name]]
        unigram = config.entropy_interval(name)[1]
        assert others == pytest.approx([unigram] * len(others), abs=0.006)
        assert config.entropy[name] < unigram - 0.2


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_counts_find_the_mutual_information(order):
    config = chain(order=order, mutual_information=1.6, lag={"text": 3, "image": 4})
    dial = Dial(config)
    parts = by_modality(dial, dial.documents(3, 0, 60_000))
    pairs = np.array([[counted_information(t, i) for i in parts["image"].T[:6]] for t in parts["text"].T[:6]])
    tied = np.arange(3)
    assert pairs[tied, tied].sum() == pytest.approx(1.6, abs=0.03)
    # Of the other tokens, only the children of tied roots depend on the other modality, but less than the roots.
    assert pairs[0, 1] < 0.002 and pairs[3, 3] < 0.002
    assert 0.002 < pairs[3, 0] < pairs[0, 0]
    none = by_modality(*(lambda d: (d, d.documents(3, 0, 60_000)))(Dial(replace(config, mutual_information=0.0))))
    assert counted_information(none["text"][:, 0], none["image"][:, 0]) < 0.002


# Compare the probabilities with those of all possible sequences


@pytest.mark.parametrize("order", ORDERS)
def test_probabilities_of_every_sequence_add_up_to_1(order):
    config = replace(TINY, order=order)
    sequences = every_sequence(config)
    nats = Dial(config).log_prob(sequences)
    assert (nats <= 0).all()
    assert np.exp(nats.sum(1)).sum() == pytest.approx(1, abs=1e-12)
    # The probabilities of all continuations of a prefix sum to the probability of the prefix.
    for t in range(1, sequences.shape[1]):
        _, group = np.unique(sequences[:, :t], axis=0, return_inverse=True)
        summed = np.bincount(group.ravel(), np.exp(nats.sum(1)))[group.ravel()]
        assert np.allclose(summed, np.exp(nats[:, :t].sum(1)), rtol=1e-10, atol=0)
        assert not np.allclose(summed, np.exp(nats[:, : t - 1].sum(1)), rtol=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_sampled_documents_have_the_probabilities_that_log_prob_gives(order):
    config = replace(TINY, order=order)
    sequences, n = every_sequence(config), 200_000
    place = {row.tobytes(): k for k, row in enumerate(sequences)}
    drawn = [place[row.tobytes()] for row in Dial(config).documents(5, 0, n)]  # KeyError for another sequence
    counts = np.bincount(drawn, minlength=len(sequences))

    def misfit(nats: np.ndarray) -> float:
        """Return how many standard deviations chi-square is above its expected value."""
        expected = n * np.exp(nats.sum(1))
        enough = expected > 5
        dof = enough.sum() - 1
        return float((((counts - expected) ** 2 / expected)[enough].sum() / dof - 1) * math.sqrt(dof / 2))

    assert misfit(Dial(config).log_prob(sequences)) < 4
    assert misfit(Dial(replace(config, mutual_information=0.13)).log_prob(sequences)) > 4
    assert misfit(Dial(replace(config, entropy=TINY.entropy | {"text": 0.88})).log_prob(sequences)) > 4


def test_a_document_is_equally_likely_in_both_orders_and_the_choice_costs_ln_2():
    forward, backward, both = (Dial(replace(THREE, order=o)) for o in ORDERS)
    ids = forward.documents(6, 0, 300)
    parts = np.split(ids, np.cumsum(list(THREE.tokens.values()))[:-1], axis=1)
    turned = np.concatenate(parts[::-1], axis=1)
    assert (backward.documents(6, 0, 300) == turned).all()
    ahead, back = forward.log_prob(ids), backward.log_prob(turned)
    assert np.allclose(ahead.sum(1), back.sum(1), rtol=1e-12)
    # The same image tokens follow the text in one order and the audio in the other.
    assert not np.allclose(ahead[:, 12:14], back[:, 10:12])
    for nats, row in ((ahead, ids), (back, turned)):
        cost = nats - both.log_prob(row)
        assert np.allclose(cost[:, 0], math.log(2), atol=1e-12) and np.allclose(cost[:, 1:], 0, atol=1e-12)
    share = (both.documents(6, 0, 20_000)[:, 0] >= 12).mean()
    assert share == pytest.approx(0.5, abs=0.015)
    one = DialConfig({"text": 9}, {"text": 1.0}, {"text": 1.5}, {"text": 8}, {"text": 2}, order="both")
    alone = Dial(one).documents(0, 0, 50)
    assert (Dial(one).log_prob(alone) == Dial(replace(one, order="forward")).log_prob(alone)).all()


def test_what_cannot_follow_is_impossible():
    # With 13 ids, rounding could give a probability above 1 to a token that is certain.
    of_both = {"vocabulary": (13, 12), "skew": (0.0, 0.0), "entropy": (0.0, 0.5)}
    fields = {name: dict(zip(("text", "image"), values, strict=True)) for name, values in of_both.items()}
    dial = Dial(chain(order="forward", **fields))
    ids = dial.documents(0, 0, 4)
    nats = dial.log_prob(ids)[:, 3:24]
    assert np.allclose(nats, 0, atol=1e-9) and nats.max() <= 0
    other = dial.log_prob(np.where(np.arange(48) == 7, (ids + 1) % 13, ids))[:, 7]
    # 13 does not divide the units, so an impossible pair may have a probability of 1e-15.
    assert np.isneginf(other).any() and (other < -30).all()


# Noise of the targets


@pytest.mark.parametrize("order", ORDERS)
def test_the_probability_of_a_noisy_target_is_the_mixture_that_defines_it(order):
    config = replace(TINY, order=order)
    noise = {"text": 0.3, "image": 0.0, "audio": 1.0}
    clean, noisy = Dial(config), Dial(replace(config, target_noise=noise))
    ids, targets = noisy.documents(3, 0, 400), noisy.targets(3, 0, 400)
    share = np.concatenate([[noise[m]] * n for m, n in config.vocabulary.items()])[ids]
    # P(v | earlier tokens) from documents with v in this place, and the unigram from independent roots.
    independent = replace(config, lag=config.tokens, mutual_information=0.0)
    expected, without = np.empty(ids.shape), np.empty(ids.shape)
    for t in range(ids.shape[1]):
        changed = ids.copy()
        changed[:, t] = targets[:, t]
        p = np.exp(clean.log_prob(changed)[:, t])
        unigram = np.exp(Dial(independent).log_prob(changed)[:, t])
        expected[:, t] = (1 - share[:, t]) * p + share[:, t] * unigram
        without[:, t] = p
    nats = noisy.log_prob(ids, targets)
    assert np.allclose(np.exp(nats), expected, rtol=1e-9)
    assert not np.allclose(np.exp(nats), without, rtol=0.1)


def test_noise_replaces_the_chosen_share_of_targets_and_no_input():
    config = chain(target_noise={"image": 0.4})
    dial = Dial(config)
    ids, targets = dial.documents(2, 100, 20_000), dial.targets(2, 100, 20_000)
    assert (ids == Dial(chain()).documents(2, 100, 20_000)).all()
    assert (Dial(chain()).targets(2, 100, 20_000) == ids).all()
    image = ids >= 12
    assert (targets[~image] == ids[~image]).all() and ((targets >= 12) == image).all()
    # A random token equals the replaced token with the probability that two draws of the unigram are equal.
    unigram = np.bincount(ids[image] - 12) / image.sum()
    changed = (targets != ids)[image].mean()
    assert changed == pytest.approx(0.4 * (1 - (unigram**2).sum()), abs=0.003)
    assert np.bincount(targets[image] - 12) / image.sum() == pytest.approx(unigram, abs=0.003)
    assert (dial.targets(2, 600, 10) == targets[500:510]).all()
    with pytest.raises(ValueError, match="target_noise has audio"):
        chain(target_noise={"audio": 0.1})


# Floors


def test_the_loss_of_the_source_itself_is_its_floor():
    orders = [replace(THREE, order=order) for order in ORDERS]
    noisy = [replace(config, target_noise={"text": 0.2, "audio": 0.6}) for config in orders]
    for config in (DialConfig(), *orders, *noisy):
        dial = Dial(config)
        ids = dial.documents(7, 0, 15_000)
        nats = dial.log_prob(ids, dial.targets(7, 0, 15_000))
        edges = np.cumsum([0, *dial.vocab_sizes.values()])
        for (name, floor), low, high in zip(dial.floors().items(), edges[:-1], edges[1:], strict=True):
            inside = (ids >= low) & (ids < high)
            each = -(nats * inside).sum(1) / config.tokens[name]  # one mean per document: its tokens are correlated
            error = each.std() / math.sqrt(len(each))
            assert abs(each.mean() - floor) < 4 * error
            assert error < 0.01 and abs(each.mean() - floor - 0.05) > 4 * error


def test_a_gap_of_0_is_0_to_the_last_digit_and_moves_alone():
    floors = Dial(DialConfig()).floors()
    assert floors["text"] == floors["image"]
    lo, mid, hi = (Dial(DialConfig(entropy={"text": t, "image": i})) for t, i in ((1.5, 1.5), (2.75, 2.75), (1.5, 4.0)))
    assert lo.floors()["text"] == lo.floors()["image"] == hi.floors()["text"]
    gap = hi.floors()["image"] - hi.floors()["text"]
    assert gap == pytest.approx(2.5 * 44 / 48, abs=1e-12)  # 4 of 48 tokens have no parent
    assert sum(hi.floors().values()) == pytest.approx(sum(mid.floors().values()), abs=1e-12)
    held = ("unigram entropy", "token share", "transitions")
    rows = [[{k: row[k] for k in held} for row in dial.describe(10**6)] for dial in (lo, mid, hi)]
    assert rows[0] == rows[1] == rows[2]
    # With a gap of 0 both modalities have the same distribution: exchanging their ids does not change the
    # probabilities.
    ids = mid.documents(0, 0, 2)
    swapped = np.where(ids < 128, ids + 128, ids - 128)
    assert np.allclose(mid.log_prob(ids), mid.log_prob(swapped), atol=1e-12)
    assert not np.allclose(hi.log_prob(ids), hi.log_prob(swapped), atol=0.01)


# Refusals


def interval(message: str) -> tuple[float, float]:
    low, high = re.search(r"between ([\d.]+) (?:\(a chain\) )?and ([\d.]*\d)", message).groups()
    return float(low), float(high)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.2])
def test_an_entropy_outside_its_interval_is_refused_and_the_interval_works(skew):
    def config(h: float) -> DialConfig:
        return chain(skew={"text": 0.8, "image": skew}, entropy={"text": 1.2, "image": h})

    weights = np.arange(1, 13) ** -skew
    highest = -(weights / weights.sum() * np.log(weights / weights.sum())).sum()
    with pytest.raises(ValueError, match=r"^data\.dial\.entropy\.image is 9") as refusal:
        config(9.0)
    low, high = interval(str(refusal.value))
    assert high <= highest and high == pytest.approx(highest, abs=1e-4) and (low == 0) == (skew == 0)
    assert "\n" not in str(refusal.value) and str(refusal.value).count(". ") == 0
    for h in (low, high, float(highest)):
        dial = Dial(config(h))
        ids = by_modality(dial, dial.documents(0, 0, 20_000))["image"]
        counted = counted_entropy(ids[:, 2:], ids[:, :-2]) - counted_entropy(ids[:, :-2])
        assert counted == pytest.approx(h, abs=0.006)
    for h in (low - 2e-4, high + 2e-4, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"data\.dial\.entropy\.image"):
            config(h)


# Order and determinism


@pytest.mark.parametrize("config", [DialConfig(), THREE], ids=["two", "three"])
def test_a_document_is_a_function_of_config_seed_and_number(config):
    dial = Dial(config)
    whole = dial.documents(11, 0, 1300)
    random = np.random.default_rng(0)
    for first, count in [(0, 1), (511, 2), (512, 512), (1299, 1), (700, 0), *random.integers(1, 600, (20, 2)).tolist()]:
        assert (Dial(config).documents(11, int(first), int(count)) == whole[first : first + count]).all()
    whole_again = whole.copy()
    dial.documents(11, 0, 5)[:] = 0  # a caller may change the array that it gets
    assert (dial.documents(11, 0, 1300) == whole_again).all()
    assert (pickle.loads(pickle.dumps(dial)).documents(11, 600, 3) == whole[600:603]).all()
    other = dial.documents(12, 0, 1300)
    assert (other != whole).mean() > 0.5 and (dial.documents(11, 1, 1299) != whole[:-1]).mean() > 0.5
    assert len(np.unique(whole, axis=0)) == 1300


# Configuration


@pytest.mark.parametrize(
    ("tokens", "lag", "width"), [(24, 1, 6), (24, 2, 6), (24, 4, 0), (5, 9, 0), (12, 3, 4), (9, 1, 1)]
)
def test_parents_stand_where_the_configuration_says(tokens, lag, width):
    parent = {int(c): int(p) for level in forest(tokens, lag, width) for c, p in zip(*level, strict=True)}
    assert sorted(parent) == list(range(tokens))
    for t, p in parent.items():
        above, left = t - lag * width, t - lag
        if width and above >= 0:
            assert p == above
        elif left >= 0 and (not width or left // width == t // width):
            assert p == left
        else:
            assert p == -1
    known: set[int] = set()
    for level in forest(tokens, lag, width):  # the parents of each level are in earlier levels
        assert set(level.parent.tolist()) <= known | {-1}
        known |= set(level.child.tolist())
