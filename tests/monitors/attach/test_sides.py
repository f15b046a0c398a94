"""Tests that `attach` traces the queries and keys of an attention call back to the input that they come from, even if
two inputs have the same length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mmqk import distributed
from mmqk.monitors import attach, collect
from mmqk.monitors.foreign import measurement
from mmqk.monitors.foreign import probe as foreign_probe
from mmqk.monitors.foreign.output import summary_parts
from tests.monitors.attach.nets import D, Layer, Net, SelfAttention, V, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, modality_of, same

LAYERS = 3


def random_(model):
    """Set random weights, so large that attention is not uniform, and return the model."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    return model.eval()


def t5():
    t = pytest.importorskip("transformers")
    if not hasattr(t.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 of this transformers multiplies the matrices itself, so attach cannot measure its attention")
    config = t.T5Config(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=4, decoder_start_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return random_(t.T5ForConditionalGeneration(config))


def bart():
    t = pytest.importorskip("transformers")
    config = t.BartConfig(
        vocab_size=V, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=LAYERS,
        decoder_layers=LAYERS, encoder_attention_heads=4, decoder_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    return random_(t.BartForConditionalGeneration(config))


def of_weights(weights, of_q, of_k, q_names, k_names, cross="", sink=False) -> dict[str, float]:
    """Return entropy and mass by tag, from attention weights by layer, over rows that see at least 8 keys. With a
    sink, its weight is what the weights of a row lack to sum to 1."""
    measured = {}
    for layer, p_BHTS in weights.items():
        p = p_BHTS.detach().double().numpy()
        seen = (p > 0).sum(-1) >= 8
        rest = np.maximum(1 - p.sum(-1), 1e-30) if sink else np.ones(seen.shape)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1) - rest * np.log(rest)
        for a, q_name in enumerate(q_names):
            rows = seen & (of_q == a)[:, None]
            if sink:
                measured[f"sink_mass/{q_name}/layer{layer:02d}"] = rest[rows].mean()
            measured[f"{cross}attn_entropy/{q_name}/layer{layer:02d}"] = entropy[rows].mean()
            for b, k_name in enumerate(k_names):
                mass = (p * (of_k == b)[:, None, None]).sum(-1)
                measured[f"{cross}attn_mass/{q_name}-{k_name}/layer{layer:02d}"] = mass[rows].mean()
    return measured


def summary(watch) -> str:
    return " · ".join(summary_parts(watch.prober, {}, 0.1, [1.0], 100))


def layers_in(measured) -> set[str]:
    return {name.rpartition("/")[2] for name in measured if "/layer" in name}


@pytest.mark.parametrize("build", [t5, bart])
def test_a_decoder_as_long_as_its_encoder_is_not_counted_with_it(build):
    model, (ids, other) = build(), batches(2, B=3)
    decoder = {"labels": other} if build is t5 else {"decoder_input_ids": other}
    watch = attach(model, modality=IMAGE)
    measured = watch.probe(input_ids=ids, **decoder).flat()
    outputs = model(input_ids=ids, output_attentions=True, **decoder)
    modality = modality_of(ids)

    def expected(weights):
        return of_weights(dict(enumerate(weights)), modality, modality, NAMES, NAMES)

    assert same(measured, expected(outputs.encoder_attentions))
    assert not same(measured, expected(outputs.decoder_attentions)) and not same(
        measured, expected(outputs.cross_attentions)
    )
    assert watch.layers.numbers == list(range(LAYERS)) == list(range(watch.layers.total))
    assert layers_in(measured) == {f"layer{n:02d}" for n in range(LAYERS)}
    # The output softmax belongs to the decoder, so it is not measured.
    assert not any(name.startswith(("out_", "cross_")) for name in measured)
    source, line = next(iter(decoder)), summary(watch)
    assert f"not measured (attention over the tokens of {source}; modality describes input_ids)" in line
    assert f"not measured (cross-attention from {source} to input_ids; declare the other input with sides=)" in line


@pytest.mark.parametrize(("build", "S"), [(t5, 11), (bart, 16)])
def test_a_declared_side_and_cross_attention_are_measured_under_their_own_names(build, S):
    model, (ids,), (other,) = build(), batches(1, B=3, T=S), batches(1, B=3, seed=2)
    source = "labels" if build is t5 else "decoder_input_ids"
    watch = attach(model, modality=IMAGE, sides={"decoder": (source, IMAGE)})
    attention_mask_BS = torch.ones_like(ids)
    attention_mask_BS[-1, -2:] = 0
    measured = watch.probe(input_ids=ids, attention_mask=attention_mask_BS, **{source: other}).flat()
    outputs = model(input_ids=ids, attention_mask=attention_mask_BS, output_attentions=True, **{source: other})
    # T5 shifts its labels to the right by one.
    taken = model._shift_right(other) if build is t5 else other
    names = tuple(f"decoder_{name}" for name in NAMES)

    def expected(of_decoder):
        of_encoder = np.where(attention_mask_BS.numpy() > 0, modality_of(ids), -1)
        by_layer = {n + LAYERS: x for n, x in enumerate(outputs.decoder_attentions)}
        crossed = {n + LAYERS: x for n, x in enumerate(outputs.cross_attentions)}
        return (
            of_weights(dict(enumerate(outputs.encoder_attentions)), of_encoder, of_encoder, NAMES, NAMES)
            | of_weights(by_layer, of_decoder, of_decoder, names, names)
            | of_weights(crossed, of_decoder, of_encoder, names, NAMES, "cross_")
        )

    assert same(measured, expected(modality_of(taken)))
    assert not same(measured, expected(modality_of(taken.roll(1, 1))))  # control
    line = summary(watch)
    assert "not measured" not in line and watch.layers.numbers == list(range(2 * LAYERS))
    # In cross-attention all queries come from the decoder and all keys from the encoder.
    crossed = {name for name in measured if name.startswith("cross_")}
    assert {name.split("/")[1] for name in crossed if name.startswith("cross_q_")} == set(names)
    assert {name.split("/")[1] for name in crossed if name.startswith(("cross_k_", "cross_v_"))} == set(NAMES)
    assert not any(np.isnan(measured[name]) for name in crossed)


def test_norms_and_logits_of_cross_attention_equal_the_projections():
    model, (ids, other), projections = bart(), batches(2, B=3), {}
    for name in ("q_proj", "k_proj"):
        module = model.model.decoder.layers[1].encoder_attn.get_submodule(name)
        module.register_forward_hook(
            lambda m, x, out, name=name: projections.update(
                {name: out.detach().double().unflatten(-1, (4, 8)).transpose(1, 2)}
            )
        )
    sides = {"decoder": "decoder_input_ids"}  # a side of one modality
    measured = attach(model, modality=IMAGE, sides=sides).probe(input_ids=ids, decoder_input_ids=other).flat()
    q, k, of_key = projections["q_proj"], projections["k_proj"], modality_of(ids)
    z_BHTS, layer = (q @ k.mT * 8**-0.5).numpy(), f"layer{LAYERS + 1:02d}"
    expected = {f"cross_q_norm/decoder/{layer}": q.norm(dim=-1).mean().item()}
    for m, name in enumerate(NAMES):
        outputs = np.broadcast_to((of_key == m)[:, None, None], z_BHTS.shape)
        expected[f"cross_attn_logit_max/decoder-{name}/{layer}"] = z_BHTS[outputs].max()
        expected[f"cross_attn_logit_absmax/decoder-{name}/{layer}"] = abs(z_BHTS[outputs]).max()
        expected[f"cross_k_norm/{name}/{layer}"] = np.linalg.norm(k.numpy(), axis=-1)[outputs[..., 0, :]].mean()
    assert same(measured, expected)
    assert not same(measured, {name.replace("cross_", ""): x for name, x in expected.items()})


class Unseen(torch.autograd.Function):
    """A function that a TorchFunctionMode does not intercept."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_tensors_made_out_of_sight_take_the_origin_of_their_module():
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return Unseen.apply(super().forward(x))

    net, (ids,) = Net(["sdpa"] * 2), batches(1)
    plain = attach(net, modality=IMAGE).probe(ids=ids).flat()
    for layer in net.layers:
        for name in ("norm1", "norm2"):
            norm = Norm(D)
            norm.load_state_dict(getattr(layer, name).state_dict())
            setattr(layer, name, norm)
    watch = attach(net, modality=IMAGE)
    assert watch.probe(ids=ids).flat() == plain and "not measured" not in summary(watch)


def test_streams_that_are_put_together_are_one_side():
    """Attention is not cross-attention if image embeddings precede or replace the embeddings of ids."""

    class Joined(Net):
        def __init__(self, before):
            super().__init__(["sdpa"] * 2)
            self.before = before

        def forward(self, ids, pixels):
            x = self.embed(ids)
            if self.before:
                x = torch.cat([pixels, x], 1)
            else:
                x[:, :4] = pixels
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    (ids,), pixels = batches(1, B=3), torch.randn(3, 4, D)

    def modality(inputs):
        of_ids = (inputs["ids"] >= 10).long()
        return torch.cat([torch.ones(len(of_ids), 4, dtype=torch.long), of_ids], 1)

    for before in (True, False):
        watch = attach(Joined(before), modality=modality if before else IMAGE)
        measured = watch.probe(ids=ids, pixels=pixels).flat()
        assert layers_in(measured) == {"layer00", "layer01"} and "not measured" not in summary(watch)


def test_a_function_that_gives_too_few_tokens_is_told_the_number():
    class Patches(Net):
        def forward(self, pixels):
            for layer in self.layers:
                pixels = layer(pixels)
            return pixels

    for tokens, words in ((9, "9 keys; modality describes 3 sequences of 8 tokens"), (8, "3 of 3 layers")):
        watch = attach(Patches(), modality=lambda inputs: torch.zeros(3, 8, dtype=torch.long))
        watch.probe(pixels=torch.randn(3, tokens, D))
        assert words in summary(watch)


@pytest.mark.parametrize("calls", [["sdpa", "sdpa"], ["sdpa", "by head"]])
def test_attention_over_other_tokens_is_not_summed_over_ranks(calls, monkeypatch):
    """Another rank may have no images and no such call, and would never join the sum."""

    class Tower(Net):
        def __init__(self):
            super().__init__(calls)
            self.tower = nn.ModuleList(Layer(SelfAttention("sdpa")) for _ in range(3))

        def forward(self, ids, pixels):
            x = self.embed(ids)
            for layer in self.tower:
                pixels = layer(pixels)
            for layer in self.layers:
                x = layer(x + pixels.mean(1, keepdim=True))
            return self.head(x)

    model, (ids,), sums, agreements = Tower(), batches(1, B=3), [], []
    watch = attach(model, modality=IMAGE)
    pixels = torch.randn(3, 9, D)
    alone = watch.probe(ids=ids, pixels=pixels).flat()
    for module in (foreign_probe, measurement, distributed):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    kept = {torch.long: sums, torch.float: agreements}  # counts of pairs, and flags
    monkeypatch.setattr(measurement, "summed", lambda x: kept[x.dtype].append(x) or x)
    monkeypatch.setattr(collect.Statistics, "merged", lambda statistics: statistics)
    assert watch.probe(ids=ids, pixels=pixels).flat() == alone
    assert sum(call.other_tokens for call in watch.prober.records) == 3
    # The ranks agree before the forward, before the statistics of the output and before they are merged, and at each
    # layer, also the one whose mask differs between heads. They sum the pairs of each measured layer.
    assert len(agreements) == 3 + len(calls) and len(sums) == len(watch.layers.numbers) == calls.count("sdpa")
