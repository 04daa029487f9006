"""The joint loss of base and heads (Medusa-2) beside one that is written out, in float64."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel, HeadsConfig, build_heads
from medusa.data.packing import PackedRows, pack
from medusa.data.sources import Sample
from medusa.train.adapters import Adapters
from medusa.train.config import LoraRecipe
from medusa.train.features import BasePass, Positions
from medusa.train.joint import JointLoss
from medusa.train.losses import HeadsLoss
from medusa.train.recipe_file import RecipeError

HEADS = 2
WEIGHTS = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)


def _load(base: Path) -> BaseModel:
    return BaseModel.load(base, dtype=torch.float64, device="cpu")


def _joint(
    base: Path,
    base_loss: str = "kl",
    heads_loss: str = "ce",
    changed: bool = True,
    drafted: int = 0,
    layers: tuple[int, ...] = (),
    **lora: Any,
) -> JointLoss:
    """Heads and adapters as they are after some training, or at its start."""
    model = _load(base).tapped(layers)
    torch.manual_seed(4)
    adapters = Adapters(model, LoraRecipe(**({"rank": 4, "dropout": 0.0} | lora)))
    options = {"architecture": "recurrent", "draft_vocab_size": drafted, "feature_layers": layers}
    heads = build_heads(HeadsConfig(model.hidden_size, model.vocab_size, HEADS, **options)).double()
    for parameter in [*heads.parameters(), *(adapters.parameters().values() if changed else [])]:
        parameter.data = 0.1 * torch.randn_like(parameter)
    return JointLoss(heads, model, adapters, base_loss, heads_loss, loss_rows=7)


@pytest.fixture(scope="module")
def packed() -> PackedRows:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (5, 9, 17, 30, 12, 20):
        mask = torch.rand(length, generator=generator) < 0.6
        samples.append(Sample(torch.randint(1, 257, (length,), generator=generator, dtype=torch.int32), mask))
    return pack(samples, row_tokens=40)


def _inputs(packed: PackedRows, rows: Tensor) -> tuple[Tensor, ...]:
    positions = Positions.of(packed, rows, HEADS)
    ids_BT, places_BT = packed.input_ids[rows].long(), packed.position_ids[rows].long()
    return ids_BT, places_BT, positions.kept, positions.path, positions.targets


def _naive(joint: JointLoss, original: BaseModel, packed: PackedRows, base_loss: str, heads_loss: str) -> Tensor:
    """Every document by itself, all logits at once."""
    losses = torch.zeros(1 + HEADS, dtype=torch.float64)
    for row, places in enumerate(packed.position_ids):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for start, stop in pairwise(starts):
            ids, mask = packed.input_ids[row, start:stop].long(), packed.loss_mask[row, start:stop]
            hidden = joint._base.hidden_states(ids[None])[0]
            with torch.no_grad():
                kept = original.logits(original.hidden_states(ids[None])[0])
            ids_ahead = functional.pad(ids, (0, HEADS))
            path = torch.stack([ids_ahead[1 + k : 1 + k + len(ids)] for k in range(HEADS)], dim=1)
            features = joint.heads(hidden, path, joint._base)
            logits = [
                original.logits(hidden),
                *(joint.heads.head_logits(k, features[k], original) for k in range(HEADS)),
            ]
            for column, scores in enumerate(logits):
                kind = heads_loss if column else base_loss
                for t in (t for t in range(len(ids) - 1 - column) if mask[t + 1 + column]):
                    teacher, label = logits[0].detach()[t + column] if column else kept[t], int(ids[t + 1 + column])
                    if column and joint.heads.draft_ids is not None:
                        drafted = joint.heads.draft_ids.tolist()
                        if label not in drafted:
                            continue
                        teacher, label = teacher[drafted], drafted.index(label)
                    losses[column] += row_loss(kind, scores[t], label, teacher)
    return losses


def row_loss(kind: str, scores: Tensor, label: int, teacher: Tensor) -> Tensor:
    """The formula of a loss at one place: scores and the teacher's are logits."""
    if kind == "ce":
        return -scores.log_softmax(0)[label]
    if kind == "kl":
        return functional.kl_div(scores.log_softmax(0), teacher.log_softmax(0), log_target=True, reduction="sum")
    return (scores.softmax(0) - teacher.softmax(0)).abs().sum() / 2


@pytest.mark.parametrize(
    ("base_loss", "heads_loss", "drafted", "layers"),
    [
        ("kl", "ce", 0, ()),
        ("ce", "tv", 0, (1,)),
        ("kl", "kl", 120, (1,)),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(
    base: Path, packed: PackedRows, base_loss: str, heads_loss: str, drafted: int, layers: tuple[int, ...]
) -> None:
    joint = _joint(base, base_loss, heads_loss, drafted=drafted, layers=layers)
    parameters = list(joint.parameters())

    expected_C = _naive(joint, _load(base).tapped(layers), packed, base_loss, heads_loss)
    expected = torch.autograd.grad((expected_C * WEIGHTS).sum(), parameters)

    sums_C, grads = torch.zeros_like(expected_C), [torch.zeros_like(parameter) for parameter in parameters]
    for rows in torch.arange(len(packed)).split(2):
        loss, loss_C, _ = joint(*_inputs(packed, rows), WEIGHTS)
        sums_C += loss_C
        grads = [a + b for a, b in zip(grads, torch.autograd.grad(loss, parameters), strict=True)]
    torch.testing.assert_close(sums_C, expected_C, rtol=0, atol=1e-9)
    torch.testing.assert_close(grads, list(expected), rtol=0, atol=1e-9)
    assert all(gradient.any() for gradient in expected)


def test_what_is_trained_is_every_linear_layer_but_the_output_and_no_weight_of_the_base(base: Path) -> None:
    joint = _joint(base)
    layers = (
        "self_attn/q_proj self_attn/k_proj self_attn/v_proj self_attn/o_proj mlp/gate_proj mlp/up_proj mlp/down_proj"
    )
    for layer in range(2):
        for name in layers.split():
            assert sum(f"layers/{layer}/{name}/lora_" in key for key in joint.adapters) == 2
    assert len(joint.adapters) == 2 * 2 * 7
    trained = {id(parameter) for parameter in joint.parameters()}
    heads = {id(parameter) for parameter in joint.heads.parameters()}
    assert {id(p) for p in joint._base.model.parameters() if p.requires_grad} == trained - heads


def _of_experts(family: str, base: Path) -> BaseModel:
    """A small model of experts, with the base's tokenizer."""
    config = AutoConfig.for_model(
        family, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_local_experts=2, vocab_size=257,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return BaseModel(AutoModelForCausalLM.from_config(config), _load(base).tokenizer)


def test_routers_of_experts_are_left_alone(base: Path) -> None:
    model = _of_experts("phimoe", base)
    assert {name.split(".")[-5] for name in Adapters(model, LoraRecipe(rank=2)).parameters()} == {"self_attn"}
    assert model.hidden_states(torch.arange(9)[None]).isfinite().all()


def test_experts_without_dropout_are_told(base: Path) -> None:
    model = _of_experts("mixtral", base)
    with pytest.raises(RecipeError, match=r"lora\.dropout \(0\.05\) must be 0 for the experts of this base"):
        Adapters(model, LoraRecipe(rank=2))


def test_while_the_base_rests_adapters_get_zeros_and_heads_what_a_frozen_base_gives(
    base: Path, packed: PackedRows
) -> None:
    joint, rows = _joint(base, changed=False, dropout=0.5), torch.arange(len(packed))
    weights_C = torch.tensor([0.0, 0.2, 0.1], dtype=torch.float64)
    loss, loss_C, _ = joint(*_inputs(packed, rows), weights_C)
    loss.backward()
    original, positions = _load(base), Positions.of(packed, rows, HEADS)
    frozen = HeadsLoss(joint.heads, original, 7)
    hidden = BasePass(original, packed, HEADS, 2).read(rows)
    expected, expected_K, _ = frozen(hidden, positions.path, positions.targets[:, 1:], weights_C[1:])
    torch.testing.assert_close(loss_C, functional.pad(expected_K, (1, 0)), rtol=0, atol=1e-9)
    grads = [parameter.grad for parameter in joint.heads.parameters()]
    torch.testing.assert_close(grads, list(torch.autograd.grad(expected, joint.heads.parameters())), rtol=0, atol=1e-9)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in joint.adapters.values())


def test_adapters_start_as_no_change_and_off_is_the_original(base: Path) -> None:
    ids = torch.arange(1, 40)[None]
    model, expected = _load(base), _load(base).hidden_states(ids)
    adapters = Adapters(model, LoraRecipe(rank=4, dropout=0.5))
    torch.testing.assert_close(model.hidden_states(ids), expected, rtol=0, atol=1e-12)
    for parameter in adapters.parameters().values():
        parameter.data = torch.randn_like(parameter)
    assert not torch.allclose(model.hidden_states(ids), expected)
    with adapters.off():
        torch.testing.assert_close(model.hidden_states(ids), expected, rtol=0, atol=1e-12)
    assert all(parameter.requires_grad for parameter in adapters.parameters().values())


@pytest.mark.parametrize("checkpoint", [True, False])
def test_dropout_is_a_function_of_the_seed_and_the_same_where_layers_are_computed_again(
    base: Path, packed: PackedRows, checkpoint: bool
) -> None:
    inputs = _inputs(packed, torch.arange(2))

    def gradients(seed: int, checkpoint: bool) -> list[Tensor]:
        joint = _joint(base, layers=(1,), dropout=0.5, checkpoint_layers=checkpoint)
        torch.manual_seed(seed)
        loss, _, _ = joint(*inputs, WEIGHTS)
        return list(torch.autograd.grad(loss, joint.parameters()))

    ours, theirs, other = gradients(1, checkpoint), gradients(1, False), gradients(2, checkpoint)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not all(torch.allclose(a, b) for a, b in zip(ours, other, strict=True))


def test_rows_without_a_target_give_zeros(base: Path, packed: PackedRows) -> None:
    joint = _joint(base)
    ids, places, kept, path, targets = _inputs(packed, torch.tensor([0]))
    loss, loss_C, correct_C = joint(ids, places, torch.zeros_like(kept), path[:0], targets[:0], WEIGHTS)
    loss.backward()
    assert loss == 0
    assert not loss_C.any()
    assert not correct_C.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in joint.parameters())


def test_a_saved_adapter_is_that_of_training(base: Path, tmp_path: Path) -> None:
    model = _load(base)
    adapters = Adapters(model, LoraRecipe(rank=4))
    for parameter in adapters.parameters().values():
        parameter.data = 0.1 * torch.randn_like(parameter)
    adapters.save(tmp_path / "adapter")
    ids = torch.arange(1, 60)[None]
    loaded = BaseModel.load(base, dtype=torch.float32, device="cpu", pack=True, adapter=tmp_path / "adapter")
    torch.testing.assert_close(loaded.hidden_states(ids).double(), model.hidden_states(ids), rtol=0, atol=1e-5)
