"""The base answers in this process, through ``medusa``."""

from collections.abc import Generator, Sequence

from data.exchange import BATCH, Answered, Exchange, Message, Prompt, Settings, named, warn_of_ends
from medusa import MedusaModel, Output


class _Conversation:
    """One conversation as it grows."""

    def __init__(self, number: int, prompt: Prompt) -> None:
        self.number, self.prompt = number, prompt
        self.ids = list(prompt.ids)  # what the base reads next
        self.history: list[Message] = list(prompt.asked[0]) if prompt.asked else []
        self.questions = list(prompt.asked[1:])
        self.exchanges: list[Exchange] = []

    def take(self, output: Output) -> None:
        """Keep the answer to what was read."""
        self.exchanges.append(Exchange(self.ids, output.tokens))
        self.history.append({"role": "assistant", "content": output.text})


class LocalAnswerer:
    """Answers batches of conversations, turn by turn.

    Args:
        model: The base (heads, where it has any, make single conversations faster).
        settings: How to answer.
        batch: Conversations decoded together.
    """

    def __init__(self, model: MedusaModel, settings: Settings, batch: int = BATCH) -> None:
        self._model, self._settings, self._batch = model, settings, batch

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """See ``Answerer``; prompts need token ids, and batches of similar lengths are fastest.

        A conversation ends before a turn that the base's chat template refuses, or that leaves no room for an answer.
        """
        refused: list[str] = []
        for start in range(0, len(prompts), self._batch):
            batch = [_Conversation(number, prompt) for number, prompt in prompts[start : start + self._batch]]
            growing = batch
            while growing:
                for conversation, output in zip(growing, self._generate(growing), strict=True):
                    conversation.take(output)
                growing = [conversation for conversation in growing if self._ask(conversation, refused)]
            yield from ((conversation.number, conversation.exchanges) for conversation in batch)
        warn_of_ends(refused)

    def _generate(self, batch: Sequence[_Conversation]) -> list[Output]:
        return self._model.generate(
            [conversation.ids for conversation in batch],
            max_new_tokens=self._settings.max_new_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            seed=[self._settings.seed + conversation.number for conversation in batch],
            nodes=1 if len(batch) > 1 else None,
        )

    def _ask(self, conversation: _Conversation, refused: list[str]) -> bool:
        """Put the next question; false where there is none, a refused one, or no room for its answer."""
        if not conversation.questions:
            return False
        conversation.history += conversation.questions.pop(0)
        try:
            conversation.ids = self._model.chat_prompt(conversation.history)
        except ValueError as error:
            refused.append(named(conversation.prompt, error))
            return False
        return len(conversation.ids) <= self._model.base.context_length - self._settings.max_new_tokens
