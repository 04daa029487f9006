"""Prompts by kind: the repository's held-out prompts, or a question file in the format of Spec-Bench and MT-bench."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa import MedusaModel
from medusa.data.exchange import Message
from medusa.data.files import file_records

MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
"""Categories of MT-bench, which are one category of Spec-Bench."""

Kinds = dict[str, list[int]]
"""Name of a kind -> indices of its prompts."""


def questions(model: MedusaModel, path: str | Path | None, count: int) -> tuple[list[list[int]], Kinds]:
    """``count`` questions of each category of a file, see ``file_questions``; without a file, held-out prompts.

    Held-out prompts of the embedded base are from its own corpus: functions of the standard library, to continue or to
    write.
    """
    from medusa.base.names import is_embedded

    if path:
        return file_questions(model, path, count)
    if not is_embedded(model.base.name):
        return chat_questions(model, count)
    from medusa.data.prompts import embedded_prompts

    prompts = embedded_prompts(model, "heldout", count)
    return prompts, {"python": list(range(len(prompts)))}


def chat_questions(model: MedusaModel, count: int) -> tuple[list[list[int]], Kinds]:
    """``count`` held-out prompts of ``data.chat_prompts`` as token ids, and their kinds."""
    from medusa.data.chat_prompts import chat_prompts

    asked = chat_prompts("heldout", count)
    return [model.chat_prompt(prompt.asked[0]) for prompt in asked], _group([prompt.kind for prompt in asked])


def file_questions(model: MedusaModel, path: str | Path, per_kind: int) -> tuple[list[list[int]], Kinds]:
    """The first turns of the first ``per_kind`` questions of each category, and the categories.

    Args:
        model: The model whose chat template is used; prompts that leave no room in its context are skipped.
        path: Records of {"turns": [...]}, or in any form that ``data.sources`` reads except text; "category" is
            optional. JSON lines, or a file or directory that ``file_records`` reads.
        per_kind: Questions per category.

    Raises:
        OSError: The file cannot be read.
        ValueError: A record is not a question, or no question is left.
    """
    prompts: list[list[int]] = []
    kinds: list[str] = []
    for place, question in file_records(path):
        try:
            kind, asked = str(question.get("category", "prompts")), _first_turn(question)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f'{place} is not a question; give lines of {{"category": .., "turns": [..]}}, {{"prompt": ..}}'
                ' or {"messages": [..]}'
            ) from error
        kind = "mt_bench" if kind in MT_BENCH else kind
        ids = list(asked) if isinstance(asked, tuple) else model.chat_prompt(asked)
        if kinds.count(kind) < per_kind and len(ids) < model.base.context_length // 2:
            prompts.append(ids)
            kinds.append(kind)
    if not prompts:
        raise ValueError(f"questions ({path}) hold none that fits the context; give another file")
    return prompts, _group(kinds)


def _first_turn(question: Mapping[str, Any]) -> list[Message] | tuple[int, ...]:
    """The first question as messages, or as token ids if the sample has them."""
    from medusa.data.prompts import asked

    if "input_ids" in question:
        ids, mask = question["input_ids"], question["loss_mask"]
        return tuple(ids[: mask.index(1)])
    if "turns" in question:
        return [{"role": "user", "content": str(question["turns"][0])}]
    return list(asked(question)[0])


def _group(kinds: list[str]) -> Kinds:
    return {kind: [at for at, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
