"""Compares the entropy, the largest logits and the rank of attention with brute force, in cases that `test_probe`
lacks: tokens without a modality, large logits, and many of them."""

import math

import pytest
import torch

from mmqk.monitors.formulas.attention import AttentionStatistics, attention_rank
from mmqk.monitors.formulas.reduce import FEWEST_KEYS, Pairs, visible_pairs
from tests.monitors import brute_force

B, H, T, K, M = 2, 3, 30, 4, 3


def case(size=1.5):
    """Return queries, keys, modalities and visible pairs; the second sequence has two modalities and a padded end."""
    random = torch.Generator().manual_seed(0)
    q, k = (size * torch.randn(B, H, T, K, generator=random) for _ in range(2))
    modality_BT = torch.randint(0, M, (B, T), generator=random)
    modality_BT[1] = modality_BT[1].clamp_max(1)
    valid_BT = torch.ones(B, T, dtype=torch.bool)
    valid_BT[1, -5:] = False
    return q, k, modality_BT, visible_pairs(valid_BT, window=20)


def by_name(rows):
    """Return means of `AttentionStatistics.rows` by name; offset and mass have M values, all others one."""
    names = ["mean", "variance", "offset_variance", "spread_variance", "offset"]
    names += ["entropy", "block_entropy", "within_entropy", "mass"]
    sizes = [M if name in ("offset", "mass") else 1 for name in names]
    return dict(zip(names, (rows.sum / rows.count).split(sizes), strict=True))


def without_modality(modality_BT):
    """Take the modality of every third token: -1 and M are the numbers of no modality."""
    number_T = torch.where(torch.arange(T) % 2 == 0, -1, M)
    return torch.where(torch.arange(T) % 3 == 1, number_T, modality_BT)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_keys_without_a_modality_are_one_more_block_of_the_entropy(softcap):
    q, k, modality_BT, visible_BTS = case()
    modality_BT = without_modality(modality_BT)
    pairs = Pairs(modality_BT, visible_BTS, M, H)
    rows = by_name(AttentionStatistics(q, k, 0.7, pairs, softcap).rows)
    tags = {"entropy": "attn_entropy", "block_entropy": "attn_entropy_block", "within_entropy": "attn_entropy_within"}
    entropies = {f"{tag}/{a}/layer00": float(rows[name][0, a]) for name, tag in tags.items() for a in range(M)}
    # One number for all keys without a modality, and only rows that see enough keys with one.
    modality_BT = torch.where((modality_BT < 0) | (modality_BT >= M), M, modality_BT)
    few_BT = (visible_BTS & (modality_BT < M)[:, None]).sum(-1) < FEWEST_KEYS
    counted_BTS = visible_BTS & ~few_BT[:, :, None]
    names, qk = tuple(map(str, range(M + 1))), (q.double().numpy(), k.double().numpy())
    expected = brute_force.attention(
        *qk, 0.7, modality_BT.numpy(), lambda b, t, s: counted_BTS[b, t, s], names, 0, softcap
    )
    assert entropies == {tag: pytest.approx(expected[tag], rel=1e-4, abs=1e-5) for tag in entropies}
    assert all(entropies[f"attn_entropy_within/{a}/layer00"] > 0 for a in range(M))
    # The control: the keys without a modality have a share of the weights.
    assert all(expected[f"attn_mass/{a}-{M}/layer00"] > 0.1 for a in range(M))


def test_padding_without_a_modality_is_no_block():
    q, k, modality_BT, visible_BTS = case()
    padded_BT = torch.where(visible_BTS.any(1), modality_BT, -1)
    assert (padded_BT != modality_BT).any()
    marked, plain = (Pairs(x, visible_BTS, M, H) for x in (padded_BT, modality_BT))
    assert not marked.others and not plain.others
    assert Pairs(without_modality(modality_BT), visible_BTS, M, H).others  # the control
    rows = [AttentionStatistics(q, k, 0.7, pairs).rows for pairs in (marked, plain)]
    torch.testing.assert_close(*(of.sum / of.count for of in rows), rtol=0, atol=0, equal_nan=True)


def test_large_logits_on_a_large_mean_keep_their_spread():
    """The mean is near 10,000, so a difference of squares in fp32 would lose the variance."""
    q, k, modality_BT, visible_BTS = case(size=1.0)
    q[..., -1] = 1.0
    k[..., -1] += 1e4
    statistics = AttentionStatistics(q, k, 1.0, Pairs(modality_BT, visible_BTS, M, H))
    z_BHTS, variance_M = q.double() @ k.double().mT, by_name(statistics.rows)["variance"][0]
    counted_BT = visible_BTS.sum(-1) >= FEWEST_KEYS
    for a in range(M):
        rows = [
            z_BHTS[b, h, t, visible_BTS[b, t]].var(correction=0)
            for b, t in (counted_BT & (modality_BT == a)).nonzero().tolist() for h in range(H)
        ]  # fmt: skip
        assert float(variance_M[a]) == pytest.approx(float(torch.stack(rows).mean()), rel=1e-2)


def test_the_largest_of_many_logits_are_those_of_a_sort():
    """With this many pairs, `tail` has several values, and `_largest` (formulas/attention.py) sorts only some of the
    groups of 32 pairs."""
    random = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 3, 211, 4, generator=random) for _ in range(2))
    modality_BT = torch.randint(0, 2, (1, 211), generator=random)
    statistics = AttentionStatistics(
        q, k, 0.5, Pairs(modality_BT, visible_pairs(torch.ones(1, 211, dtype=torch.bool)), 2, 3)
    )
    z = 0.5 * q.double() @ k.double().mT
    for i, tail in enumerate(statistics.tail):
        pair_TS = (modality_BT[0] == i // 2)[:, None] & (modality_BT[0] == i % 2) & torch.ones(211, 211).tril().bool()
        whole = z[0, :, pair_TS].abs().flatten().sort(descending=True).values
        assert len(tail) == round(len(whole) / 1000) > 10
        torch.testing.assert_close(tail.double(), whole[: len(tail)], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(tail.double(), whole[1 : len(tail) + 1], rtol=1e-5)
        assert float(statistics.max.flatten()[i]) == pytest.approx(float(z[0, :, pair_TS].max()), rel=1e-5)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_rank_by_blocks_of_what_is_reached_is_that_of_the_whole(window, causal):
    """The queries are split into several slices, with and without a causal mask."""
    n = 150
    q, k = (torch.randn(2, 3, n, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    valid_BT = torch.ones(2, n, dtype=torch.bool)
    valid_BT[1, -20:] = False
    visible_BTS = visible_pairs(valid_BT, window=window)
    if not causal:
        visible_BTS = visible_BTS | visible_BTS.mT
    seen = Pairs(torch.zeros(2, n, dtype=torch.long), visible_BTS, 1, 3)
    assert len(seen.reach) == 5
    assert (seen.reach[0][1] == (32 if causal else n if not window else 61)) and seen.reach[-1][1] == n
    z = torch.where(visible_BTS[:, None], 0.4 * q.double() @ k.double().mT, -math.inf)
    s = torch.linalg.svdvals(torch.softmax(z, -1).nan_to_num(0.0))
    expected = float(((s**2).sum(-1) ** 2 / (s**4).sum(-1)).mean())
    assert float(attention_rank(q, k, 0.4, seen, None, None).mean()) == pytest.approx(expected, rel=1e-4)
    together = AttentionStatistics(q, k, 0.4, seen).rank
    assert together is not None and float(together.mean()) == pytest.approx(expected, rel=1e-4)
    if not causal:  # control: a reach that is too short gives another rank
        vars(seen)["reach"] = [(rows, keys // 2) for rows, keys in seen.reach]
        assert float(attention_rank(q, k, 0.4, seen, None, None).mean()) != pytest.approx(expected, rel=1e-2)
