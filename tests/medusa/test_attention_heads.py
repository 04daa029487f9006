"""Heads that remember: drafts are what the layer says of a text and a path, computed anew, whoever drafts beside."""

import dataclasses

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from medusa import BaseModel, HeadsConfig, MedusaModel, Prefix, SamplingParams, Speculation, build_heads
from medusa.cache import BLOCK
from medusa.drafters import HeadsDrafter, SampledHeadsDrafter
from medusa.engine.config import EngineConfig
from medusa.formats import load_heads, save_heads
from medusa.heads.layer import LayerConfig
from medusa.tree import Tree

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


def recomputed(heads, base, text, path):
    """Logits of the token behind a path below the last token of a text, by the layer over all of it at once."""
    layer, dim = heads.config.layer, heads.config.hidden_size
    ids = [*text, *path]
    hidden = base.tapped(heads.config.feature_layers).hidden_states(torch.tensor([text]))[0, : len(text) - 1]
    if heads.fusion is None:
        state = hidden
    else:
        state = hidden[:, dim:]
        if layer.norm_features:
            state = rms_norm(state, (dim,), eps=layer.rms_norm_eps) * heads.feature_norm[0]
        state = linear(state, heads.fusion.weight)
    groups = layer.num_attention_heads // layer.num_key_value_heads
    cosines, sines = layer.angles(len(ids), hidden)
    keys, values, first = [], [], 0
    for end in range(len(text), len(ids) + 1):  # all of the text, then token by token
        embedded = base.embed(torch.tensor(ids[first + 1 : end]))
        both = torch.cat([heads.token_norm(embedded), heads.state_norm(state)], dim=-1)
        query, key, value = (
            linear(both, projection.weight).view(len(both), -1, layer.head_dim)
            for projection in (heads.q_proj, heads.k_proj, heads.v_proj)
        )
        places = torch.arange(first, end - 1)
        query, key = (turned(x, cosines[places, None], sines[places, None]) for x in (query, key))
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        scores = torch.einsum("lhd,thd->hlt", query, torch.cat(keys)) * layer.head_dim**-0.5
        scores = scores.masked_fill(torch.arange(end - 1) > places[:, None], -torch.inf)
        mixed = torch.einsum("hlt,thd->lhd", scores.softmax(-1), torch.cat(values)).flatten(1)
        state = state + linear(mixed, heads.o_proj.weight)
        normed = heads.mlp_norm(state)
        gated = silu(linear(normed, heads.gate_proj.weight)) * linear(normed, heads.up_proj.weight)
        out = (state + linear(gated, heads.down_proj.weight))[-1:]
        state, first = heads.output_norm(out) if layer.norm_output else out, end - 1
    return linear(heads.output_norm(out), heads.lm_heads[0])[0]


def turned(x, cosines, sines):
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosines[..., :4] - right * sines[..., :4], right * cosines[..., 4:] + left * sines[..., 4:]], -1)


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


@pytest.mark.parametrize("shape", [{"nodes": 9}, {"nodes": 1, "tree": Tree.full([2, 2, 1, 1])}], ids=["dynamic", "static"])
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
