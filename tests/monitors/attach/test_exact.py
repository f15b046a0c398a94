"""Compares the statistics of `attach` with brute force in float64, on third-party models."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.monitors import attach, probe
from tests.monitors import brute_force
from tests.monitors.attach.nets import H, Net, V, alibi, batches

NAMES = ("text", "image")
IMAGE = {"image": range(10, 25)}  # text ids are below and above this range
WEIGHTS = ("attn_entropy", "attn_mass", "attn_rank")
SIZES = {"text": V - 15, "image": 15}


def modality_of(ids) -> np.ndarray:
    ids = ids.numpy()
    return ((ids >= 10) & (ids < 25)).astype(int)


def norms(q, k, modality, layer, valid=None, names=NAMES) -> dict[str, float]:
    valid = np.ones(modality.shape, bool) if valid is None else valid
    return brute_force.streams({("q", layer): q, ("k", layer): k}, modality, valid, names)


def output_of(logits, modality, trained, names=NAMES) -> dict[str, float]:
    if len(names) == 1:
        return brute_force.output(logits, modality, trained, {names[0]: V})
    order = [*range(10), *range(25, V), *range(10, 25)]
    return brute_force.output(logits[..., order], np.roll(modality, -1, 1), trained, SIZES)


def same(values: dict[str, float], expected: dict[str, float], **approx: float) -> bool:
    return all(values.get(name) == pytest.approx(x, **({"rel": 2e-4, "abs": 1e-5} | approx))
               for name, x in expected.items())  # fmt: skip


def causal(b, t, s):
    return s <= t


def expected_of(net: Net, ids, scale, sees=causal, bias=None, names=NAMES) -> dict[str, float]:
    """Return the expected statistics of a `Net`, from the q and k that its attention records."""
    modality, values = modality_of(ids) * (len(names) - 1), {}
    twin = Net([layer.attention.call for layer in net.layers], kv_heads=net.layers[0].attention.kv_heads)
    twin.load_state_dict(net.state_dict())
    for layer in twin.layers:
        layer.attention.keep = []
    with torch.no_grad():  # flex_attention has no backward on a CPU
        logits = twin(ids).double().numpy()
    for n, layer in enumerate(twin.layers):
        q, k = (x.double().numpy() for x in layer.attention.keep[0])
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        values |= norms(q, k, modality, n, names=names)
        if bias is None:
            values |= brute_force.attention(q, k, scale, modality, sees, names, n)
            continue
        # Write a dot product plus a bias as a dot product of longer vectors.
        eye = np.broadcast_to(np.eye(q.shape[2]), (*q.shape[:3], q.shape[2]))
        turned = np.broadcast_to(bias.numpy().swapaxes(-1, -2), eye.shape)
        longer_q, longer_k = np.concatenate([scale * q, eye], -1), np.concatenate([k, turned], -1)
        of_weights = brute_force.attention(longer_q, longer_k, 1.0, modality, sees, names, n)
        values |= brute_force.attention(q, k, scale, modality, sees, names, n, softmax=False)
        values |= {name: x for name, x in of_weights.items() if name.startswith(WEIGHTS)}
    trained = np.ones(modality.shape, bool)
    trained[:, -1] = False
    return values | output_of(logits, modality, trained, names)


CALLS = {
    "causal": ("sdpa", {}, 0.5, causal, None),
    "shared heads": ("sdpa", {"kv_heads": 2}, 0.5, causal, None),
    "full": ("full", {}, 8**-0.5, lambda b, t, s: True, None),
    "three axes": ("flat", {}, 8**-0.5, causal, None),
    "bias": ("alibi", {}, 8**-0.5, causal, alibi(16)),
    "flex, shared heads": ("flex", {"kv_heads": 2}, 8**-0.5, causal, alibi(16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_model_equals_brute_force(name):
    call, options, scale, sees, bias = CALLS[name]
    net, (ids,) = Net([call] * 2, **options), batches(1, B=3)
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    expected = expected_of(net, ids, scale, sees, bias)
    if name == "full":  # its outputs do not predict the next token, which every token sees
        expected = {tag: x for tag, x in expected.items() if not tag.startswith("out_")}
    else:
        assert any(tag.startswith("out_") for tag in measured)
    assert same(measured, expected)
    added = ("attn_out_", "mlp_out_", "resid_")  # test_stream.py compares these
    compared = {t for t in measured if not t.startswith(("v_norm", "probe_", "q_norm_max", "k_norm_max", *added))}
    assert compared <= expected.keys()
    # Controls: with another scale, with other image ids, or without the bias, the comparison fails.
    assert not same(measured, expected_of(net, ids, 2 * scale, sees, bias))
    assert not same(attach(net, modality={"image": range(10, 20)}).probe(ids=ids).flat(), expected)
    if bias is not None:
        assert not same(measured, expected_of(net, ids, scale, sees))


def test_a_model_whose_ids_are_all_text_has_one_modality():
    net, (ids,) = Net(["sdpa"] * 2), batches(1, B=3)
    measured = attach(net, modality={}).probe(ids=ids).flat()
    expected = expected_of(net, ids, 0.5, names=("text",))
    assert same(measured, expected) and any(tag.startswith("out_") for tag in expected)
    assert not any("image" in tag for tag in measured)
    assert not same(attach(net, modality=IMAGE).probe(ids=ids).flat(), expected)


def test_masks_of_each_sequence_are_those_of_the_call():
    (ids,) = batches(1, B=3)
    document = torch.arange(16)[None] // torch.tensor([4, 8, 16])[:, None]
    mask = (document[:, :, None] == document[:, None, :])[:, None].tril()

    def sees(b, t, s):
        return s <= t and document[b, t] == document[b, s]

    class Masked(Net):
        def forward(self, ids):
            return super().forward(ids, mask)

    net = Masked(["sdpa"] * 2)
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    modality = modality_of(ids)
    for layer in net.layers:
        layer.attention.keep = []
    net(ids)
    for n, layer in enumerate(net.layers):
        q, k = (x.double().numpy() for x in layer.attention.keep[0])
        assert same(measured, brute_force.attention(q, k, 0.5, modality, sees, NAMES, n))
        assert not same(measured, brute_force.attention(q, k, 0.5, modality, causal, NAMES, n))


@pytest.mark.parametrize("call", ["torch", "torch weights"])
def test_pytorchs_own_module_is_seen_as_a_plain_call_is(call):
    net, (ids,) = Net([call] * 2), batches(1, B=3)
    plain = Net(["flat"] * 2)
    plain.load_state_dict(net.state_dict(), strict=False)
    for layer, torch_layer in zip(plain.layers, net.layers, strict=True):
        inner = torch_layer.attention.inner
        weight, bias = inner.in_proj_weight.chunk(3), inner.in_proj_bias.chunk(3)
        for part, w, b in zip((layer.attention.q, layer.attention.k, layer.attention.v), weight, bias, strict=True):
            part.weight.data, part.bias.data = w.data, b.data
        layer.attention.out.load_state_dict(torch_layer.attention.inner.out_proj.state_dict())
    measured = attach(net, modality=IMAGE).probe(ids=ids).flat()
    assert same(attach(plain, modality=IMAGE).probe(ids=ids).flat(), measured)
    assert "attn_entropy/image/layer01" in measured


HUGGING_FACE = {
    "llama": ("llama", "LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}, None, 0),
    "chameleon": ("chameleon", "ChameleonForConditionalGeneration", "ChameleonConfig", {}, None, 0),
    "gemma 2": ("gemma2", "Gemma2ForCausalLM", "Gemma2Config",
                {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 10,
                 "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, 2.0, 10),
}  # fmt: skip


def hugging_face(family: str, model: str, config: str, options: dict, layers: int = 2):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    if family == "chameleon":
        size |= {"vq_config": {"num_embeddings": 15, "embed_dim": 8, "base_channels": 32, "channel_multiplier": [1],
                               "num_res_blocks": 1, "resolution": 8, "latent_channels": 8},
                 "vocabulary_map": {"<image>": 3, **{f"IMGIMG{'ABCDEFGHIJKLMNO'[i]}Z": 10 + i
                                                     for i in range(15)}}}  # fmt: skip
    built = getattr(transformers, model)(getattr(transformers, config)(**size | options, attn_implementation="eager"))
    with torch.no_grad():
        for name, p in built.named_parameters():
            p.mul_(8 if "_proj" in name else 1)
            if p.ndim < 2 or "norm" in name:
                p.add_(0.3 * torch.randn(p.shape))
    return built.eval()


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_hugging_face_model_equals_brute_force(name, monkeypatch):
    family, model, config, options, cap, window = HUGGING_FACE[name]
    built = hugging_face(family, model, config, options)
    (ids,) = batches(1, B=3, T=20)
    valid = torch.ones_like(ids)
    valid[-1, -5:] = 0
    measured = attach(built, modality=IMAGE).probe(input_ids=ids, attention_mask=valid).flat()
    # Chameleon's forward hides the logits of image ids.
    assert any(tag.startswith("out_") for tag in measured) == (family != "chameleon")

    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    dense, recorded = file.eager_attention_forward, []

    def keeping(module, query, key, value, mask, **options):
        recorded.append((query.detach().numpy(), key.detach().numpy(), options["scaling"]))
        return dense(module, query, key, value, mask, **options)

    monkeypatch.setattr(file, "eager_attention_forward", keeping)
    logits = built.double()(input_ids=ids, attention_mask=valid).logits.detach().numpy()
    modality, valid_mask = modality_of(ids), valid.bool().numpy()
    expected = {}
    for layer, (q, k, scale) in enumerate(recorded):
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        near = window if layer % 2 == 0 and window else 20  # Gemma 2's even layers have a window

        def sees(b, t, s, near=near):
            return t - near < s <= t

        expected |= norms(q, k, modality, layer, valid_mask)
        expected |= brute_force.attention(q, k, scale, modality, sees, NAMES, layer, cap, valid=valid_mask)
    if family != "chameleon":  # Chameleon sets the logits of image ids to the smallest number of the dtype
        trained = valid_mask & np.roll(valid_mask, -1, 1)
        trained[:, -1] = False
        expected |= output_of(logits, modality, trained)
    assert len(recorded) == 2 and same(measured, expected)
    assert not same(measured, brute_force.attention(q, k, scale, modality, causal, NAMES, 0, cap, valid=valid_mask))


# Gemma 2 has a softcap, which sdpa has not.
INTERFACES = [("llama", "sdpa"), ("gemma 2", "flex_attention"), ("gemma 2", "flash_attention_2")]


@pytest.mark.parametrize(("name", "kind"), INTERFACES)
def test_every_interface_of_transformers_says_the_same(name, kind):
    """The probe replaces the flash-attention kernel by dense attention in fp32."""
    built = hugging_face(*HUGGING_FACE[name][:4])
    (ids,) = batches(1, B=3, T=20)
    valid = torch.ones_like(ids)
    valid[-1, -5:] = 0
    watch = attach(built, modality=IMAGE)
    dense = watch.probe(input_ids=ids, attention_mask=valid).flat()
    built.config._attn_implementation = kind
    measured = watch.probe(input_ids=ids, attention_mask=valid).flat()
    assert measured.keys() == dense.keys() and same(measured, dense, rel=1e-3)
    assert not same(watch.probe(input_ids=ids).flat(), dense, rel=1e-3)


DENSE_ONLY = [{"attn_softcap": 0.5}, {"attn_sink": True}, {"attention": "sigmoid"}]
OWN = [{}, {"n_kv_heads": 1, "qk_norm": QKNormConfig("rms"), "window": 9}]


@pytest.mark.parametrize(
    ("changes", "backend"), [*((x, "sdpa") for x in OWN), *((x, "math") for x in (*OWN, *DENSE_ONLY))]
)
def test_our_own_model_attached_says_what_its_probe_says(changes, backend):
    config = ModelConfig(vocab_sizes={"text": 30, "image": 12}, d_model=16, n_layers=2, n_heads=2, **changes)
    model = EarlyFusionTransformer(config, backend=backend)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 42, (3, 24), generator=random)
    seen = torch.ones_like(ids, dtype=torch.bool)
    target_mask = seen.clone()
    target_mask[:, -1] = False
    expected_values = probe(model, TokenBatch(ids, (ids >= 30).long(), target_mask, seen, torch.tensor(1.0))).flat()
    watch = attach(model, modality={"image": range(30, 42)})
    measured = watch.probe(ids_BT=ids).flat()
    shared = measured.keys() - {"probe_sequences"}
    assert (
        shared <= expected_values.keys()
        and {name for name in expected_values if name.startswith(("attn_logit_m", "attn_e"))} <= shared
    )
    assert same(expected_values, {name: measured[name] for name in shared})
    other = TokenBatch(ids, (ids >= 29).long(), target_mask, seen, torch.tensor(1.0))
    assert not same(probe(model, other).flat(), {name: measured[name] for name in shared})


@pytest.mark.parametrize("names", [("upper", "lower"), ("patch",)])
def test_a_function_gives_the_modality_and_a_vision_transformer_is_seen_with_its_adapter(names):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=32, num_heads=4, num_classes=5)
    images = torch.randn(2, 3, 64, 64)

    # The class token has no modality; each half of the image, or the whole image, is a modality.
    numbers = [-1] + [0] * 8 + [len(names) - 1] * 8
    watch = attach(model, modality=lambda inputs: torch.tensor(numbers).expand(len(inputs["x"]), -1), names=names)
    measured = watch.probe(x=images).flat()
    recorded = {}
    model.eval()
    model.blocks[3].attn.qkv.register_forward_hook(lambda m, x, out: recorded.update(qkv=out, x=x[0]))
    model.blocks[3].register_forward_hook(lambda m, x, out: recorded.update(resid=out))
    model(images)
    q, k, _ = recorded["qkv"].detach().double().unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).numpy()
    modality = np.broadcast_to(numbers, (2, 17))
    sites = {("q", 3): q, ("k", 3): k, ("q_raw", 3): q, ("k_raw", 3): k}
    sites |= {("attn_in", 3): recorded["x"].detach().numpy(), ("resid", 3): recorded["resid"].detach().numpy()}
    expected = brute_force.streams(sites, modality, np.ones((2, 17), bool), names)
    assert len(expected) == 14 * len(names) and same(measured, expected)
    both = brute_force.attention(q[:, :, 1:], k[:, :, 1:], 8**-0.5, modality[:, 1:], lambda b, t, s: True, names, 3)
    logits = {name: x for name, x in both.items() if name.startswith(("attn_logit_m", "attn_logit_a")) and "-" in name}
    assert len(logits) == 2 * len(names) ** 2 and same(measured, logits)
    assert watch.layers.total == len(watch.layers.numbers) == 4 and watch.layers.hidden == [] and H == 4
