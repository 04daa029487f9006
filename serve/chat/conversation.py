"""State of a chat: what was said, and how answers are generated. Nothing here knows a model or a terminal."""

import json
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from medusa.sampling import SAMPLING, SamplingParams, Speculation

Message = dict[str, str]
"""One entry of a prompt: ``role`` (system, user or assistant) and ``content``."""


@dataclass(frozen=True)
class Settings:
    """How answers are generated; the fields are options of ``MedusaModel.stream``.

    Attributes:
        max_new_tokens: Longest answer, in tokens.
        temperature: 0 is greedy; above it, tokens are sampled.
        top_p: Sample from the smallest set of tokens with this much probability; 1 is off.
        top_k: Sample from this many most likely tokens; 0 is off.
        repetition_penalty: Above 1, tokens that occurred before become less likely; 1 is off.
        seed: Of the sampling noise.
        acceptance: Rule that accepts draft tokens; None is greedy at temperature 0, else sampling.
        nodes: Tree budget with the root, in tokens per verify pass; 1 is plain decoding, None is the model's choice.
        drafter: What guesses, a name of ``Speculation.drafter``; None is whoever is fastest. The text does not depend
            on it, except under speculative and typical acceptance.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    acceptance: str | None = None
    nodes: int | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        chosen = {name: value for name, value in asdict(self).items() if name in SAMPLING}
        SamplingParams(**chosen)
        Speculation(drafter=self.drafter, acceptance=self.acceptance, nodes=self.nodes)
        if self.acceptance and (self.acceptance == "greedy") != (self.temperature == 0):
            raise ValueError(
                f"acceptance ({self.acceptance}) does not go with temperature {self.temperature}: greedy needs 0, the"
                " others more; change one of them, or set acceptance to auto"
            )
        if self.drafter == "heads-sampled" and self.temperature == 0:
            raise ValueError(
                f"drafter ({self.drafter}) does not go with temperature {self.temperature}: it draws, which needs more;"
                " change one of them, or set drafter to auto"
            )

    @property
    def lossy(self) -> bool:
        """Whether answers may differ from what the base alone would write."""
        return self.acceptance == "typical"


def tree_budget(text: str) -> int | None:
    """Parse a value of ``nodes`` as the user writes it.

    Raises:
        ValueError: If it is neither a whole number nor ``auto``.
    """
    return None if text == "auto" else int(text)


class Turn(NamedTuple):
    """A user's message and the answer to it."""

    user: str
    answer: str


@dataclass
class Conversation:
    """System prompt and finished turns; a message becomes part of it together with its answer."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, forget: int = 0) -> list[Message]:
        """The conversation as chat templates take it, without its ``forget`` oldest turns."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[forget:]:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def prompt(self, message: str, forget: int = 0) -> list[Message]:
        """:meth:`messages`, and a new message of the user after them."""
        return [*self.messages(forget), {"role": "user", "content": message}]

    def turns_to_forget(self, message: str, fits: Callable[[list[Message]], bool]) -> int:
        """Fewest oldest turns to leave out of the prompt for ``message``.

        Args:
            message: The user's new message.
            fits: Whether a prompt is short enough; the system prompt is always part of it.

        Returns:
            A number of turns; one more than there are when ``message`` does not fit even alone.
        """
        return bisect_left(range(len(self.turns) + 1), True, key=lambda n: fits(self.prompt(message, forget=n)))


def save(path: Path, conversation: Conversation, settings: Settings) -> None:
    """Write messages and settings as JSON, whole or not at all.

    Raises:
        OSError: If the file cannot be written; a file that was there before is unharmed.
    """
    text = json.dumps({"messages": conversation.messages(), "settings": asdict(settings)}, indent=2, ensure_ascii=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[Conversation, Settings]:
    """Read what :func:`save` wrote.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not UTF-8, not JSON, or not a conversation; the message says what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); name a file that /save wrote") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); name a file that /save wrote") from None
    try:
        if not isinstance(content, dict) or not isinstance(content.get("settings", {}), dict):
            raise ValueError('expected an object {"messages": [...], "settings": {...}}')
        return _conversation(content.get("messages")), Settings(**content.get("settings", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a saved conversation: {error}") from None


def _conversation(messages: object) -> Conversation:
    """Check a list of messages: an optional system prompt, then user and assistant in turn."""
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
