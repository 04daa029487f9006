"""What the base writes after held-out prompts: the texts that drafts are compared with.

Greedy and sampled output are the base's own whatever the drafter does, so they are made once, by plain decoding, and
every design is measured on the same ones.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from medusa import MedusaModel
from medusa.files import replace_file

BATCH = 32
"""Prompts that are decoded together."""


@dataclass(frozen=True)
class Questions:
    """What every design is asked."""

    base: str
    """Directory or Hub id of the base."""
    nodes: tuple[int, ...]
    """Sizes N of dynamic trees, the root included, all above 1 (which is plain decoding)."""
    static_nodes: int
    """Size of the baseline's static tree."""
    temperatures: tuple[float, ...]
    """Of the texts; the first one is 0."""
    max_new_tokens: int
    """Tokens of a text."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""


@dataclass(frozen=True)
class Texts:
    """The questions, and what the base answers: a file of the study."""

    questions: Questions
    answers: dict[str, list[list[int]]]
    """By temperature, token ids of one text per prompt."""

    @property
    def digest(self) -> str:
        """Names this content: figures of equal digests can be compared."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        replace_file(path, lambda beside: beside.write_text(self._json(), encoding="utf-8"))

    def _json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_texts(path: Path) -> Texts:
    """Read what `Texts.write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        asked = {key: tuple(value) if isinstance(value, list) else value for key, value in content["questions"].items()}
        return Texts(Questions(**asked | {"prompts": tuple(map(tuple, asked["prompts"]))}), content["answers"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"texts ({path}) are damaged; delete the file to have them made again") from None


def make_texts(model: MedusaModel, questions: Questions) -> Texts:
    """Let the base write its texts by plain decoding; prompt i is drawn with seed i."""
    answers: dict[str, list[list[int]]] = {}
    for temperature in questions.temperatures:
        texts = answers[str(temperature)] = []
        for start in range(0, len(questions.prompts), BATCH):
            batch = [list(prompt) for prompt in questions.prompts[start : start + BATCH]]
            seeds, limit = list(range(start, start + len(batch))), questions.max_new_tokens
            outputs = model.generate(batch, max_new_tokens=limit, temperature=temperature, seed=seeds, nodes=1)
            texts += [output.tokens for output in outputs]
    return Texts(questions, answers)
