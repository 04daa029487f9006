"""Heads in a directory, by the name of a format."""

from pathlib import Path

from medusa.formats import find_format, named_format


def load_config(directory):
    return find_format(directory).read_config(Path(directory))


def export_heads(export, name, directory):
    return named_format(name).save(export, Path(directory))
