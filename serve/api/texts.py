"""Texts and token ids, with the base's tokenizer and chat template."""

import inspect
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any

from medusa import BaseModel
from medusa.prompts import render_messages
from medusa.serve.api.errors import refused, too_long
from medusa.serve.api.messages import Function, Message, Tool, text_of
from medusa.serve.api.protocol import Rendering, TokenizeRequest
from medusa.serve.api.reasoning import Writing
from medusa.serve.grammar import Grammars
from medusa.serve.reading import ENDING, template_of

KWARGS = "chat_template_kwargs"
ALPHANUMERIC = re.compile("[^a-zA-Z0-9]")
LONGEST_TOKEN = 64
"""Most characters per token of the context; longer texts are refused without encoding."""


class Texts:
    """Works with a copy of the base's tokenizer, for one thread at a time: tokenizers are not thread-safe.

    Args:
        base: The base.
        name: Name of the base, for errors.
        grammars: Has the bytes of its tokens.
    """

    def __init__(self, base: BaseModel, name: str, grammars: Grammars) -> None:
        self.tokenizer: Any = deepcopy(base.tokenizer)
        self._name, self._context, self._grammars = name, base.context_length, grammars
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        self.special = base.special_ids
        self.writing = Writing.of(template_of(self.tokenizer))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text."""
        self._check_length(len(text), "prompt")
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def ending(self, prompt: Sequence[int]) -> str:
        """The text of a prompt's last tokens, special ones included."""
        return self.decode(prompt[-ENDING:])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self.tokenizer.decode(tokens)
        return text

    def prepare(self) -> None:
        """Read the bytes of all tokens, which takes long the first time."""
        self._grammars.token_bytes(0)

    def _token(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and its bytes, which may be parts of characters.

        Not by the tokenizer: of a token alone, SentencePiece's leave out the first space.
        """
        raw = self._grammars.token_bytes(token)
        return raw.decode(errors="replace"), raw

    def render(
        self, messages: Sequence[Message], rendering: Rendering, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation up to the beginning of the answer.

        Raises:
            ApiError: There is no template, or it refuses the conversation.
        """
        said = [_plain(message, self.writing.short_ids) for message in messages]
        try:
            self._check_length(len(json.dumps([said, tools], ensure_ascii=False)), "messages")
            return render_messages(self.tokenizer, said, self._name, tools, self._options(rendering))
        except RecursionError as error:
            raise refused("messages or tools are nested too deep; make them flatter", "messages") from error
        except ValueError as error:
            lacking = tools and "tools" not in template_of(self.tokenizer)
            raise refused(str(error), "tools" if lacking else "messages") from error

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The answer of /tokenize.

        Raises:
            ApiError: There is nothing to encode, or too much.
        """
        if (body.prompt is None) == (body.messages is None):
            raise refused("give a prompt or messages, one of them", "prompt")
        if body.messages is None:
            tokens = self.encode(body.prompt or "", body.add_special_tokens is not False)
        else:
            tokens = self.render(body.messages, body, described(body.tools or ()))
            if body.add_special_tokens:
                tokens = self.encode(self.decode(tokens))
        names = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": self._context, "tokens": tokens, "token_strs": names}

    def _options(self, rendering: Rendering) -> dict[str, Any]:
        begun = rendering.continue_final_message
        if begun and rendering.add_generation_prompt and "add_generation_prompt" in rendering.model_fields_set:
            message = "continue_final_message and add_generation_prompt exclude each other; set one of them"
            raise refused(message, "continue_final_message")
        values = rendering.chat_template_kwargs or {}
        own = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages", "self"}
        if taken := values.keys() & own:
            raise refused(f"chat_template_kwargs ({min(taken)}) is no value of a template; leave it out", KWARGS)
        if effort := rendering.reasoning_effort:
            values = {"reasoning_effort": effort, "enable_thinking": effort != "none", **values}
        generation = rendering.add_generation_prompt and not begun
        return {**values, "add_generation_prompt": generation, "continue_final_message": begun}

    def _check_length(self, characters: int, where: str) -> None:
        """Refuse text that is too long, before it is encoded."""
        if characters > LONGEST_TOKEN * self._context:
            raise too_long(self._context, f"the text has {characters} characters", where)


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the format of chat templates."""
    known = set(Function.model_fields)
    return [
        {"type": tool.type, "function": tool.function.model_dump(exclude_none=True, include=known)} for tool in tools
    ]


def _plain(message: Message, short_ids: bool = False) -> dict[str, Any]:
    """A message in the format of chat templates; some take ids of calls with nine letters and digits only."""
    short = (lambda text: ALPHANUMERIC.sub("", text)[-9:].rjust(9, "0")) if short_ids else str
    said: dict[str, Any] = {"role": message.role, "content": text_of(message.content) or message.refusal or ""}
    for name in ("name", "reasoning_content"):
        if value := getattr(message, name):
            said[name] = value
    if message.reasoning_content and not (message.tool_calls and said["content"]):
        said["thinking"] = message.reasoning_content  # GPT-OSS's template has this name, and not beside both of these
    if message.tool_call_id:
        said["tool_call_id"] = short(message.tool_call_id)
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": short(call.id), "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
            for call in message.tool_calls
            for arguments in [_read(call.function.arguments)]
        ]
    said["role"] = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    return said


def _read(arguments: str) -> Any:
    """Arguments of a call as an object, because templates convert them to JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(arguments)
    return arguments
