"""A Hub repository with which plain transformers decodes: native heads, and the code that reads them beside them."""

import shutil
from functools import partial
from pathlib import Path

from medusa.attention import spans
from medusa.files import replace_file
from medusa.formats.base import Export
from medusa.formats.native import WEIGHTS, Native
from medusa.loading import layer_check

CODE = "custom_generate"
"""Where transformers looks for code."""
REPOSITORY = Path(__file__).with_name("repository")
"""The code, copied as it is."""
SHARED = {"layer_check.py": Path(layer_check.__file__), "spans.py": Path(spans.__file__)}
"""Files of this package that the code needs, in the place of those that import them."""
ARCHITECTURES = ("medusa", "markov", "hydra", "recurrent")
"""Those whose drafting ``repository/heads.py`` knows."""


class CustomGenerate(Native):
    """``model.generate(custom_generate=DIR, trust_remote_code=True)`` decodes with the heads, this package or not."""

    name = "custom-generate"
    summary = "plain transformers: model.generate(custom_generate=DIR, trust_remote_code=True)"
    architectures = ARCHITECTURES

    def matches(self, directory: Path) -> bool:
        """By the code and the weights."""
        return (directory / CODE / "generate.py").is_file() and (directory / WEIGHTS).is_file()

    def write(self, export: Export, directory: Path) -> None:
        """The code, then the heads as the native format has them."""
        (directory / CODE).mkdir(exist_ok=True)
        for source in REPOSITORY.glob("*.*"):
            source = SHARED.get(source.name, source)
            replace_file(directory / CODE / source.name, partial(shutil.copyfile, source))
        super().write(export, directory)
