"""Trees that several tests decode with."""

from medusa import Tree

LOPSIDED = Tree(((0,), (1,), (5,), (0, 0), (0, 3), (1, 2), (1, 2, 0), (1, 2, 4), (0, 3, 1)))


def paths(draft, row):
    """Tokens from the root on to each node of one tree, without the root's."""
    found = [()]
    for node in range(1, draft.row_sizes[row]):
        found.append((*found[draft.parents[row, node]], int(draft.tokens[row, node])))
    return found


def by_path(draft, row):
    """The scores of one tree's nodes by their paths."""
    return dict(zip(paths(draft, row), draft.scores[row].tolist(), strict=False))
