"""Heads in a directory of any format."""

import json
from pathlib import Path

from medusa.formats import find_format


def load_config(directory):
    return find_format(directory).read_config(Path(directory))


def change_config(directory, **values):
    """Write other values into the config of heads."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
