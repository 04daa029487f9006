"""Renders conversations with the tokenizer's chat template and marks what the assistant said."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    """Render a conversation.

    Args:
        tokenizer: a tokenizer whose chat template marks the assistant's text with `{% generation %}`.
        messages: {"role", "content"} per turn.

    Returns:
        Token ids, and 1 for each token that the assistant wrote, else 0.

    Raises:
        ValueError: no template, no generation marks, or a mask that marks nothing or everything (marks that the
            tokenizer lost would silently train on the prompts).
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer ({tokenizer.name_or_path}) has no chat template; set one, or give samples as text or input_ids"
        )
    if not _GENERATION.search(str(tokenizer.get_chat_template())):
        raise ValueError(
            f"chat template of the tokenizer ({tokenizer.name_or_path}) has no {{% generation %}} marks, so the "
            "assistant's tokens are unknown; put {% generation %} ... {% endgeneration %} around them in the template"
        )
    try:
        rendered: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_assistant_tokens_mask=True, return_dict=True
        )
    except TemplateError as error:
        raise ValueError(
            f"conversation ({_excerpt(messages)!r}) is refused by the chat template: {error}; correct its turns"
        ) from error
    ids, mask = list(rendered["input_ids"]), [int(mark) for mark in rendered["assistant_masks"]]
    if all(mask) or not any(mask):
        marked = "all" if ids and all(mask) else "none"
        raise ValueError(
            f"conversation ({_excerpt(messages)!r}) has {marked} of its {len(ids)} tokens marked as the assistant's; "
            "give it a user turn and an assistant turn that is not empty"
        )
    return ids, mask


def _excerpt(messages: Sequence[Mapping[str, str]]) -> str:
    text = " / ".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    return text if len(text) <= 60 else f"{text[:57]}..."
