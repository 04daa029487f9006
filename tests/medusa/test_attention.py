"""Every backend against attention computed row by row in float64.

Triton's kernels run in its interpreter, which must be chosen before anything imports Triton:
tests/medusa/test_attention_triton.py runs this file once more with TRITON_INTERPRET=1.
"""

import logging
import os

import pytest
import torch

from medusa import BaseModel, MedusaModel
from medusa.attention import (
    BACKENDS,
    BackendUnavailableError,
    Scoring,
    TreeAttention,
    TreePlan,
    attend,
    backends,
    choose,
)
from medusa.attention.backends import build
from medusa.attention.contract import pack_bits
from medusa.attention.hook import tree_attention
from medusa.attention.spans import Span
from medusa.attention.trial import LayerShape, layer_shapes, try_out
from medusa.tree import Draft
from tests.medusa.attention_cases import FEATURES, THIN, Case, grid, make
from tests.medusa.test_conformance import tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
HERE = [name for name in BACKENDS if name != "triton" or INTERPRETED]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDEST = {"triton": torch.float32, "exact": torch.float32}
"""The best dtype of a backend, where it is not float64."""


@pytest.fixture(params=HERE)
def backend(request) -> TreeAttention:
    return build(request.param, CPU)


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Fresh tensors hold NaN: what a backend does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def dtype_of(backend: TreeAttention) -> torch.dtype:
    return WIDEST.get(backend.name, torch.float64)


def poison_for(backend: TreeAttention) -> float:
    """The reference multiplies hidden rows by zero; others must not read them."""
    return 1e4 if backend.name == "reference" else float("nan")


def check(backend: TreeAttention, case: Case, dtype: torch.dtype) -> None:
    layer = make(case, dtype, poison_for(backend))
    tolerance = TOLERANCE[dtype]
    if backend.name == "reference" and (case.softcap or case.sinks):
        tolerance = max(tolerance, 5e-6)  # its softmax is float32 there
    torch.testing.assert_close(layer.run(backend).double(), layer.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", THIN, ids=str)
def test_agrees_with_the_oracle(backend, case):
    check(backend, case, dtype_of(backend))


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(), ids=str)
def test_agrees_with_the_oracle_over_the_grid(backend, case):
    check(backend, case, dtype_of(backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(backend, dtype):
    check(backend, THIN[0], dtype)


@pytest.mark.parametrize("feature", FEATURES)
def test_what_layers_add(backend, feature):
    case = FEATURES[feature]
    layer = make(case, dtype_of(backend), 1e4)
    if backend.name == "flash" and feature != "sinks":
        assert backend.objection(layer.query, layer.key, layer.value, layer.scoring) is not None
    else:
        check(backend, case, dtype_of(backend))


def test_a_chain_is_causal_attention(backend):
    layer = make(Case(nodes=26, shape="chain", lengths=(37,)), dtype_of(backend), poison_for(backend))
    query_BHTD = torch.cat([torch.randn_like(layer.query[:, :, :1]).expand(-1, -1, 37, -1), layer.query], dim=2)
    rows = slice(0, 37 + 26)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query_BHTD, layer.key[:, :, rows], layer.value[:, :, rows], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(layer.run(backend), whole[:, :, 37:], atol=5e-6, rtol=5e-6)


def test_the_order_of_siblings_does_not_matter(backend):
    layer = make(Case(nodes=8, shape="star", lengths=(37,)), dtype_of(backend), poison_for(backend))
    order = torch.tensor([0, 5, 2, 7, 1, 6, 3, 4])
    before = layer.run(backend)
    layer.query = layer.query[:, :, order]
    for rows in (layer.key, layer.value):
        rows[:, :, 37 : 37 + 8] = rows[:, :, 37 + order]
    torch.testing.assert_close(layer.run(backend), before[:, :, order], atol=5e-6, rtol=5e-6)


def test_a_longer_bucket_changes_nothing(backend):
    layer = make(Case(lengths=(40, 3)), dtype_of(backend), poison_for(backend))
    short = layer.run(backend)
    for name in ("key", "value"):
        rows_BSKD = getattr(layer, name).transpose(1, 2)
        longer = torch.nn.functional.pad(rows_BSKD, (0, 0, 0, 0, 0, 100), value=poison_for(backend))
        setattr(layer, name, longer.transpose(1, 2))
    torch.testing.assert_close(layer.run(backend), short, atol=5e-6, rtol=5e-6)


def test_the_whole_model_writes_the_same_text(backend, base_directory, make_heads, caplog):
    dtype, steps = dtype_of(backend), 4 if backend.name == "triton" else 20
    prompts = [[5, 9, 40, 41], [7]]
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        loaded = BaseModel.load(base_directory, dtype=dtype, device="cpu", attention=backend.name)
    assert loaded.attention.name == backend.name
    assert f"attention {backend.name}: asked for" in caplog.text
    plain = BaseModel.load(base_directory, dtype=dtype, device="cpu", attention="reference")
    heads = make_heads().to(dtype)
    tokens = [out.tokens for out in MedusaModel(loaded, heads).generate(prompts, max_steps=steps, nodes=6)]
    expected = MedusaModel(plain).generate(prompts, max_new_tokens=max(map(len, tokens)))
    assert tokens == [out.tokens[: len(ours)] for out, ours in zip(expected, tokens, strict=True)]
    assert "instead of" not in caplog.text


if INTERPRETED:

    @pytest.mark.parametrize("case", [Case(nodes=3, groups=1, lengths=(150, 0)), FEATURES["all"]], ids=str)
    def test_triton_gives_the_same_with_any_number_of_splits(case, monkeypatch):
        layer, backend, outputs = make(case, torch.float32), build("triton", CPU), []
        for splits in (1, 2, 16):  # the last leaves splits without keys
            monkeypatch.setattr("medusa.attention.triton.choose_splits", lambda *_, splits=splits: splits)
            outputs.append(layer.run(backend))
            torch.testing.assert_close(outputs[-1], outputs[0], atol=2e-6, rtol=2e-6)
        assert not torch.equal(outputs[0], outputs[1]), "the splits were different ones"

    def test_triton_leaves_float64_to_the_reference():
        layer = make(Case(), torch.float64, 1e4)
        plan = TreePlan(layer.draft, layer.lengths, layer.key.shape[2], build("triton", CPU))
        out = attend(plan, layer.query, layer.key, layer.value, layer.scoring)
        torch.testing.assert_close(out, layer.expected())


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 63, 64, 65])
def test_mask_words(nodes):
    mask = torch.rand(2, nodes, nodes, generator=torch.Generator().manual_seed(nodes)) < 0.5
    mask[0] = True  # bits 31 and 63 among them: the sign of a word
    words = pack_bits(mask)
    assert (words.dtype, words.shape) == (torch.int32, (2, nodes, -(-nodes // 32)))
    bits = [[bool(word >> bit & 1) for word in row for bit in range(32)] for row in words.flatten(0, 1).tolist()]
    assert [row[:nodes] for row in bits] == mask.flatten(0, 1).tolist()
    assert not any(any(row[nodes:]) for row in bits)


def test_a_layer_that_a_backend_objects_to_goes_to_the_reference(caplog):
    layer = make(FEATURES["window"], torch.float64, 1e4)
    plan = TreePlan(layer.draft, layer.lengths, layer.key.shape[2], build("flash", CPU))
    backends._reference.cache_clear()
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        for _ in range(3):
            out = attend(plan, layer.query, layer.key, layer.value, layer.scoring)
    torch.testing.assert_close(out, layer.expected())
    assert caplog.text.count("reference instead of flash for some layers: a sliding window") == 1


@pytest.mark.parametrize(("shorter", "handed_over"), [(0, False), (1, True)])
def test_a_window_that_hides_nothing_is_no_window(caplog, shorter, handed_over):
    layer = make(Case(), torch.float64, 1e4)
    spans = {None: Span(window=layer.key.shape[2] - shorter)}
    plan = TreePlan(layer.draft, layer.lengths, layer.key.shape[2], build("flash", CPU), spans)
    backends._reference.cache_clear()
    inputs = (layer.query, layer.key, layer.value)
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        out, _ = tree_attention(torch.nn.Identity(), *inputs, None, tree_plan=plan)
    torch.testing.assert_close(out.transpose(1, 2), layer.expected())
    assert ("instead of" in caplog.text) == handed_over


class Fake:
    """A backend that returns the values, adds ``error`` to them, or raises it."""

    def __init__(self, name: str, error: Exception | float = 0.0) -> None:
        self.name, self.dtypes, self.error = name, frozenset({torch.bfloat16}), error
        self.tried: list[tuple[int, ...]] = []

    def objection(self, query, key, value, scoring) -> str | None:
        return "its kernel knows no windows" if scoring.window is not None else None

    def attend(self, plan, query, key, value, scoring) -> torch.Tensor:
        self.tried.append((query.shape[1] // key.shape[1], query.shape[2], query.shape[3], value.shape[3]))
        if isinstance(self.error, Exception):
            raise self.error
        return value[:, :, :1] + self.error


@pytest.mark.parametrize(
    ("runs", "dtype", "chosen", "reason"),
    [
        ({"triton", "flash"}, torch.bfloat16, "triton", "the first that works on cuda"),
        ({"flash"}, torch.bfloat16, "flash", "triton is missing; the first that works"),
        ({"flash"}, torch.float32, "reference", "triton is missing; flash does not compute in torch.float32"),
        (set(), torch.bfloat16, "reference", "triton is missing; flash is missing"),
    ],
)
def test_the_best_backend_is_chosen_with_its_reason(monkeypatch, runs, dtype, chosen, reason):
    def fake_build(name: str, device: torch.device) -> Fake:
        if name not in runs | {"reference"}:
            raise BackendUnavailableError(f"{name} is missing")
        return Fake(name)

    def fake_try(backend: Fake, device: torch.device, dtype: torch.dtype, layers: object) -> str | None:
        return try_out(backend, CPU, dtype)

    monkeypatch.setattr(backends, "build", fake_build)
    monkeypatch.setattr("medusa.attention.backends.try_out", fake_try)
    backend, why = choose("auto", torch.device("cuda"), dtype)
    assert backend.name == chosen
    assert reason in why


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (0.0, None),
        (RuntimeError("Failed to find C compiler"), "fails: Failed to find C compiler"),
        (1.0, "computes wrong numbers"),
    ],
)
def test_a_backend_is_tried_before_it_is_chosen(error, failure):
    assert try_out(Fake("fake", error), CPU, torch.bfloat16) == failure


def test_backends_that_work_pass_the_trial(backend, monkeypatch):
    monkeypatch.setattr("medusa.attention.trial.TRIED_NODES", (1, 5))  # the interpreter is slow
    layers = [LayerShape(2, 64, 64), LayerShape(1, 16, 32), LayerShape(2, 16, 16, Scoring(1.0, 300))]
    assert try_out(backend, CPU, dtype_of(backend), layers) is None


def test_the_trial_has_the_sizes_of_the_layers_and_of_a_prefill():
    backend, prefill_rows = Fake("fake"), 512
    layers = [LayerShape(4, 256, 128), LayerShape(4, 64, 64, Scoring(1.0, window=7)), LayerShape()]
    assert try_out(backend, CPU, torch.bfloat16, layers) is None
    assert {(4, 1, 256, 128), (4, prefill_rows, 256, 128), (1, prefill_rows, 64, 64)} <= set(backend.tried)
    assert "objects to all layers: its kernel knows no windows" in try_out(backend, CPU, torch.bfloat16, layers[1:2])


def test_a_base_is_tried_with_its_own_layers(base_directory, monkeypatch):
    tried = []

    def note(name, device, dtype, layers):
        tried.extend(layers)
        return build("reference", CPU), ""

    monkeypatch.setattr("medusa.base.model.choose", note)
    BaseModel.load(base_directory, device="cpu")
    assert [(layer.groups, layer.dim, layer.dim_v) for layer in tried] == [(2, 8, 8)]


def test_latent_attention_and_windows_have_shapes_of_their_own():
    latent, windowed, neox = (tiny(name)[0] for name in ("deepseek_v3", "gemma2", "gpt_neox"))
    assert [(s.dim, s.dim_v) for s in layer_shapes(latent.model, latent.config)] == [(16, 8)]
    assert [s.scoring.window for s in layer_shapes(windowed.model, windowed.config)] == [None, 7]
    assert {s.scoring.softcap for s in layer_shapes(windowed.model, windowed.config)} == {5.0}
    assert [s.dim for s in layer_shapes(neox.model, neox.config)] == [8]


def test_a_cpu_gets_exact_sums_where_they_can_be_had():
    backend, reason = choose("auto", CPU, torch.float32)
    assert (backend.name, reason) == ("exact", "the first that works on cpu in torch.float32")
    backend, reason = choose("auto", CPU, torch.float64)
    assert (backend.name, reason) == ("reference", "exact does not compute in torch.float64")
    assert choose("auto", torch.device("meta"), torch.float32)[1] == "the one for meta"


def test_an_unknown_backend_is_refused_with_the_names():
    with pytest.raises(
        ValueError, match=r"attention \('fast'\) is not known; choose one of: auto, reference, exact, flash, triton"
    ):
        choose("fast", CPU, torch.float32)


def test_a_backend_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", "medusa.attention.no_such_module:TritonAttention")
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported.*; install its package or choose another"):
        choose("triton", torch.device("cuda"), torch.float32)


def test_masks_are_built_once_and_only_where_asked_for():
    draft = Draft.chain(torch.zeros(2, 3, dtype=torch.int64))
    plan = TreePlan(draft, torch.tensor([4, 0]), 9, build("reference", CPU))
    assert plan.words is plan.words
    device = torch.device("cpu")
    assert plan.bias(2, torch.float32, device) is plan.bias(2, torch.float32, device)
    assert Scoring(1.0) == Scoring(scaling=1.0, window=None, softcap=None, sinks=None)
