"""Trees and drafts, and trees on the disk."""

import json

import pytest
import torch

from medusa import load_tree, save_tree
from medusa.tree import Draft, Tree, ancestor_mask


def test_a_tree_lists_its_nodes_by_depth_with_parents_before_children():
    tree = Tree(((1,), (0, 1), (0,), (0, 1, 0)))
    assert tree.paths == ((0,), (1,), (0, 1), (0, 1, 0))
    assert (tree.nodes, tree.depth, tree.width) == (5, 3, 2)
    assert Tree([[1], [0, 1], [0], [0, 1, 0]]) == tree
    assert tree.parents.tolist() == [0, 0, 0, 1, 3]
    draft = Draft.of(torch.arange(5)[None], tree.parents[None], tree.depth)
    assert draft.depths.tolist() == [[0, 1, 1, 2, 3]]
    assert draft.ancestors[0, 4].tolist() == [True, True, False, True, True]
    assert draft.ancestors[0, 2].tolist() == [True, False, True, False, False]


def test_full_and_chain_have_the_expected_sizes():
    assert Tree.full([3, 2]).nodes == 1 + 3 + 6
    assert Tree.chain(4).paths == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert Tree(()).nodes == 1


def test_ancestors_of_a_long_chain():
    for depth in range(1, 20):
        above = ancestor_mask(Tree.chain(depth).parents, depth)
        assert torch.equal(above, torch.ones(depth + 1, depth + 1).tril().bool())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (((0, 0),), "no parent"),
        (((0,), (0,)), "different"),
        (((),), "not empty"),
        (((-1,),), "no whole number from 0"),
        (((1.5,),), "no whole number"),
    ],
)
def test_broken_trees_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        Tree(paths)


def test_a_draft_is_where_its_tokens_are():
    draft = Draft.of(torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.zeros(2, 3, dtype=torch.int64), 2)
    assert {t.device.type for t in (draft.tokens, draft.parents, draft.depths, draft.ancestors)} == {"meta"}


def test_a_chain_draft_is_causal():
    draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    assert draft.ancestors[0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert draft.parents[0].tolist() == [0, 0, 1]
    assert draft.depth == 2


def test_trees_of_several_sizes_keep_their_nodes():
    parents = torch.tensor([[0, 0, 0, 1, 3], [0, 0, 1, 1, 0]])
    draft = Draft.of(torch.arange(10).view(2, 5), parents, 3)
    kept = draft.keeping(torch.tensor([[True, True, False, True, True], [True, False, False, False, True]]))
    assert kept.sizes == (4, 2)
    assert kept.tokens[0].tolist() == [0, 1, 3, 4]
    assert kept.parents[0].tolist() == [0, 0, 1, 2]
    assert (kept.tokens[1, :2].tolist(), kept.parents[1].tolist()) == ([5, 9], [0, 0, 0, 0])
    assert kept.real.tolist() == [[True] * 4, [True, True, False, False]]
    joined = kept.join(draft)
    assert joined.sizes == (8, 6)
    assert joined.tokens[1, :6].tolist() == [5, 9, 6, 7, 8, 9]
    assert joined.parents[1, :6].tolist() == [0, 0, 0, 2, 2, 0]
    assert draft.keeping(torch.ones(2, 5, dtype=torch.bool)).sizes is None


def test_trees_survive_the_disk(tmp_path):
    tree = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
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
        ({"paths": [[0], [-1]]}, "damaged: .*no whole number"),
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
