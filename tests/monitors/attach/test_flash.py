"""Tests calls of flash-attention. Its operators need a GPU, so stand-ins with the same names are defined for the CPU;
like the real operators, they refuse fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmqk.monitors import attach
from mmqk.monitors.foreign.calls import of_flash, of_torch_varlen, of_transformers_flash
from tests.monitors.attach.nets import SLOPES, H, Net, SelfAttention, alibi, batches
from tests.monitors.attach.test_exact import IMAGE, same

LIBRARY = torch.library.Library("flash_attn", "DEF")
LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def refuses(q, *rest):
    raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
    LIBRARY.impl(name, refuses, "CPU")

DOCUMENTS = torch.tensor([0, 5, 16, 24, 32, 48])  # document borders in three packed sequences of 16 tokens


class Flash(SelfAttention):
    """Calls the operator of flash_attn_func in an autograd function, or its packed variant, or torch's function for
    the same attention."""

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        if self.call == "flash":
            out = Function.apply(q, k, v)
        elif self.call == "packed":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            run = torch.ops.flash_attn._flash_attn_varlen_forward
            out = run(q, k, v, DOCUMENTS, DOCUMENTS, 16, 16, 0.0, 0.3, causal=True)[0].unflatten(0, (len(x), -1))
        else:
            t = torch.arange(16)
            back = t[:, None] - t
            if self.call == "flash by torch":
                seen = alibi(16).masked_fill((back < 0) | (back > 9), -torch.inf)
            else:
                document = torch.bucketize(torch.arange(48), DOCUMENTS, right=True).view(3, 1, 16)
                seen = (document[..., :, None] == document[..., None, :]) & (back >= 0)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=0.3).transpose(1, 2)
        return self.out(out.flatten(2))


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        run = torch.ops.flash_attn._flash_attn_forward
        out, lse, _, _ = run(q, k, v, 0.0, 0.3, causal=True, window_size_left=9, window_size_right=0, softcap=0.0,
                             alibi_slopes=SLOPES, return_softmax=False)  # fmt: skip
        assert lse.shape == (len(q), H, q.shape[1])
        return out


class FlashNet(Net):
    def _attention(self, call: str, kv_heads: int) -> nn.Module:
        return Flash(call, kv_heads)


@pytest.mark.parametrize("call", ["flash", "packed"])
def test_its_operators_say_what_torchs_call_of_the_same_attention_says(call):
    (ids,) = batches(1, B=3)
    flash, torchs = (FlashNet([c] * 2) for c in (call, f"{call} by torch"))
    with pytest.raises(RuntimeError, match="only support fp16"):
        flash(ids)
    measured, expected = (attach(net, modality=IMAGE).probe(ids=ids).flat() for net in (flash, torchs))
    assert measured.keys() == expected.keys() and same(measured, expected)
    other = attach(FlashNet(["packed by torch" if call == "flash" else "flash by torch"] * 2), modality=IMAGE)
    assert not same(measured, other.probe(ids=ids).flat())


def test_windows_packing_and_positions_are_those_of_the_kernels():
    q = torch.randn(2, 3, 8, 4)  # (B, H, T, K)
    window = of_transformers_flash(None, q, q, q, sliding_window=3, is_causal=True).mask
    t = torch.arange(8)
    assert torch.equal(window[0, 0], (t[:, None] >= t) & (t[:, None] - t < 3))
    # transformers reads packed documents from positions only for a batch size of 1.
    starts, one = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]), q[:1]
    packed = of_transformers_flash(None, one, one, one, position_ids=starts).mask[:, 0]
    assert packed[0].sum() == 6 + 3 + 6
    two = of_transformers_flash(None, q, q, q, position_ids=starts.expand(2, -1)).mask[:, 0]
    assert torch.equal(two[0], torch.ones(8, 8).tril().bool())
    ends = torch.tensor([0, 3, 5, 8])
    given = of_transformers_flash(None, one, one, one, cu_seq_lens_q=ends, is_causal=True)
    assert torch.equal(given.mask[:, 0], packed)
    flat, ends = q.transpose(1, 2).flatten(0, 1), torch.tensor([0, 3, 5, 8, 16])
    same_as = of_torch_varlen(2, flat, flat, flat, ends, is_causal=True).mask[:, 0]
    assert torch.equal(same_as[:1], packed)
    both = of_flash(*[q.transpose(1, 2)] * 3, window_size_left=2, window_size_right=1).mask
    assert both[0, 0].sum(-1).tolist() == [2, 3, 4, 4, 4, 4, 4, 3]
