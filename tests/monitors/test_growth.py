"""Compares the parts of logit growth and the rank of attention with known answers; `test_probe` compares them with
brute force."""

import math

import pytest
import torch

from mmqk.monitors.formulas.attention import (
    GROWTH_PARTS,
    AttentionStatistics,
    attention_rank,
    common_mode,
    growth_parts,
    logit_growth,
)
from mmqk.monitors.formulas.pairs import Pairs, visible_pairs
from mmqk.monitors.formulas.reduce import selection

B, H, T, K, M = 2, 3, 24, 4, 2


def case(seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, H, T, K, generator=random, dtype=dtype) + 0.5 for _ in range(2))
    modality_BT = torch.randint(0, M, (B, T), generator=random)
    valid_BT = torch.ones(B, T, dtype=torch.bool)
    valid_BT[1, -4:] = False
    return q, k, modality_BT, valid_BT


def growth(q, k, of, visible):
    return logit_growth(q, k, of, visible, AttentionStatistics(q, k, 1.0, visible).square)


def parts_of(measured):
    return dict(zip(GROWTH_PARTS, growth_parts(measured), strict=True))


@pytest.mark.parametrize(("grown", "by"), [("q_power", "q"), ("k_power", "k"), ("alignment", "line")])
def test_what_grew_is_what_is_reported(grown, by):
    q, k, modality_BT, valid_BT = case()
    of, visible = selection(modality_BT, valid_BT, M), Pairs(modality_BT, visible_pairs(valid_BT), M, H)
    before = parts_of(growth(q, k, of, visible))
    if by == "line":  # keep the lengths, and give all vectors one direction
        q, k = (x.norm(dim=-1, keepdim=True) * torch.full((K,), K**-0.5) for x in (q, k))
    after = parts_of(growth(3 * q if by == "q" else q, 3 * k if by == "k" else k, of, visible))
    for name in ("q_power", "k_power", "alignment"):
        change = after[name] - before[name]
        if name != grown:
            torch.testing.assert_close(change, torch.zeros(M, M), rtol=0, atol=1e-4)
        elif by == "line":
            assert (change > 0.3).all()
        else:
            torch.testing.assert_close(change, torch.full((M, M), 2 * math.log(3)), rtol=0, atol=1e-4)


def test_common_mode_has_its_known_values():
    of = torch.ones(1, 2, 1000, dtype=torch.bool)
    alike = torch.randn(2, 3, 1, 8).expand(2, 3, 1000, 8)
    assert float(common_mode(alike, of).mean) == pytest.approx(1.0, rel=1e-5)
    at_random = torch.randn(2, 3, 1000, 8, generator=torch.Generator().manual_seed(0))
    assert float(common_mode(at_random, of).mean) == pytest.approx(1 / 1000, rel=0.3)
    half = common_mode(at_random + torch.full((8,), 1.0), of)  # each channel has variance 1 and mean 1
    assert float(half.mean) == pytest.approx(0.5, abs=0.02)


def test_attention_rank_tells_benign_sharpness_from_collapse():
    """The entropy is near 0 in both cases: each query attends to itself, or all queries attend to the first key."""
    n = 16
    visible = Pairs(torch.zeros(1, n, dtype=torch.long), visible_pairs(torch.ones(1, n, dtype=torch.bool)), 1, 1)
    q = torch.eye(n)[None, None]
    to_itself = 50 * torch.eye(n)[None, None]
    to_the_first = torch.zeros(1, 1, n, n)
    to_the_first[..., 0, :] = 50.0
    assert float(attention_rank(q, to_itself, 1.0, visible, None, None)) == pytest.approx(n, rel=1e-3)
    assert float(attention_rank(q, to_the_first, 1.0, visible, None, None)) == pytest.approx(1.0, rel=1e-3)


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
