"""Attention backends: only the named kernel runs, and attention that a backend does not support is refused."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from mmqk.model import backends as kernels
from mmqk.model.backends import kernel_name
from mmqk.model.checks import check_backend
from tests.model.attend import attention

B, H, T, K = 2, 4, 40, 8
SCALE = 0.4
DOCUMENT_BT = torch.arange(T).expand(B, T) // 15


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, K, generator=generator, dtype=dtype) for _ in range(3)]


WIDE, NARROW = torch.float32, torch.bfloat16


def test_the_kernel_of_each_backend():
    for name, *of in (
        ("math (dense, fp32)", "math", "cpu", WIDE), ("math (dense, fp32)", "math", "cuda", NARROW, True, 0.1),
        ("flex (Triton)", "flex", "cuda", NARROW, True),
        ("flash (SDPA)", "sdpa", "cpu", WIDE), ("flash (SDPA)", "sdpa", "cpu", torch.float64, True),
        ("math (SDPA)", "sdpa", "cpu", NARROW, False, 0.1), ("flash (SDPA)", "sdpa_flash", "cpu", WIDE),
        ("flash (SDPA)", "sdpa", "cuda", NARROW), ("flash (SDPA)", "sdpa", "cuda", torch.float16, False, 0.1),
        ("efficient (SDPA)", "sdpa", "cuda", NARROW, True, 0.1), ("efficient (SDPA)", "sdpa", "cuda", WIDE),
        ("math (SDPA)", "sdpa", "cuda", torch.float64), ("flash (SDPA)", "sdpa_flash", "cuda", NARROW, False, 0.1),
        ("efficient (SDPA)", "sdpa_efficient", "cuda", WIDE, True),
        ("efficient (SDPA)", "sdpa_efficient", "cuda", NARROW),
        ("cudnn (SDPA)", "sdpa_cudnn", "cuda", torch.float16, True),
    ):  # fmt: skip
        assert kernel_name(*of) == name, of


def test_a_kernel_that_does_not_exist_is_refused():
    for words, backend, device, dtype, dropout in (
        (r"flex needs a CUDA GPU, but the device is cpu; use", "flex", "cpu", WIDE, 0.0),
        (r"sdpa_efficient needs a CUDA GPU, but the device is cpu", "sdpa_efficient", "cpu", WIDE, 0.0),
        (r"sdpa_cudnn needs a CUDA GPU, but the device is cpu; use", "sdpa_cudnn", "cpu", NARROW, 0.0),
        (r"sdpa_flash has no dropout on a CPU \(model\.attn_dropout\)", "sdpa_flash", "cpu", WIDE, 0.1),
        (r"sdpa_flash needs 16 bits, but the dtype is torch\.float32", "sdpa_flash", "cuda", WIDE, 0.0),
        (r"sdpa_cudnn needs 16 bits, .* bf16-mixed, or use", "sdpa_cudnn", "cuda", WIDE, 0.0),
        (r"16 bits, but the dtype is torch\.float64", "sdpa_flash", "cuda", torch.float64, 0.0),
    ):
        with pytest.raises(ValueError, match=words):
            kernel_name(backend, device, dtype, dropout=dropout)


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


def test_what_a_backend_cannot_compute_is_refused_in_one_sentence():
    long = {"masked": True, "tokens": 1088}
    for words, *said in (
        (r"backend must be one of math, sdpa, .*flex, but is 'flash'\.$", "flash"),
        (r"backend sdpa cannot apply model\.attn_softcap 30\.0; use backend math, or flex", "sdpa", 30.0),
        (r"backend sdpa_cudnn cannot apply model\.attn_softcap", "sdpa_cudnn", 30.0),
        (r"backend sdpa cannot compute model\.attention sigmoid; use backend math\.$", "sdpa", None, "sigmoid"),
        (r"backend flex cannot compute model\.attention sigmoid; use backend math\.$", "flex", None, "sigmoid"),
        (r"sdpa_flash cannot apply model\.window, model\.separate_first, .* or data\.document_mask",
         "sdpa_flash", {"masked": True}),
        (r"sdpa_cudnn with a mask needs data\.seq_len to be a multiple of 128, but it is 1088: .* use sdpa\.$",
         "sdpa_cudnn", long),
        (r"flex cannot drop attention weights \(model\.attn_dropout 0\.1\); use sdpa", "flex", {"dropout": 0.1}),
        (r"flex needs data\.seq_len to be a multiple of 128, but it is 1000: ", "flex", {"tokens": 1000}),
    ):  # fmt: skip
        named = said.pop() if isinstance(said[-1], dict) else {}
        with pytest.raises(ValueError, match=words) as error:
            check_backend(*said, **named)
        assert "\n" not in str(error.value)


def test_what_a_backend_can_compute_is_not_refused():
    check_backend("math", 30.0, "sigmoid", dropout=0.1, masked=True, tokens=7)
    check_backend("flex", 30.0, masked=True, tokens=1024)
    check_backend("sdpa", dropout=0.1, masked=True, tokens=7)
    check_backend("sdpa_flash", dropout=0.1, tokens=7)
    check_backend("sdpa_efficient", masked=True, tokens=7)
    check_backend("sdpa_cudnn", masked=True, tokens=1024)
    check_backend("sdpa_cudnn", tokens=1088)


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
