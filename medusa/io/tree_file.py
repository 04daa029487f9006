"""Static trees as JSON files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa.files import header, read_json, write_json
from medusa.tree import Tree

REMEDY = "make one with medusa.save_tree"


def save_tree(tree: Tree, path: str | Path, details: Mapping[str, Any] | None = None) -> None:
    """Write a tree as one JSON file, whole or not at all.

    Args:
        tree: The tree.
        path: The file.
        details: Further keys, for example the tree's origin and expected acceptance. Nothing reads them.
    """
    values = {"nodes": tree.nodes, "depth": tree.depth, "paths": tree.paths}
    write_json(Path(path), header("tree") | values | dict(details or {}))


def load_tree(path: str | Path) -> Tree:
    """Read a tree that ``save_tree`` wrote; the keys ``nodes`` and ``depth`` may be missing.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold a tree.
    """
    values = read_json(Path(path), "tree", REMEDY)
    try:
        tree = Tree(tuple(tuple(map(_rank, ranks)) for ranks in values["paths"]))
        for name in ("nodes", "depth"):
            if values.get(name, getattr(tree, name)) != getattr(tree, name):
                raise ValueError(f"{name} ({values[name]}) is not that of its paths ({getattr(tree, name)})")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tree ({path}) is damaged: {error!r}; {REMEDY}") from error
    return tree


def _rank(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a rank")
    return value
