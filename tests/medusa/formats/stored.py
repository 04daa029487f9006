"""Heads in a directory of any format."""

from pathlib import Path

from medusa.formats import find_format


def load_config(directory):
    return find_format(directory).read_config(Path(directory))
