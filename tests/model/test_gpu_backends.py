"""On a GPU, every fused kernel equals `math` in float64, and attention under autocast stays in 16 bits."""

from dataclasses import replace

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.model import backends as kernels
from mmqk.model.transformer import compile_blocks
from tests.model.small import BLOCKS, ids_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = "cuda"
B, H, SCALE = 2, 4, 0.15
CASES = {
    "causal": {}, "window": {"window": 200}, "documents": {"documents": True},
    "window and documents": {"window": 100, "documents": True},
}  # fmt: skip
CAPPED = {
    "capped": {"softcap": 3.0}, "grouped": {"heads": 2},
    "all": {"window": 100, "documents": True, "softcap": 3.0, "heads": 1},
}  # fmt: skip
KERNELS = [
    *((backend, torch.bfloat16, "causal") for backend in ("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")),
    *((backend, torch.bfloat16, case) for backend in ("sdpa", "sdpa_efficient") for case in list(CASES)[1:]),
    *((backend, torch.float32, case) for backend in ("sdpa", "sdpa_efficient") for case in CASES),
    *(("flex", dtype, case) for dtype in (torch.bfloat16, torch.float32) for case in CASES | CAPPED),
]
# Tolerance relative to the norm of the compared tensor. With fp32 inputs, kernels may still use tensor cores.
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 0.005}


def documents(T):
    """Return document numbers: three documents and padding in the first row, two documents in the second."""
    place = torch.arange(T, device=DEVICE)
    first = (place > T // 3).long() + (place > T // 2).long()
    return torch.stack((first.where(place < T - 20, -1), (place > T // 5).long()))


def qkv(T, K, dtype, heads=H):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, n, T, K) for n in (H, heads, heads)]
    leaves = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [leaf.requires_grad_() for leaf in leaves]


def attended(leaves, T, backend, window=0, documents=None, softcap=None, scale=SCALE):
    """Return the output with its gradients, and the row statistics. Only flex gets shared key and value heads."""
    q, k, v = leaves
    if backend != "flex":
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    mask = kernels.mask_of(backend, T, q.device, window, documents)
    out, rows = kernels.attention(q, k, v, mask, scale=scale, softcap=softcap, backend=backend)
    weight = torch.linspace(-1, 1, out.shape[-1], device=DEVICE, dtype=torch.float64)
    return [out, *torch.autograd.grad((out.double() * weight).square().sum(), leaves)], rows


def furthest(ours, theirs):
    """Return the largest error relative to the norm of its reference."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def prepared(T, K, dtype, case):
    options = dict((CASES | CAPPED)[case])
    leaves = qkv(T, K, dtype, options.pop("heads", H))
    options["documents"] = documents(T) if options.get("documents") else None
    return leaves, [leaf.detach().double().requires_grad_() for leaf in leaves], options


@pytest.mark.parametrize(("backend", "dtype", "case"), KERNELS)
@pytest.mark.parametrize(("T", "K"), [(256, 128), (1024, 64)])
def test_a_fused_kernel_equals_math_in_float64(backend, dtype, case, T, K):
    leaves, wide, options = prepared(T, K, dtype, case)
    ours, rows = attended(leaves, T, backend, **options)
    exact, _ = attended(wide, T, "math", **options)
    assert all(x.dtype == dtype for x in ours)
    assert furthest(ours, exact) < TOLERANCE[dtype]
    other = options | {"scale": 1.15 * SCALE}
    assert furthest(ours, attended(wide, T, "math", **other)[0]) > 2 * TOLERANCE[dtype]
    assert (rows is not None) == (backend == "flex")


@pytest.mark.parametrize("case", CASES | CAPPED)
@pytest.mark.parametrize(("T", "K"), [(256, 64), (1024, 128)])
def test_rows_of_flex_are_those_of_dense_logits_in_float64(case, T, K):
    leaves, (q, k, _), options = prepared(T, K, torch.bfloat16, case)
    _, rows = attended(leaves, T, "flex", **options)
    logits = SCALE * q @ k.repeat_interleave(H // k.shape[1], dim=1).transpose(-1, -2)
    hidden = ~kernels.visible_keys(T, q.device, options.get("window", 0), options["documents"])
    cap = options.get("softcap")
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    assert float(logits.abs().max()) < 5 * (cap or 10)
    for ours, exact in (
        (rows.max_BHT, logits.masked_fill(hidden, -torch.inf).amax(-1)),
        (rows.lse_BHT, capped.masked_fill(hidden, -torch.inf).logsumexp(-1)),
    ):
        assert ours.dtype == torch.float32 and not ours.requires_grad
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=5e-3)
    assert (rows.lse_BHT.double() - logits.logsumexp(-1)).abs().max() > 0.1  # without the mask


def test_compiled_blocks_with_flex_train_like_math():
    """With RMS norms of unit gain the standard deviation of the logits is about 1, so a cap of 1 affects them."""
    config = ModelConfig(
        vocab_sizes=BLOCKS, d_model=128, n_layers=3, n_heads=2, n_kv_heads=1, qk_norm=QKNormConfig("rms"), window=64,
        global_every=2, attn_softcap=1.0,
    )  # fmt: skip
    ids_BT, document_BT = ids_of(B, 256).to(DEVICE), documents(256)

    def step(model, document_BT, rows=None):
        out = model(ids_BT, document_BT=document_BT, row_stats=rows)
        return [out.detach(), *torch.autograd.grad(out.logsumexp(-1).sum(), list(model.parameters()))]

    def dense(document_BT=document_BT, **changes):
        return step(EarlyFusionTransformer(replace(config, **changes), "math").to(DEVICE), document_BT)

    model, rows = EarlyFusionTransformer(config, "flex").to(DEVICE), []
    compile_blocks(model)
    with torch.inference_mode():  # training must work after a validation in this mode
        model(ids_BT)
    with torch.autocast(DEVICE, torch.bfloat16):
        model(ids_BT)
        ours = step(model, document_BT, rows)
    assert len(rows) == config.n_layers and all(x.isfinite().all() for row in rows for x in row)
    tolerance = 0.08  # for bf16 compared with fp32; dense attention in bf16 has an error of 0.02
    assert furthest(ours, dense()) < tolerance
    for other in (dense(attn_softcap=None), dense(window=0), dense(document_BT=None)):
        assert furthest(ours[:1], other[:1]) > 2 * tolerance
        assert furthest(ours[1:], other[1:]) > 2 * tolerance


NAMED = [
    ("sdpa", "_scaled_dot_product_flash_attention"),
    ("sdpa_flash", "_scaled_dot_product_flash_attention"),
    ("sdpa_efficient", "_scaled_dot_product_efficient_attention"),
    ("sdpa_cudnn", "_scaled_dot_product_cudnn_attention"),
]


def sdpa_kernels(run):
    """Return the attention kernels that `run` calls; those of the backward pass end in `_backward`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    ran = {event.key.removeprefix("aten::") for event in profile.key_averages()}
    return {name for name in ran if name.startswith("_scaled_dot_product")}


@pytest.mark.parametrize(("backend", "kernel"), NAMED)
def test_the_kernel_that_is_named_runs_in_compiled_blocks(backend, kernel):
    """Compiled graphs keep the choice of the kernel. Without this choice, a Hopper GPU may use cuDNN's kernel."""
    config = ModelConfig(vocab_sizes=BLOCKS, d_model=128, n_layers=2, n_heads=2)
    other = "sdpa_efficient" if "flash" in kernel else "sdpa_flash"
    ids_BT, found = ids_of(B, 256).to(DEVICE), []
    for name in (backend, other):
        model = EarlyFusionTransformer(config, name).to(DEVICE)
        compile_blocks(model)

        def step(model=model):
            with torch.autocast(DEVICE, torch.bfloat16):
                out = model(ids_BT)
            out.logsumexp(-1).sum().backward()

        step()  # compiles the model
        found.append(sdpa_kernels(step))
    assert found[0] == {kernel, f"{kernel}_backward"}
    assert not found[0] & found[1] and len(found[1]) == 2  # the control: another backend runs another kernel


def test_flex_is_fused_outside_of_compiled_blocks():
    """No T x T tensor is allocated: for 16,384 tokens, the logits alone would take 4 GiB in fp32."""
    leaves = [x[:1, :1] for x in qkv(128, 64, torch.bfloat16)]
    q, k, v = (x.repeat(1, 4, 128, 1).detach().requires_grad_() for x in leaves)
    mask = kernels.flex_mask(16384, torch.device(DEVICE))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = kernels.attention(q, k, v, mask, scale=SCALE, backend="flex")
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
