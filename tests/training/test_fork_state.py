"""The training state of a fork: moments, schedule, callbacks, and the sequences that it leaves out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mmqk.config import OptimConfig, resolve
from mmqk.data.order import sequence_numbers
from mmqk.model import EarlyFusionTransformer
from mmqk.store import AlarmRules, DivergenceRule, UserError
from mmqk.train import main
from mmqk.training.fork import callback_state, optimizer_state
from mmqk.training.fork.measure import Change
from mmqk.training.fork.weights import Carried
from mmqk.training.optimizers import make_optimizer
from tests.tiny import data_of
from tests.training.batches import recorded
from tests.training.runs import LAST, checkpoint, command, rewind, same_run
from tests.training.toy import MODEL, module_of, toy_batch

NEAR = Change(0.0, {"text": (2.0, 2.05), "image": (3.0, 3.0)})
FAR = Change(0.5, {"text": (2.0, 2.9), "image": (3.0, 3.0)})


def stepped(config: OptimConfig, scale: float = 1.0) -> tuple[EarlyFusionTransformer, torch.optim.Optimizer]:
    """Return a model after three steps with random gradients, and its optimizer."""
    model = EarlyFusionTransformer(MODEL, "math")
    optimizer = make_optimizer(config, model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in model.parameters():
            p.grad = scale * torch.randn(p.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def carried(model: EarlyFusionTransformer, **scale: torch.Tensor) -> Carried:
    names = [name for name, _ in model.named_parameters()]
    return Carried(from_name=dict(zip(names, names, strict=True)), scale=scale)


def named_state(config: OptimConfig, model, state: dict) -> dict[str, dict]:
    """Load an optimizer state with torch and return the state of each parameter by name."""
    optimizer = make_optimizer(config, model)
    optimizer.load_state_dict(state)
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def test_moments_follow_their_parameter_into_another_group():
    """Embeddings that do not decay are in the other parameter group, which changes the order of the parameters."""
    config, other = OptimConfig(), OptimConfig(decay_embeddings=False, beta2=0.99, eps=1e-5)
    model, optimizer = stepped(config)
    state, said = optimizer_state(
        optimizer.state_dict(), (config, model, ["text"]), (other, model, ["text"]), carried(model), lr=0.5
    )
    assert said == "carried over"
    found = named_state(other, model, state)
    for name, p in model.named_parameters():
        assert torch.equal(found[name]["exp_avg"], optimizer.state[p]["exp_avg"])
        assert torch.equal(found[name]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    assert {(g["lr"], g["initial_lr"], g["betas"], g["eps"]) for g in state["param_groups"]} == {
        (0.5, other.lr, (0.9, 0.99), 1e-5)
    }


@pytest.mark.parametrize("config", [OptimConfig(), OptimConfig(matrices="muon")], ids=["adamw", "muon"])
def test_moments_of_a_scaled_matrix_are_those_of_gradients_scaled_the_other_way(config):
    """A matrix 4 times as large has a quarter of the gradient."""
    model, optimizer = stepped(config)
    _, expected = stepped(config, scale=0.25)
    scaled = "blocks.0.attention.w_q.weight"
    state, said = optimizer_state(
        optimizer.state_dict(), (config, model, ["text"]), (config, model, ["text"]),
        carried(model, **{scaled: torch.tensor(4.0)}), lr=0.5,
    )  # fmt: skip
    assert "rescaled for 1" in said
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    found, theirs, before = ({name: own["state"][i] for i, name in enumerate(order)}
                             for own in (state, expected.state_dict(), optimizer.state_dict()))  # fmt: skip
    moments = found[scaled].keys() - {"step"}
    assert moments == ({"momentum_buffer"} if config.matrices == "muon" else {"exp_avg", "exp_avg_sq"})
    for moment in moments:
        torch.testing.assert_close(found[scaled][moment], theirs[scaled][moment])
    for other in set(order) - {scaled}:
        assert all(torch.equal(found[other][key], before[other][key]) for key in before[other])


def split_states(trained_before, trained_after, split_before=True, split_after=True):
    before, after = (OptimConfig(split_second_moment=s) for s in (split_before, split_after))
    module = module_of(MODEL, split_second_moment=split_before)
    model, optimizer = module.model.float(), make_optimizer(before, module.model.float())
    for seed in range(3):
        batch = toy_batch(seed)
        logits_BTV = model(batch.ids_BT)
        losses = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="none"
        ).view_as(batch.ids_BT)
        parts = [(losses * batch.target_mask_BT * (batch.target_modality_BT == m)).sum() for m in (0, 1)]
        optimizer.zero_grad()
        if split_before:
            optimizer.backward([parts[("text", "image").index(name)] for name in trained_before])
        else:
            sum(parts).backward()
        optimizer.step()
    state, said = optimizer_state(
        optimizer.state_dict(), (before, model, trained_before), (after, model, trained_after), carried(model), 1e-3
    )
    return model, optimizer, named_state(after, model, state), said


def test_from_shared_moments_the_next_step_is_the_same_without_a_new_gradient():
    model, optimizer, found, said = split_states(["text", "image"], ["text", "image"], split_before=False)
    assert "split among" in said
    for name, p in model.named_parameters():
        own, shared = found[name], optimizer.state[p]
        step = (own["exp_avg"] / (own["exp_avg_sq"].sqrt() + 1e-8)).sum(0)
        torch.testing.assert_close(step, shared["exp_avg"] / (shared["exp_avg_sq"].sqrt() + 1e-8))
        assert own["step"] == 3


def test_back_to_shared_moments_first_moments_are_exact():
    """First moments are linear in the gradients, so their sum over modalities is the first moment of the sum."""
    model, optimizer, found, said = split_states(["text", "image"], [], split_after=False)
    assert "summed, as for uncorrelated" in said
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name]["exp_avg"], optimizer.state[p]["exp_avg"].sum(0))
        assert torch.equal(found[name]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"].sum(0))


def test_a_modality_that_is_trained_from_the_fork_on_starts_at_zero():
    model, optimizer, found, _ = split_states(["image"], ["text", "image"])
    for name, p in model.named_parameters():
        assert torch.equal(found[name]["exp_avg"][1], optimizer.state[p]["exp_avg"][0])
        assert float(found[name]["exp_avg"][0].abs().max()) == 0


# State of the callbacks -----------------------------------------------------------------------------------


def parents_callbacks(steps: int = 200) -> dict:
    """Return the callback states of a run whose losses fell from 7 to 3 nats."""
    rule, rules = DivergenceRule(0), AlarmRules(0, 400)
    for step in range(1, steps + 1):
        losses = {m: 3 + 4 * 0.9**step for m in ("text", "image")}
        rule.reason(step, losses)
        rules.update(step, {f"loss/{m}": v for m, v in losses.items()} | {"val_unigram/text": 6.0})
    return {
        "StepLog": rule.state_dict(),
        "Alarms": {"rules": rules.state_dict(), "probe_until": -1},
        "RunMonitor": {"window": 1},
    }


def diverges_at(state: dict, loss: float, steps: int = 60) -> int | None:
    rule = DivergenceRule(0)
    rule.load_state_dict(state)
    for step in range(201, 201 + steps):
        if rule.reason(step, {"text": loss, "image": 3.0}) is not None:
            return step
    return None


def test_divergence_is_judged_by_the_parents_best_loss():
    saved = parents_callbacks()
    kept = callback_state(saved, ["optim.lr", "model.qk_norm.kind"], NEAR)
    assert kept["StepLog"] == saved["StepLog"]
    assert diverges_at(kept["StepLog"], 3.7) is not None
    assert diverges_at({}, 3.7) is None  # the control: a rule without the parent's losses detects no rise


def test_a_rise_that_the_change_itself_makes_is_no_divergence():
    saved = parents_callbacks()
    kept = callback_state(saved, ["model.qk_norm.kind"], FAR)
    assert diverges_at(kept["StepLog"], 3.7) is None
    assert diverges_at(kept["StepLog"], 7.2) is not None  # the loss at initialization is still a limit
    assert kept["StepLog"]["image"] == saved["StepLog"]["image"]
    assert callback_state(saved, [], NEAR)["StepLog"] == saved["StepLog"]


@pytest.mark.parametrize(
    ("changed", "alarms", "window"),
    [([], True, True), (["trainer.max_steps"], True, True), (["optim.lr"], True, False),
     (["model.post_norm"], False, False), (["data.mix.text"], False, False),
     (["data.val_every_n_steps", "data.batch_size"], True, False),
     (["fork_noise"], True, False)],
)  # fmt: skip
def test_what_alarms_and_the_budget_remember(changed, alarms, window):
    saved = parents_callbacks()
    kept = callback_state(saved, changed, NEAR)
    forgotten = [series["best"] is None and series["window"] == [] for series in kept["StepLog"].values()]
    assert forgotten == ["data.mix.text" in changed] * 2
    rules = AlarmRules(0, 400)
    rules.load_state_dict(kept["Alarms"]["rules"])
    assert bool(kept["Alarms"]["rules"]["rules"]["spike"]) is alarms
    assert kept["Alarms"]["rules"]["unigram"] == {"text": 6.0}
    assert ("RunMonitor" in kept) is window


# Sequences that a fork leaves out ---------------------------------------------------------------------------


STEP, SIZE = 8, 4
FIRST = STEP * SIZE


@pytest.fixture(scope="module")
def order(whole):
    return data_of(command(whole)).order


def without(order, left_out: set[int], start: int = FIRST, size: int = SIZE) -> dict[int, list[list[int]]]:
    """Return the batches of steps 9 to 12, from a plain walk along the order."""
    numbers = iter(n for n in range(start, start + 200) if n not in left_out)
    return {s: [order.row(next(numbers)).ids.tolist() for _ in range(size)] for s in range(STEP + 1, LAST + 1)}


def test_numbers_equal_a_walk_along_the_order():
    for seed in range(50):
        random = np.random.default_rng(seed)
        left_out = sorted(random.choice(60, int(random.integers(0, 30)), replace=False).tolist())
        walk = [n for n in range(200) if n not in left_out][:100]
        assert sequence_numbers(np.arange(100), left_out).tolist() == walk


@pytest.mark.parametrize(
    ("given", "left_out", "fields"),
    [
        ("33,34,41", {33, 34, 41}, ()),
        ("[32, 38-40]", {32, 38, 39, 40}, ("--trainer.accumulate_grad_batches=2",)),
        ("47,33", {33, 47}, ("--data.workers=1", "--fork_noise=1e-3", "--model.qk_norm.kind=rms")),
    ],
)
def test_a_fork_reads_the_order_without_them(whole, order, tmp_path, monkeypatch, given, left_out, fields):
    args = [f"--fork={checkpoint(whole, STEP)}", f"--fork_skip={given}", "--checkpoint.every_n_steps=2", *fields]
    batches = recorded(monkeypatch, args, tmp_path / "fork")
    assert batches == without(order, left_out)
    assert batches != without(order, {n + 1 for n in left_out})  # the control
    # After a resume too.
    rewind(tmp_path / "fork", tmp_path / "again", 10)
    again = recorded(monkeypatch, args, tmp_path / "again")
    assert again == {step: batches[step] for step in (11, 12)} and same_run(tmp_path / "again", tmp_path / "fork")


def test_with_batches_left_out_and_a_fork_of_the_fork(whole, order, tmp_path, monkeypatch):
    """The fork of a fork leaves out what its parent leaves out, and more; ``fork_skip_batches`` counts the others."""
    one = [f"--fork={checkpoint(whole, STEP)}", "--fork_skip=33,45", "--checkpoint.every_n_steps=2",
           "--fork_skip_batches=1"]  # fmt: skip
    assert recorded(monkeypatch, one, tmp_path / "one") == without(order, {32, 33, 34, 35, 36, 45})
    two = [f"--fork={checkpoint(tmp_path / 'one', 10)}", "--fork_skip=46", "--data.batch_size=2"]
    batches = recorded(monkeypatch, two, tmp_path / "two")
    record, parent = (json.loads((tmp_path / name).read_text()) for name in ("two/fork.json", "one/run.json"))
    assert record["skip"] == [46] and record["parent"]["id"] == parent["id"]
    # Steps 9 and 10 of the first fork read sequences 37 to 44.
    assert batches == {s: [order.row(n).ids.tolist() for n in ns] for s, ns in ((11, (47, 48)), (12, (49, 50)))}


def test_identity_and_refusals(whole, tmp_path):
    from_8 = f"--fork={checkpoint(whole, STEP)}"
    one, two, ranges, none = (
        resolve([from_8, *given]) for given in (["--fork_skip=40,41"], ["--fork_skip=41,40"], ["--fork_skip=40-41"], [])
    )
    assert one.id == two.id == ranges.id != none.id
    assert "skip" not in none.identity["fork"] and one.identity["fork"]["skip"] == [40, 41]
    for wrong in ("a", "5-3", "1,,x", "1-2000000"):
        with pytest.raises(UserError, match=r"fork_skip is .*: give sequence numbers"):
            resolve([from_8, f"--fork_skip={wrong}"])
    with pytest.raises(UserError, match="fork_skip belongs to a fork"):
        resolve([*command(whole), "--fork_skip=3"])
    with pytest.raises(UserError, match="names sequence 31, but at step 8 the next sequence is 32"):
        main([from_8, "--fork_skip=31,40", f"--out={tmp_path / 'read'}"])
