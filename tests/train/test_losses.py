from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.data.packing import IGNORE
from medusa.heads import ARCHITECTURES, HeadsConfig, build_heads
from medusa.heads.layer import LayerConfig
from medusa.train import row_losses
from medusa.train.fused import fused_loss
from medusa.train.losses import HeadsLoss
from medusa.train.row_losses import Targets

HEADS, ROWS, HIDDEN, VOCABULARY = 3, 37, 8, 19
KINDS = ["ce", "kl", "tv", "nla", "lk"]


class Case:
    """Features, labels with gaps, teachers, and what a plain implementation with autograd makes of them."""

    def __init__(self, kind: str, rows: int = ROWS, dtype: torch.dtype = torch.float64):
        torch.manual_seed(0)
        self.kind = kind
        self.matrix = torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
        self.features = torch.randn(HEADS, rows, HIDDEN, dtype=dtype) * 3
        self.own = torch.randn(HEADS, VOCABULARY, HIDDEN, dtype=dtype)
        self.labels = torch.randint(0, VOCABULARY, (rows, HEADS))
        self.labels[torch.rand(rows, HEADS) < 0.3] = IGNORE
        self.teacher = torch.randn(rows + HEADS, HIDDEN, dtype=dtype)
        self.teacher_index = torch.arange(rows)[:, None] + torch.arange(1, HEADS + 1)
        self.teacher_index[self.labels == IGNORE] = 10**9  # nobody may look there

    @property
    def targets(self) -> Targets:
        return Targets(self.labels, self.kind, self.teacher, self.teacher_index)

    def naive(self, features: torch.Tensor, own: torch.Tensor | None, lm_head) -> tuple[torch.Tensor, torch.Tensor]:
        losses, correct = [], []
        for head in range(HEADS):
            valid = self.labels[:, head] != IGNORE
            labels = self.labels[valid, head]
            logits = lm_head(features[head]) if own is None else features[head] @ own[head].T
            logits = logits[valid]
            target = lm_head(self.teacher[self.teacher_index[valid, head]]).softmax(-1)
            accepted = torch.minimum(logits.softmax(-1), target).sum(-1)
            divergence = functional.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1)
            weight = torch.exp(-3 * accepted.detach())
            losses.append({
                "ce": functional.cross_entropy(logits, labels, reduction="sum"),
                "kl": divergence.sum(),
                "tv": (1 - accepted).sum(),
                "nla": -accepted.log().sum(),
                "lk": (weight * divergence + (1 - weight) * (1 - accepted)).sum(),
            }[self.kind])  # fmt: skip
            correct.append((logits.argmax(-1) == labels).sum())
        return torch.stack(losses), torch.stack(correct)


def _linear(matrix: torch.Tensor):
    return lambda rows: rows @ matrix.T


def _softcapped(matrix: torch.Tensor):
    return lambda rows: 5.0 * torch.tanh(rows @ matrix.T * 0.7 / 5.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("chunk_rows", "output"), [(2, "linear"), (5, "own"), (5, "softcap"), (37, "own"), (1000, "linear")]
)
def test_equals_the_naive_loss_with_gradients(kind: str, chunk_rows: int, output: str, monkeypatch) -> None:
    monkeypatch.setitem(row_losses.BLOCK_NUMEL, "cpu", 4 * VOCABULARY)  # several blocks to a chunk
    case = Case(kind)
    lm_head = _softcapped(case.matrix) if output == "softcap" else _linear(case.matrix)
    weights = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    ours, theirs = case.features.clone().requires_grad_(), case.features.clone().requires_grad_()
    own_ours, own_theirs = case.own.clone().requires_grad_(), case.own.clone().requires_grad_()

    loss, correct = fused_loss(ours, case.targets, lm_head, own_ours if output == "own" else None, chunk_rows)
    expected, expected_correct = case.naive(theirs, own_theirs if output == "own" else None, lm_head)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(own_ours.grad, own_theirs.grad, rtol=0, atol=1e-10)
    assert torch.equal(correct, expected_correct)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_logits_lose_only_their_own_rounding(kind: str) -> None:
    case = Case(kind, dtype=torch.bfloat16)
    case.features /= 3
    ours, theirs = case.features.float().requires_grad_(), case.features.float().requires_grad_()

    def lm_head(rows: torch.Tensor) -> torch.Tensor:
        return rows.bfloat16() @ case.matrix.T

    loss, _ = fused_loss(ours, case.targets, lm_head)
    expected, _ = case.naive(theirs, None, lambda rows: lm_head(rows).float())
    loss.sum().backward()
    expected.sum().backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=0.02)


def test_the_loss_to_itself_is_nothing() -> None:
    for kind in KINDS[1:]:
        case = Case(kind)
        features = case.teacher[case.teacher_index.clamp(max=ROWS + HEADS - 1)].transpose(0, 1).clone().requires_grad_()
        loss, _ = fused_loss(features, case.targets, _linear(case.matrix))
        loss.sum().backward()
        assert loss.abs().max() < 1e-12
        assert features.grad.abs().max() < 1e-12


def test_certain_predictions_stay_finite() -> None:
    features = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss, correct = fused_loss(features, Targets(torch.tensor([[1]])), lambda x: x @ torch.eye(2) * 500)
    loss.sum().backward()
    assert loss.tolist() == [500.0]
    assert correct.tolist() == [0]
    assert features.grad.isfinite().all()


def test_equal_best_scores_count_as_correct() -> None:
    targets = Targets(torch.tensor([[1]]))
    _, correct = fused_loss(torch.zeros(1, 1, 2), targets, lambda x: x @ torch.eye(2))
    assert correct.tolist() == [1]


def test_soft_targets_need_teachers() -> None:
    with pytest.raises(ValueError, match=r"loss \(kl\) needs the base's distributions"):
        Targets(torch.zeros(1, 1, dtype=torch.int64), "kl")


class Casts(TorchDispatchMode):
    """Notes what is made of each new tensor of a shape and a dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype, self.made = shape, dtype, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == self.dtype and out.shape == self.shape:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        return sum(not made.expired() for made in self.made)


def test_autocast_keeps_no_rounded_own_matrices() -> None:
    case = Case("ce", dtype=torch.float32)
    features, own = case.features.requires_grad_(), case.own.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), Casts((VOCABULARY, HIDDEN), torch.bfloat16) as casts:
        fused_loss(features, case.targets, _linear(case.matrix), own, chunk_rows=4)
        assert len(casts.made) > HEADS
        assert casts.alive == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_rows_of_logits_exist_than_were_asked_for(kind: str) -> None:
    """Whatever the number of heads and positions; the teachers' logits are among them."""
    case, made = Case(kind, rows=200), []

    def lm_head(rows: torch.Tensor) -> torch.Tensor:
        made.append(rows @ case.matrix.T)
        return made[-1]

    fused_loss(case.features.requires_grad_(), case.targets, lm_head, chunk_rows=8)
    assert len(made) > 50
    pairs = 1 if kind == "ce" else 2  # a chunk and its teachers
    assert all(sum(map(len, made[start : start + pairs])) <= 8 for start in range(0, len(made), pairs))


def test_an_own_matrix_allows_one_backward_pass() -> None:
    case = Case("ce")
    loss, _ = fused_loss(case.features, case.targets, _linear(case.matrix), case.own.requires_grad_())
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.sum().backward()


def _module(kind: str, architecture: str, own_lm_heads: bool, loss_rows: int = 4) -> HeadsLoss:
    torch.manual_seed(0)
    layer = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=6)
    shape = {"own_lm_heads": own_lm_heads, "architecture": architecture, "layer": layer}
    config = HeadsConfig(HIDDEN, VOCABULARY, HEADS, **shape)
    heads = build_heads(config).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    embeddings = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    vocabulary = SimpleNamespace(logits=_linear(embeddings), embed=lambda tokens: embeddings[tokens])
    return HeadsLoss(heads, vocabulary, loss_rows, kind)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [*((kind, "recurrent") for kind in KINDS), *(("kl", name) for name in ARCHITECTURES if name != "recurrent")],
)
@pytest.mark.parametrize("own_lm_heads", [False, True])
class TestModule:
    def test_micro_batches_add_up_whatever_their_size(self, kind, architecture, own_lm_heads) -> None:
        case, whole, parts = Case(kind), *(_module(kind, architecture, own_lm_heads) for _ in range(2))
        hidden, path = torch.randn(ROWS, HIDDEN, dtype=torch.float64), torch.randint(0, VOCABULARY, (ROWS, HEADS))
        weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
        position, places = [hidden, path, case.labels], torch.arange(ROWS) % 10
        expected, sums, correct = whole(*position, weights, case.teacher, case.teacher_index, places)
        expected.backward()
        losses, part_sums, part_correct = [], 0, 0
        for micro in torch.arange(ROWS).split(10):
            inputs = [tensor[micro] for tensor in position]
            teachers = (case.teacher, case.teacher_index[micro])
            loss, sums_K, correct_K = parts(*inputs, weights, *teachers, places[micro])
            loss.backward()
            losses.append(loss.detach())
            part_sums, part_correct = part_sums + sums_K, part_correct + correct_K
        torch.testing.assert_close(sum(losses), expected.detach())
        torch.testing.assert_close(part_sums, sums)
        assert torch.equal(part_correct, correct)
        for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    def test_no_positions_give_a_zero_loss_that_reaches_every_parameter(self, kind, architecture, own_lm_heads) -> None:
        module = _module(kind, architecture, own_lm_heads)
        hidden, nothing = torch.zeros(0, HIDDEN, dtype=torch.float64), torch.zeros(0, HEADS, dtype=torch.int64)
        weights = torch.ones(HEADS, dtype=torch.float64)
        loss, sums, correct = module(hidden, nothing, nothing, weights, hidden, nothing)
        loss.backward()
        assert loss == 0
        assert not sums.any()
        assert not correct.any()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())
