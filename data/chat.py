"""Renders conversations with the tokenizer's chat template, and marks the assistant's tokens.

If a template marks the assistant's text with `{% generation %}`, these marks are used. Any other template is rendered
twice per answer: the conversation up to the answer with the generation prompt, and the conversation with the answer.
The additional text of the second is the assistant's: its words, and the special token after them that ends its turn.

Templates may rewrite what came before (Qwen3 drops earlier reasoning, Mistral moves the system turn to the last
question). If an answer is not in the whole conversation in its original form, it gets a separate document that ends
with it: exactly the text that the base saw when it answered.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

Tokens = tuple[list[int], list[int]]
"""Token ids, and a mask: 1 for tokens of the assistant, otherwise 0."""
Message = Mapping[str, Any]

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


class NoAnswerError(ValueError):
    """A valid sample without a token of the assistant, so that it cannot be used for training."""


@dataclass(frozen=True)
class _Answer:
    """One turn of the assistant as text."""

    asked: str
    """The text before the answer."""
    said: str
    """The assistant's text, including the end of its turn."""

    @property
    def text(self) -> str:
        return self.asked + self.said


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Tokens:
    """The document of `documents` that ends with the last answer; for arguments and errors see there."""
    return documents(tokenizer, messages)[-1]


def documents(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Tokens]:
    """Render a conversation: as one document, or as several if the template rewrites earlier turns.

    Turns after the last answer and answers before the first question are left out.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: {"role", "content"} per turn.

    Returns:
        Token ids and mask per document, in the order of their last answers; each answer is marked in one document.

    Raises:
        NoAnswerError: there is no turn of the assistant.
        ValueError: there is no template, the template refuses the conversation, answers cannot be distinguished from
            the rest, or the mask marks nothing or everything.
    """
    _check_template(tokenizer)
    messages = _answered(messages)
    try:
        if _GENERATION.search(str(tokenizer.get_chat_template())):
            found = [_marked(tokenizer, messages)]
        else:
            found = _compared(tokenizer, messages)
    except TemplateError as error:
        raise _refused(messages, error) from error
    for tokens in found:
        _check(tokenizer, messages, *tokens)
    return found


def question(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Tokens:
    """What the base reads to answer the first question of a conversation; nothing is marked.

    Raises:
        NoAnswerError: there is no question.
        ValueError: there is no template, or it refuses the conversation.
    """
    _check_template(tokenizer)
    asked = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        raise NoAnswerError(f"conversation ({_excerpt(messages)!r}) has no question; give it a user turn")
    try:
        ids: Any = tokenizer.apply_chat_template(
            list(messages[: asked + 1]),
            add_generation_prompt=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except TemplateError as error:
        raise _refused(messages, error) from error
    return list(ids), [0] * len(ids)


@lru_cache(maxsize=2)  # large vocabularies have hundreds, and every answer needs it
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern that matches any special token in a text; if the tokenizer has none, it matches nothing."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted({*added, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _answered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation from its first question to its last answer."""
    kept: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant" or any(turn["role"] != "system" for turn in kept):
            kept.append(dict(message))
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    if not kept:
        raise NoAnswerError(
            f"conversation ({_excerpt(messages)!r}) has no answer; give it a user turn and an assistant turn after it"
        )
    return kept


def _marked(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Tokens:
    quiet = {"verbose": False}  # rows are cut, so texts longer than the base's context are valid
    rendered: Any = _untrimmed(tokenizer).apply_chat_template(
        messages,
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenizer_kwargs=quiet,
    )
    return list(rendered["input_ids"]), [int(mark) for mark in rendered["assistant_masks"]]


def _compared(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[Tokens]:
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    left = [_answer(tokenizer, messages[: place + 1]) for place in places]
    found = []
    while left:
        text = left[-1].text
        here = [answer for answer in left if text.startswith(answer.text)]
        left = [answer for answer in left if answer not in here]
        found.append(_tokens(tokenizer, text, [(len(answer.asked), len(answer.text)) for answer in here]))
    return found[::-1]


def _answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> _Answer:
    """The last turn of a conversation, which must be the assistant's."""
    asked = str(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
    whole, said = _whole_and_said(tokenizer, messages, asked)
    if not said:
        raise ValueError(
            f"conversation ({_excerpt(messages)!r}): the chat template renders no answer behind its generation prompt"
            f" ({asked[-40:]!r} is not in {whole[-200:]!r}), so the assistant's tokens are unknown; put "
            "{% generation %} ... {% endgeneration %} around them in the template"
        )
    marks = _last_marks(tokenizer, said)
    if len(marks) > 1:  # for example the end of a tool call before the end of the turn; a plain answer shows the latter
        _, plain = _whole_and_said(tokenizer, [*messages[:-1], {"role": "assistant", "content": "x"}], asked)
        ends = _last_marks(tokenizer, plain or "")
        marks = [mark for mark in marks if ends and mark[0] == ends[0][0]] or marks
    return _Answer(asked, said[: marks[0].end()] if marks else said)


def _whole_and_said(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], asked: str
) -> tuple[str, str | None]:
    """The text of a conversation that ends with an answer, and its part after the question."""
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    if whole.startswith(asked):
        return whole, whole.removeprefix(asked)
    return whole, _after_opening(special_tokens(tokenizer), asked, whole)


def _last_marks(tokenizer: PreTrainedTokenizerBase, said: str) -> list[re.Match[str]]:
    """The special tokens after an answer's words; one of them ends the turn."""
    marks = list(special_tokens(tokenizer).finditer(said))
    first, words = len(marks), len(said)
    while first and not said[marks[first - 1].end() : words].strip():
        first -= 1
        words = marks[first].start()
    return marks[first:]


def _after_opening(special: re.Pattern[str], asked: str, whole: str) -> str | None:
    """The text after the last opening of an answer, which is the question's last special token and all after it."""
    marks = list(special.finditer(asked))
    if not marks:
        return None
    opening = asked[marks[-1].start() :]
    if whole.count(opening) != asked.count(opening):  # missing, or also in the answer's words
        return None
    return whole.rpartition(opening)[2]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> Tokens:
    """Tokens of a text; tokens inside a span of characters are marked, tokens across its edge are not."""
    if not tokenizer.is_fast:
        return _tokens_by_length(tokenizer, text, spans)
    encoded = _untrimmed(tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    firsts, ends = zip(*encoded["offset_mapping"], strict=True)
    mask = [0] * len(firsts)
    for start, stop in spans:
        for place in range(bisect_left(firsts, start), bisect_left(firsts, stop)):
            mask[place] = int(firsts[place] < ends[place] <= stop)
    return list(encoded["input_ids"]), mask


@lru_cache(maxsize=2)
def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy whose offsets include spaces; GPT-NeoX's and Cohere's omit them, so indentation has no characters."""
    if not tokenizer.is_fast:
        return tokenizer
    exact: Any = deepcopy(tokenizer)
    exact.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return exact


def _tokens_by_length(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> Tokens:
    """``_tokens`` without character offsets: the tokens before a cut must be those of the text before it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    mask = [0] * len(ids)
    for span in spans:
        before = [tokenizer(text[:cut], add_special_tokens=False)["input_ids"] for cut in span]
        if any(ids[: len(part)] != part for part in before):
            raise ValueError(
                f"tokenizer ({tokenizer.name_or_path}) joins text across the edge of an answer ({text[slice(*span)]!r})"
                " and reports no offsets; use its fast version"
            )
        start, stop = map(len, before)
        mask[start:stop] = [1] * (stop - start)
    return ids, mask


def _check(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ids: list[int], mask: list[int]) -> None:
    if any(mask) and not all(mask):
        return
    marked, text = "all" if any(mask) else "none", str(tokenizer.decode(ids))[:400]
    raise ValueError(
        f"conversation ({_excerpt(messages)!r}) has {marked} of its {len(ids)} tokens marked as the assistant's in "
        f"{text!r}; correct its turns, or the marks of the chat template"
    )


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer ({tokenizer.name_or_path}) has no chat template; set one, or give samples as text or input_ids"
        )


def _refused(messages: Sequence[Message], error: TemplateError) -> ValueError:
    return ValueError(
        f"conversation ({_excerpt(messages)!r}) is refused by the chat template: {error}; correct its turns"
    )


def _excerpt(messages: Sequence[Message]) -> str:
    text = " / ".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    return text if len(text) <= 60 else f"{text[:57]}..."
