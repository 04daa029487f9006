"""Reads YAML files that people write: recipes, mixtures of prompts, variants of a study."""

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML readers take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See ``SafeLoader``."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]} is there twice, {str(node.start_mark).strip()}")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file in UTF-8.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no YAML, not in UTF-8, or has a key twice; the text is one line.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
