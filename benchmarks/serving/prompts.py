"""Prompts as text: held-out ones of all kinds in turn, or those of a file."""

import json
from pathlib import Path

from data.chat_prompts import chat_prompts


def read_prompts(path: str | None, count: int) -> list[str]:
    """The first turns of ``count`` held-out prompts, or of at most so many of a file.

    Args:
        path: JSON lines of {"prompt": ..}, or of {"turns": [..]} as Spec-Bench and MT-bench have them; None = held-out
            prompts.
        count: Prompts.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is no prompt, or there is none.
    """
    if path is None:
        return [prompt.turns[0] for prompt in chat_prompts("heldout", count)]
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
            prompts.append(str(values["prompt"] if "prompt" in values else values["turns"][0]))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            remedy = 'give lines of {"prompt": ..} or {"turns": [..]}'
            raise ValueError(f"{path}:{number} is no prompt; {remedy}") from error
    if not prompts:
        raise ValueError(f"prompts ({path}) are none; give a file with lines")
    return prompts[:count]


def part(prompts: list[str], number: int, of: int) -> list[str]:
    """All prompts, beginning with part ``number`` of so many: no level asks what the one before has just asked."""
    start = len(prompts) * number // of
    return prompts[start:] + prompts[:start]
