"""Heads that remember: drafts are what the layer says of a text and a path, computed anew, whoever drafts beside."""

import pytest
import torch

from medusa import MedusaModel, SamplingParams, Speculation
from medusa.drafters import HeadsDrafter
from medusa.engine.config import EngineConfig
from medusa.heads.layer import LayerConfig
from medusa.tree import Tree
from tests.medusa.layer_by_hand import recomputed

TEXTS = [[5, 6, 7, 9, 4, 4, 8], [9, 8], [11, 3] * 40]
LAYERS = {"last": (), "one": (1,)}
NORMS = {"3": {"norm_features": False, "norm_output": False}, "3.1": {}}


@pytest.fixture(params=[(layers, norms) for layers in LAYERS for norms in NORMS], ids=str)
def heads(request, base, make_heads):
    layers, norms = request.param
    layer = LayerConfig.of(base.config, **NORMS[norms])
    heads = make_heads(4, architecture="attention", feature_layers=LAYERS[layers], layer=layer, own_lm_heads=True)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return heads


class Watched(HeadsDrafter):
    """Keeps its drafts with the texts that they are for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def propose(self, state, sequences=(), /):
        draft = super().propose(state, sequences)
        for row, place in enumerate(state.positions.tolist()):
            if state.active[row]:
                self.seen.append((state.history[row, : place + 1].tolist(), draft, row))
        return draft


def paths(draft, row):
    """Each node's tokens from the root on, without the root."""
    found = [[]]
    for node in range(1, draft.row_sizes[row]):
        found.append([*found[draft.parents[row, node]], int(draft.tokens[row, node])])
    return found


@torch.no_grad()
def check(heads, base, draft, row, text):
    """Every node's score is the sum of log-probabilities along its path, each computed anew."""
    assert len(paths(draft, row)) > 1
    for path, score in zip(paths(draft, row), draft.scores[row].tolist(), strict=False):
        expected = 0.0
        for depth, token in enumerate(path):
            expected += float(recomputed(heads, base, text, path[:depth]).log_softmax(-1)[token]) - 1e-4
        assert score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "shape", [{"nodes": 9}, {"nodes": 1, "tree": Tree.full([2, 2, 1, 1])}], ids=["dynamic", "static"]
)
def test_every_node_is_what_the_layer_says_of_text_and_path(heads, base, shape):
    """In a batch of texts of several lengths, prompts in chunks."""
    model = MedusaModel(base, heads)
    drafter = Watched(model.heads, model.base, host_decides=False, **shape)
    batch = model.batch(config=EngineConfig(chunk=3))
    requests = [
        batch.add(text, SamplingParams(max_new_tokens=8, ignore_eos=True), Speculation(drafter)) for text in TEXTS
    ]
    while len(batch):
        batch.step()
    assert max(draft.depth for _, draft, _ in drafter.seen) == 4 and len(drafter.seen) > 9
    for text, draft, row in drafter.seen[::5]:
        check(heads, base, draft, row, text)
    plain = model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, nodes=1)
    assert [request.output.tokens for request in requests] == [output.tokens for output in plain]
