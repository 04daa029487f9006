"""Every backend against attention computed row by row in float64.

Triton's kernels run in its interpreter, which must be chosen before anything imports Triton:
tests/medusa/test_attention_triton.py runs this file once more with TRITON_INTERPRET=1.
"""

import dataclasses
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
    attend,
    backends,
    choose,
    reference,
)
from medusa.attention.backends import build
from medusa.attention.contract import pack_bits
from medusa.attention.hook import tree_attention
from medusa.attention.spans import Span
from medusa.attention.trial import LayerShape, layer_shapes, try_out
from medusa.tree import Draft
from tests.medusa.attention_cases import FEATURES, MIXED, THIN, Case, grid, make
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


def check(backend: TreeAttention, case: Case, dtype: torch.dtype) -> None:
    layer = make(case, dtype)
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
    layer = make(case, dtype_of(backend))
    if case.chunk is not None and backend.name != "exact":  # the reference computes these
        out = attend(layer.plan(backend), *layer.inputs)
        torch.testing.assert_close(out.double(), layer.expected(), atol=5e-6, rtol=5e-6)
    elif backend.name == "flash" and feature != "sinks":
        assert backend.objection(*layer.inputs) is not None
    else:
        check(backend, case, dtype_of(backend))


def test_trees_of_one_draft_may_differ_in_size(backend):
    layer = make(Case(nodes=(8, 5, 1), lengths=(33, 0, 64)), dtype_of(backend))
    expected, parents = layer.run(backend), torch.zeros(3, 8, dtype=torch.int64)
    for sequence, (own, _) in enumerate(layer.trees()):
        parents[sequence, : len(own)] = torch.tensor(own)
    layer.drafts = [dataclasses.replace(Draft.of(torch.zeros_like(parents), parents, 8), sizes=(8, 5, 1))]
    torch.testing.assert_close(layer.run(backend), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("nodes", "lengths", "dtype"),
    [
        (1, (0, 31, 32, 33), torch.bfloat16),
        (1, (127, 128, 129, 5), torch.float32),
        (7, (127, 128, 129, 5), torch.bfloat16),
        (7, (300, 61, 95, 260), torch.float32),
        ((37, 1, 8, 1), (300, 61, 95, 260), torch.bfloat16),
        ((37, 1, 8, 1), (0, 31, 32, 33), torch.float32),
    ],
    ids=str,
)
def test_where_keys_stand_changes_no_bit_of_exact_sums(nodes, lengths, dtype):
    exact = build("exact", CPU)
    for case in (Case(groups=3), Case(window=40, softcap=1.5, sinks=True, dim_v=32), Case(chunk=48)):
        whole, *cut = (
            make(dataclasses.replace(case, nodes=nodes, lengths=lengths, size=size), dtype) for size in (512, 32, 16)
        )
        expected = whole.run(exact)
        for layer in cut:
            layer.adopt(whole)
            assert torch.equal(layer.run(exact), expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(dim=33, dim_v=17, kv_heads=1, groups=3, lengths=(140, 31)),
        Case(dim=80, groups=3, lengths=(140, 31)),
        Case(window=40, groups=3, lengths=(250, 129)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_sums_of_odd_widths_and_behind_passed_segments(case, dtype):
    check(build("exact", CPU), case, dtype)


def test_the_whole_model_writes_the_same_text(backend, base_directory, make_heads, caplog):
    dtype, steps = dtype_of(backend), 4 if backend.name == "triton" else 10
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
        layer = make(Case(), torch.float64)
        out = attend(layer.plan(build("triton", CPU)), *layer.inputs)
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
    layer = make(FEATURES["window"], torch.float64)
    plan = layer.plan(build("flash", CPU))
    backends._reference.cache_clear()
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        for _ in range(3):
            out = attend(plan, *layer.inputs)
    torch.testing.assert_close(out, layer.expected())
    assert caplog.text.count("reference is used instead of flash for some layers: a sliding window") == 1


@pytest.mark.parametrize(("shorter", "handed_over"), [(0, False), (1, True)])
def test_a_window_that_hides_nothing_is_no_window(caplog, shorter, handed_over):
    layer = make(Case(), torch.float64)
    plan = layer.plan(build("flash", CPU), spans={None: Span(window=layer.kv_length - shorter)})
    backends._reference.cache_clear()
    query_1HRD = layer.query.transpose(0, 1)[None]
    with caplog.at_level(logging.INFO, "medusa.attention.backends"):
        out, _ = tree_attention(torch.nn.Identity(), query_1HRD, layer.key, layer.value, None, tree_plan=plan)
    torch.testing.assert_close(out[0], layer.expected())
    assert ("instead of" in caplog.text) == handed_over


class Fake:
    """A backend that returns the values, adds ``error`` to them, or raises it."""

    def __init__(self, name: str, error: Exception | float = 0.0) -> None:
        self.name, self.dtypes, self.error = name, frozenset({torch.bfloat16}), error
        self.tried: list[tuple[int, ...]] = []

    def objection(self, query, key, value, scoring) -> str | None:
        return "its kernel knows no windows" if scoring.window is not None else None

    def attend(self, plan, query, key, value, scoring) -> torch.Tensor:
        self.tried.append((query.shape[1] // key.shape[2], query.shape[0], query.shape[2], value.shape[3]))
        if isinstance(self.error, Exception):
            raise self.error
        return value[0, :1, :1] + self.error


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
    assert "rejects all layers: its kernel knows no windows" in try_out(backend, CPU, torch.bfloat16, layers[1:2])


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


def test_masks_are_built_once_for_all_layers_alike(monkeypatch):
    made, visible = [], reference._visible
    monkeypatch.setattr(reference, "_visible", lambda *args: made.append(args) or visible(*args))
    layer = make(MIXED[0], torch.float64)
    plan = layer.plan(build("reference", CPU))
    for window in (None, 9, None, 9):
        attend(plan, *layer.inputs[:3], layer.scoring._replace(window=window))
    assert len(made) == 2 * len(set(plan.sizes))
