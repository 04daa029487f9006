"""Static trees survive the disk, and dynamic ones beat them where heads know their chances."""

import json
import math
from itertools import product

import pytest
import torch

from medusa import Tree, load_tree, save_tree
from medusa.drafters import HeadsDrafter
from medusa.state import DecodeState


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
    chances = [[(texts[:batch, head + 1] == ranked[:, rank]).double().mean().item() for rank in range(4)]
               for head, ranked in enumerate(_ranked(heads, hidden[:batch], texts[:batch, :3], base))]  # fmt: skip
    paths = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    survival = {path: math.prod(chances[head][rank] for head, rank in enumerate(path)) for path in paths}
    paths.sort(key=lambda path: (-survival[path], len(path)))  # no node is likelier than its parent

    zeros = torch.zeros(batch, dtype=torch.int64)
    state = DecodeState(texts[batch:, 0], hidden[batch:], zeros == 0, texts[batch:], zeros, zeros, zeros)

    def tokens_per_step(drafter):
        draft = drafter.propose(state)
        right = draft.tokens == texts[batch:].gather(1, draft.depths)
        accepted = (right[:, None] | ~draft.ancestors).all(-1)
        return 1 + (draft.depths * accepted).amax(1).double().mean().item()

    for nodes in (2, 4, 8, 16, 32):
        static = tokens_per_step(HeadsDrafter(heads, base, nodes, Tree(tuple(paths[: nodes - 1]))))
        dynamic = tokens_per_step(HeadsDrafter(heads, base, nodes, host_decides=False))
        assert dynamic >= static > 1.05


def _ranked(heads, hidden, texts, base):
    """Each head's tokens, the best first."""
    features = heads(hidden, texts, base)
    return [heads.head_logits(head, features[head], base).argsort(descending=True) for head in range(3)]
