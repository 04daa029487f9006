"""Converts prompts of users to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Prompt = str | list[int] | Tensor
Prompts = list[str] | list[list[int]] | Tensor


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Prompt | Prompts) -> tuple[list[list[int]], list[bool], bool]:
    """Token ids of every prompt, whether each was text, and whether there was one prompt rather than a batch.

    Raises:
        ValueError: The prompts are neither text nor token ids, or there is none.
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
    ids = [_token_ids(tokenizer, prompt, number) for number, prompt in enumerate(batch, 1)]
    return ids, [isinstance(prompt, str) for prompt in batch], single


def _token_ids(tokenizer: PreTrainedTokenizerBase, prompt: Any, number: int) -> list[int]:
    if isinstance(prompt, str):
        try:
            return list(tokenizer(prompt).input_ids)
        except TypeError as error:  # what is no Unicode, as half of a surrogate pair
            raise ValueError(f"prompt {number} ({prompt!r}) cannot be encoded; give Unicode text") from error
    if not isinstance(prompt, list | tuple):
        raise ValueError(
            f"prompt {number} ({prompt!r}) is neither text nor token ids; give a string or a list of numbers"
        )
    if prompt and isinstance(prompt[0], Mapping):
        raise ValueError(f"prompt {number} ({prompt!r}) is a conversation; convert it with chat_prompt first")
    return list(prompt)


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    name: str,
    tools: Sequence[dict[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, rendered with the base's chat template up to where the answer begins.

    Args:
        tokenizer: The base's tokenizer.
        messages: The conversation.
        name: Name of the base, for errors.
        tools: Tools that the template describes to the model.
        options: Further arguments of ``apply_chat_template``, and values for the template.

    Raises:
        ValueError: It is not a conversation, or the chat template is missing, refuses it or does not support tools.
    """
    given: Any = messages
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, Mapping) for each in given):
        raise ValueError(
            f'messages ({messages!r}) are no conversation; give a list as [{{"role": "user", "content": "Hello"}}]'
        )
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"base ({name}) has no chat template; give one (chat and serve: --chat-template), use plain prompts, or"
            " another base"
        )
    if tools and "tools" not in str(template):
        raise ValueError(f"chat template of the base ({name}) has no tools; leave them out, or use another base")
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            return_dict=False,
            **{"add_generation_prompt": True, **(options or {})},
        )
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat template of the base ({name}) refuses this: {error}") from error
    return ids
