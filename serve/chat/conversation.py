"""State of a chat: its messages and the options of generation. It does not depend on a model or a terminal."""

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from medusa.files import read_object, replace_text
from medusa.sampling import RULES, SAMPLING, SamplingParams, Speculation
from medusa.serve.flags import flag

Message = dict[str, str]
"""One entry of a prompt: ``role`` (system, user or assistant) and ``content``."""


def whole_or_auto(text: str) -> int | None:
    """Parse a user's value; raises ValueError unless it is a whole number or ``auto``."""
    return None if text == "auto" else int(text)


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are generated: fields are options of ``MedusaModel.stream``, and flags of the command line.

    Raises:
        ValueError: A value is out of its range, or values cannot be combined.
    """

    max_new_tokens: int = flag(512, "longest answer, in tokens", int, "N")
    temperature: float = flag(0.0, "0 is greedy, above it tokens are sampled (default: %(default)s)", float, "X")
    top_p: float = flag(
        1.0,
        "sample from the most likely tokens that together have this probability (default: %(default)s, off)",
        float,
        "P",
    )
    top_k: int = flag(0, "sample from this many most likely tokens (default: %(default)s, off)", int, "N")
    min_p: float = flag(
        0.0,
        "sample from tokens with at least this share of the best token's probability (default: %(default)s, off)",
        float,
        "P",
    )
    repetition_penalty: float = flag(
        1.0, "above 1, tokens that occurred before become less likely (default: %(default)s, off)", float, "X"
    )
    seed: int | None = flag(None, "seed of sampling (default: a new one for each answer, shown below it)", int, "N")
    acceptance: str | None = flag(
        None,
        "how draft tokens are accepted. greedy and sampling are lossless: the answer is that of the base alone."
        " speculative is lossless in distribution: answers are as likely as those of the base alone, but differ from"
        " them for a given seed. typical is LOSSY: faster, but answers can differ (default: greedy at temperature 0,"
        " else sampling)",
        choices=RULES,
    )
    nodes: int | None = flag(
        None,
        "tree budget, in tokens per verify pass; 1 is plain decoding (default: auto, the size with the most tokens per"
        " second, measured while it runs)",
        whole_or_auto,
        "N",
    )
    drafter: str | None = flag(
        None,
        "what drafts: heads, prompt-lookup (what followed the last words earlier in the text), ngram (and in earlier"
        " answers), draft-model, early-exit (the base's first layers), mtp, or several of them joined by +; hybrid is"
        " heads+prompt-lookup; heads-sampled draws from the heads, for speculative acceptance. Under greedy and"
        " sampling the answer does not depend on it (default: auto, the fastest that the model has)",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        chosen = {name: value for name, value in asdict(self).items() if name in SAMPLING}
        SamplingParams(**chosen)
        Speculation(drafter=self.drafter, acceptance=self.acceptance, nodes=self.nodes)
        if self.acceptance and (self.acceptance == "greedy") != (self.temperature == 0):
            raise ValueError(
                f"acceptance ({self.acceptance}) cannot be combined with temperature {self.temperature}: greedy needs"
                " 0, the others more; change one of them, or leave acceptance open (auto)"
            )
        if self.drafter == "heads-sampled" and self.temperature == 0:
            raise ValueError(
                f"drafter ({self.drafter}) cannot be combined with temperature {self.temperature}: sampling needs more;"
                " change one of them, or leave drafter open (auto)"
            )

    @property
    def lossy(self) -> bool:
        """Whether answers may differ from those of the base alone."""
        return self.acceptance == "typical"


class Turn(NamedTuple):
    """A user's message and the answer to it."""

    user: str
    answer: str


@dataclass
class Conversation:
    """System prompt and finished turns; a message is added together with its answer."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, forget: int = 0) -> list[Message]:
        """The conversation in the form of chat templates, without its ``forget`` oldest turns."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[forget:]:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def prompt(self, message: str, forget: int = 0) -> list[Message]:
        """:meth:`messages`, followed by a new message of the user."""
        return [*self.messages(forget), {"role": "user", "content": message}]

    def turns_to_forget(self, message: str, fits: Callable[[list[Message]], bool]) -> int:
        """The smallest number of oldest turns to leave out of the prompt for ``message``.

        Args:
            message: The user's new message.
            fits: Tests whether a prompt is short enough; the system prompt is always part of it.

        Returns:
            A number of turns; one more than there are if ``message`` does not fit even alone.
        """
        return bisect_left(range(len(self.turns) + 1), True, key=lambda n: fits(self.prompt(message, forget=n)))


def save(path: Path, conversation: Conversation, settings: GenerationOptions) -> None:
    """Write messages and settings as JSON, whole or not at all.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
    """
    text = json.dumps({"messages": conversation.messages(), "settings": asdict(settings)}, indent=2, ensure_ascii=False)
    try:
        replace_text(path, text + "\n")
    except (OSError, ValueError) as error:  # the original message names a temporary file
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"file ({path}) cannot be written: {reason}; choose another place") from error


def load(path: Path) -> tuple[Conversation, GenerationOptions]:
    """Read what :func:`save` wrote.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not JSON, or not a conversation; the message says what is wrong.
    """
    content = read_object(path, "conversation", "name a file that /save wrote")
    try:
        if not isinstance(settings := content.get("settings", {}), dict):
            raise ValueError("settings must be an object")
        return _conversation(content.get("messages")), GenerationOptions(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"conversation ({path}) is damaged: {error}; name a file that /save wrote") from None


def _conversation(messages: object) -> Conversation:
    """Check a list of messages: an optional system prompt, then user and assistant alternately."""
    if not isinstance(messages, list):
        raise ValueError("messages must be a list")
    for index, message in enumerate(messages):
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f'messages[{index}] must be an object {{"role": text, "content": text}}')
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    said = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if [message["role"] for message in said] != ["user", "assistant"] * (len(said) // 2):
        raise ValueError("messages must alternate user and assistant, after an optional system prompt")
    texts = [message["content"] for message in said]
    return Conversation(system, [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)])
