"""Drafts that grow in C++, of recurrent heads in one call, of others level by level: the trees that Python grows."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.cpu.native import available, rows_are_whole
from medusa.cpu.packed import Packed
from medusa.drafters.heads import HeadsDrafter
from medusa.heads.frozen import freeze
from medusa.tree import Tree
from tests.medusa.states import decode_state
from tests.medusa.test_conformance import tiny
from tests.medusa.test_native import BF16, DTYPES, F16, SINGLE
from tests.medusa.trees import by_path

pytestmark = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")


def frozen_heads(base, dtype, part=0, feature_layers=(), architecture="recurrent"):
    torch.manual_seed(0)
    shape = {"num_layers": 2, "architecture": architecture, "feature_layers": feature_layers}
    heads = build_heads(HeadsConfig(32, 50, 3, draft_vocab_size=part, **shape))
    for parameter in heads.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    if part:
        heads.draft_ids.copy_(torch.randperm(50)[:part].sort().values)
    heads = heads.to(dtype)
    if dtype == BF16 and rows_are_whole():  # as the kernel's weights are
        for linear in [*heads.modules(), *([base.model.get_output_embeddings()] if part else [])]:
            if isinstance(linear, nn.Linear):
                linear.weight.data = Packed.rounded(linear.weight).expand()
    return freeze(heads, base)


SHAPES = pytest.mark.parametrize(
    "shape",
    [{"nodes": 12}, {"nodes": 60}, {"tree": Tree.full([3, 2, 1])}],
    ids=["small", "large", "static"],
)


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
@pytest.mark.parametrize(
    ("family", "part", "taps", "temperature"),
    [("llama", 0, (), 0.0), ("gemma3_text", 21, (1,), 0.7)],
    ids=["whole, greedy", "part, sampled, scaled embeddings"],
)
@torch.inference_mode()
def test_a_draft_is_what_python_grows(family, part, taps, shape, temperature, dtype):
    base = BaseModel(tiny(family, "exact")[0].model.to(dtype), None, family, "exact").tapped(taps)
    heads = frozen_heads(base, dtype, part, taps)
    native_drafter = HeadsDrafter(heads, base, temperature=temperature, **{"nodes": 2} | shape)
    assert heads.native is not None
    compare(native_drafter, in_python(native_drafter), base, dtype)


@SHAPES
@pytest.mark.parametrize(
    ("architecture", "part", "dtype", "temperature"),
    [("medusa", 0, SINGLE, 0.7), ("hydra", 21, SINGLE, 0.0), ("hydra", 0, BF16, 0.7)],
)
@torch.inference_mode()
def test_a_draft_by_levels_is_what_python_grows(architecture, part, dtype, shape, temperature):
    """Medusa heads say the same below all nodes of a level."""
    base = BaseModel(tiny("llama", "exact")[0].model.to(dtype), None, "llama", "exact")
    heads = frozen_heads(base, dtype, part, architecture=architecture)
    drafter = HeadsDrafter(heads, base, temperature=temperature, **{"nodes": 2} | shape)
    assert heads.native is None and drafter._growth is not None
    compare(drafter, in_python(drafter), base, dtype)


def in_python(drafter):
    """The same drafter without kernels that grow trees."""
    other = copy.copy(drafter)
    other._native = other._growth = None
    return other


def compare(native_drafter, drafter, base, dtype):
    """Trees of a batch, one of whose sequences may have ended."""
    for seed in range(5):
        torch.manual_seed(seed)
        state = decode_state([[3, 4, 5], [6, 7], [8, 9, 1]], base, torch.tensor([seed, 5, 7 * seed]))
        state = dataclasses.replace(state, hidden=torch.randn(3, base.feature_size).to(dtype))
        state.active[1] = seed % 2 == 0
        ours, theirs = native_drafter.propose(state), drafter.propose(state)
        for row in range(3):
            mine, other = by_path(ours, row), by_path(theirs, row)
            shared = mine.keys() & other.keys()
            for path in shared:
                assert mine[path] == pytest.approx(other[path], abs={BF16: 0.4, F16: 0.05, SINGLE: 1e-3}[dtype])
            # Where sums are rounded to 8 or 11 bits, nodes that are nearly as good may take each other's place.
            assert mine.keys() == other.keys() if dtype == SINGLE else 2 * len(shared) > len(other)
        if dtype == SINGLE:
            assert (list(ours.row_sizes), ours.depths.max()) == (list(theirs.row_sizes), theirs.depths.max())
            torch.testing.assert_close(ours.parents[ours.parents > 0], theirs.parents[theirs.parents > 0])


@torch.inference_mode()
def test_heads_that_overflow_give_trees_too():
    base = tiny("llama", "exact")[0]
    heads = frozen_heads(base, SINGLE)
    drafter = HeadsDrafter(heads, base, nodes=8)
    state = decode_state([[3, 4, 5], [6, 7]], base)
    state.hidden[0] = torch.nan
    draft = drafter.propose(state)
    assert draft.tokens.min() >= 0 and draft.tokens.max() < 50
    assert bool((draft.parents[:, 1:] < torch.arange(1, draft.tokens.shape[1])).all())
    assert not draft.scores[draft.scores > -1e3].isnan().any()


def test_the_default_dtype_of_another_thread_is_not_that_of_the_kernels(base, make_heads):
    """transformers changes it while it makes a model, for all threads; what kernels write must keep its size."""
    model = MedusaModel(base, make_heads())
    options = {"max_new_tokens": 40, "nodes": 16, "drafter": "hybrid", "temperature": 0.9, "seed": 1}
    expected = model.generate("abcabc", **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = model.generate("abcabc", **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.tokens, found.steps) == (expected.tokens, expected.steps)
