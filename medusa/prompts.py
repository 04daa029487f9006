"""Prompts as users give them, as token ids."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | Tensor
Prompts = list[str] | list[list[int]] | Tensor


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Prompt | Prompts) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether there was one prompt rather than a batch.

    Raises:
        ValueError: They are neither text nor token ids, or there is none.
    """
    values: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(values, str | list | tuple):
        raise ValueError(f"prompts ({values!r}) are neither text nor token ids; give a string or a list")
    if isinstance(values, list | tuple):
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    single = isinstance(values, str) or (len(values) > 0 and not isinstance(values[0], str | list | tuple))
    batch = [values] if single else list(values)
    if not batch:
        raise ValueError("prompts (an empty list) hold nothing to complete; give at least one prompt")
    encoded = [list(tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt) for prompt in batch]
    return encoded, single


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    name: str,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation, rendered with the base's chat template up to where the answer begins.

    Args:
        tokenizer: The base's.
        messages: The conversation.
        name: Of the base, for errors.
        tools: What the template describes to the model.

    Raises:
        ValueError: There is no chat template, or it refuses the conversation or knows no tools.
    """
    template = tokenizer.chat_template
    if not template:
        raise ValueError(f"base ({name}) has no chat template; use plain prompts or another base")
    if tools and "tools" not in str(template):
        raise ValueError(f"chat template of the base ({name}) knows no tools; leave them out, or use another base")
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, return_dict=False
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"chat template of the base ({name}) refuses this: {error}") from error
    return ids
