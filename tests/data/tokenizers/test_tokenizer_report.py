import math

import pytest
import torch

from data.build.tokenizer_report import token_statistics


def test_statistics_of_known_counts():
    even = token_statistics(torch.arange(8).repeat(5), 16)
    assert (even.tokens, even.used) == (40, 8)
    assert even.entropy == pytest.approx(math.log(8))
    assert (even.bits, even.perplexity) == (pytest.approx(3), pytest.approx(8))
    assert token_statistics(torch.zeros(2, 3).long(), 4).perplexity == pytest.approx(1)
    skewed = token_statistics(torch.tensor([0, 0, 0, 1]), 2)
    assert skewed.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert skewed.entropy < even.entropy
