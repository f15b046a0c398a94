"""Attention backends: only the named kernel runs, and attention that a backend does not support is refused.

`test_transformer` and `test_flex` compare their values.
"""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from mmqk.model import backends as kernels
from mmqk.model.backends import kernel_name
from mmqk.model.ranges import check_backend
from tests.model.attend import attention

B, H, T, K = 2, 4, 40, 8
SCALE = 0.4
DOCUMENT_BT = torch.arange(T).expand(B, T) // 15


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, K, generator=generator, dtype=dtype) for _ in range(3)]


WIDE, NARROW = torch.float32, torch.bfloat16


class Calls(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FUSED = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("document_BT", [None, DOCUMENT_BT])
def test_the_kernel_that_is_named_runs(dtype, document_BT):
    q, k, v = qkv(dtype)
    options = {"scale": SCALE, "document_BT": document_BT}
    for backend, dropout in (("sdpa", 0.0), ("sdpa", 0.5), ("math", 0.0)):
        with Calls() as calls:
            attention(q, k, v, backend=backend, dropout=dropout, **options)
        flash = kernel_name(backend, "cpu", dtype, document_BT is not None, dropout) == "flash (SDPA)"
        assert (FUSED in calls.names) == flash
        assert bool(calls.names & {"bmm", "matmul", "baddbmm"}) != flash


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns why a kernel cannot run
@pytest.mark.parametrize(
    ("kernel", "dropout"), [(SDPBackend.FLASH_ATTENTION, 0.1), (SDPBackend.EFFICIENT_ATTENTION, 0.0),
                            (SDPBackend.CUDNN_ATTENTION, 0.0)]
)  # fmt: skip
def test_nothing_falls_back_from_a_pinned_kernel(kernel, dropout, monkeypatch):
    q, k, v = qkv()
    monkeypatch.setattr(kernels, "_sdpa", lambda *args: kernel)
    with pytest.raises(RuntimeError, match=r"[Nn]o (viable backend|available kernel)"):
        attention(q, k, v, scale=SCALE, dropout=dropout, backend="sdpa")


LONG, ODD = {"masked": True, "tokens": 1088}, {"tokens": 1000}
REFUSED = [
    ({}, "sdpa", 30.0), ({}, "sdpa_cudnn", 30.0), ({}, "sdpa", None, "sigmoid"), ({}, "flex", None, "sigmoid"),
    ({"masked": True}, "sdpa_flash"), (LONG, "sdpa_cudnn"), ({"dropout": 0.1}, "flex"), (ODD, "flex"),
]  # fmt: skip
TAKEN = [
    (LONG | {"dropout": 0.1}, "math", 30.0, "sigmoid"), ({"masked": True, "tokens": 1024}, "flex", 30.0),
    (LONG | {"dropout": 0.1}, "sdpa"), ({"dropout": 0.1} | ODD, "sdpa_flash"), (LONG, "sdpa_efficient"),
    ({"masked": True, "tokens": 1024}, "sdpa_cudnn"), ({"tokens": 1088}, "sdpa_cudnn"),
]  # fmt: skip


def test_what_a_backend_cannot_compute_is_refused():
    for named, *args in TAKEN:
        check_backend(*args, **named)
    for named, *args in REFUSED:
        with pytest.raises(ValueError, match=f"backend {args[0]} "):
            check_backend(*args, **named)
    for backend, device, dtype in (("flex", "cpu", WIDE), ("sdpa_cudnn", "cpu", WIDE), ("sdpa_flash", "cuda", WIDE)):
        with pytest.raises(ValueError, match=f"{backend} needs"):
            kernel_name(backend, device, dtype)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_under_autocast_attention_takes_its_dtype_alone(backend):
    wide, narrow = qkv(), [x.bfloat16() for x in qkv()]
    options = {"scale": SCALE, "backend": backend}
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*narrow, **options).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"float32, but the autocast dtype is torch\.bfloat16"):
            attention(*wide, **options)
        with pytest.raises(TypeError, match=r"one dtype, but have torch\.float32, torch\.float32, torch\.bfloat16"):
            attention(*wide[:2], narrow[2], **options)
        assert attention(*(x.double() for x in wide), **options).dtype == torch.float64
    assert attention(*wide, **options).dtype == torch.float32


@pytest.mark.parametrize("document_BT", [None, DOCUMENT_BT])
def test_gradients_of_sdpa_are_those_of_math(document_BT):
    results = []
    for backend, scale in (("math", 0.4), ("sdpa", 0.4), ("sdpa", 0.41)):
        leaves = [x.requires_grad_() for x in qkv()]
        out = attention(*leaves, scale=scale, document_BT=document_BT, backend=backend)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for dense, fused, other in zip(*results, strict=True):
        torch.testing.assert_close(dense, fused, rtol=1e-4, atol=1e-4)
        assert (other - dense).abs().max() > 1e-3


def test_math_keeps_large_bf16_logits_exact_between_its_inputs_and_its_output():
    # The logits are about 128 and differ between keys by less than the spacing of bf16 numbers near 128.
    q, k, v = ((shift + 0.05 * x).bfloat16() for shift, x in zip((4, 4, 0), qkv(), strict=True))
    exact = attention(q.double(), k.double(), v.double(), scale=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(q, k, v, scale=1.0)
        rounded_logits = (q @ k.transpose(-1, -2)).float() + torch.full((T, T), -math.inf).triu(1)
        rounded = (torch.softmax(rounded_logits, -1).bfloat16() @ v).double()
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert (rounded - exact).abs().max() > exact.abs().max() * 2**-8
