"""Grown trees are the best there are, and their figures are what simulation gives."""

import json
import random
from itertools import combinations, pairwise, product

import pytest
import torch

from medusa import Calibration, Tree, load_tree
from medusa.budget.calibration import count_ranks
from medusa.budget.tree_search import GrownTree, grow_tree
from medusa.drafters import HeadsDrafter
from medusa.io.tree_file import save_tree
from medusa.state import DecodeState

FALLING = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]]
NOISY = [[0.1, 0.5, 0.2], [0.05, 0.4, 0.45]]


def survival(path, accuracies):
    value = 1.0
    for depth, rank in enumerate(path):
        value *= accuracies[depth][rank]
    return value


@pytest.mark.parametrize("accuracies", [FALLING, NOISY], ids=["falling", "noisy"])
@pytest.mark.parametrize("nodes", range(1, 7))
def test_no_other_tree_is_better(accuracies, nodes):
    """Against every tree of that size."""
    everything = [path for depth in (1, 2) for path in product(range(3), repeat=depth)]
    best = max(
        1 + sum(survival(path, accuracies) for path in chosen)
        for chosen in combinations(everything, nodes - 1)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    grown = grow_tree(accuracies, nodes)
    assert grown.tree.nodes == nodes
    assert grown.tokens_per_step == pytest.approx(best)
    assert grown.survivals == pytest.approx([survival(path, accuracies) for path in grown.tree.paths])


def test_larger_trees_hold_smaller_ones_up_to_all_there_is():
    trees = [set(grow_tree(FALLING, nodes).tree.paths) for nodes in range(1, 20)]
    assert all(small <= large for small, large in pairwise(trees))
    assert trees[12] == trees[-1] == set(Tree.full((3, 3)).paths)


def test_nodes_that_never_survive_are_left_out():
    assert grow_tree([[0.5, 0.0], [0.0, 0.0]], 16) == GrownTree(Tree(((0,),)), (0.5,))
    assert grow_tree([], 16) == GrownTree(Tree(()), ())
    with pytest.raises(ValueError, match=r"nodes \(0\) must be at least 1"):
        grow_tree(FALLING, 0)


def test_expected_tokens_are_those_of_a_simulation():
    """Steps in which each head's label has rank r with its probability, by itself."""
    grown, draw = grow_tree(NOISY, 6), random.Random(0)
    inside, steps, tokens = set(grown.tree.paths), 40_000, 0
    for _ in range(steps):
        ranks = [draw.choices([0, 1, 2, 3], [*row, 1 - sum(row)])[0] for row in NOISY]
        tokens += 1 + sum(tuple(ranks[:depth]) in inside for depth in (1, 2))
    assert grown.tokens_per_step == pytest.approx(tokens / steps, abs=0.02)


def test_trees_survive_the_disk(tmp_path):
    tree = grow_tree(NOISY, 6).tree
    save_tree(tree, tmp_path / "tree.json", {"tokens_per_step": 1.9})
    assert load_tree(tmp_path / "tree.json") == tree
    values = json.loads((tmp_path / "tree.json").read_text())
    assert (values["nodes"], values["depth"], values["tokens_per_step"]) == (6, 2, 1.9)
    save_tree(Tree(()), tmp_path / "tree.json")
    assert load_tree(tmp_path / "tree.json").nodes == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "medusa-heads"}, "not of the format 'medusa-tree'"),
        ({"paths": [[0], [1, 0]]}, r"damaged: .*has no parent \(1,\)"),
        ({"paths": [[0], [-1]]}, "damaged: .*negative rank"),
        ({"paths": [[0], ["1"]]}, "damaged: .*'1' is not a rank"),
        ({"paths": [[]]}, "damaged"),
        ({"paths": [0]}, "damaged"),
        ({"nodes": 9}, r"damaged: .*nodes \(9\) is not that of its paths \(3\)"),
        ({"depth": 1}, r"damaged: .*depth \(1\)"),
    ],
)
def test_damaged_trees_are_refused(tmp_path, change, message):
    save_tree(Tree.chain(2), tmp_path / "tree.json")
    (tmp_path / "tree.json").write_text(json.dumps(json.loads((tmp_path / "tree.json").read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_tree(tmp_path / "tree.json")


@pytest.mark.parametrize("architecture", ["medusa", "recurrent"])
def test_where_heads_know_their_chances_dynamic_trees_beat_the_best_static_ones(base, make_heads, architecture):
    """Texts are drawn from the heads themselves; accuracies are counted on one half, trees tried on the other."""
    heads, batch, generator = make_heads(3, architecture=architecture), 2000, torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(2 * batch, base.hidden_size, dtype=base.dtype, generator=generator)
    texts = torch.zeros(2 * batch, 4, dtype=torch.int64)
    for head in range(3):
        law = heads.head_logits(head, heads(hidden, texts[:, :3], base)[head], base).softmax(-1)
        texts[:, head + 1] = torch.multinomial(law, 1, generator=generator)[:, 0]
    counts = count_ranks(heads, base, hidden[:batch], texts[:batch, :3], texts[:batch, 1:])
    accuracies = Calibration.of(counts, {}).accuracies

    zeros = torch.zeros(batch, dtype=torch.int64)
    state = DecodeState(texts[batch:, 0], hidden[batch:], zeros == 0, texts[batch:], zeros, zeros, zeros)

    def tokens_per_step(drafter):
        draft = drafter.propose(state)
        right = draft.tokens == texts[batch:].gather(1, draft.depths)
        accepted = (right[:, None] | ~draft.ancestors).all(-1)
        return 1 + (draft.depths * accepted).amax(1).double().mean().item()

    for nodes in (2, 4, 8, 16, 32):
        grown = grow_tree(accuracies, nodes)
        static = tokens_per_step(HeadsDrafter(heads, base, nodes, grown.tree))
        dynamic = tokens_per_step(HeadsDrafter(heads, base, nodes, host_decides=False))
        assert dynamic >= static > 1.05
        assert grown.tokens_per_step == pytest.approx(static, rel=0.1)
