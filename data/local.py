"""Answers of the base in this process, through ``medusa``."""

import random
from collections import deque
from collections.abc import Generator, Sequence

from medusa import MedusaModel, Output, Request, SamplingParams, Speculation
from medusa.data.exchange import BATCH, Answered, Exchange, Message, Prompt, Settings, named, warn_of_ends

JOIN = 8
"""Number of free places in the batch at which further conversations join."""


def sampling_params(settings: Settings, number: int) -> SamplingParams:
    """The sampling parameters of a conversation; the numbers of another seed draw other texts."""
    return SamplingParams(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=random.Random(f"{settings.seed}/{number}").getrandbits(31),
    )


class _Conversation:
    """One conversation in progress."""

    def __init__(self, number: int, prompt: Prompt) -> None:
        self.number, self.prompt = number, prompt
        self.ids = list(prompt.ids)  # what the base reads next
        self.history: list[Message] = list(prompt.asked[0]) if prompt.asked else []
        self.questions = list(prompt.asked[1:])
        self.exchanges: list[Exchange] = []

    def take(self, output: Output) -> None:
        """Add the answer to the conversation."""
        self.exchanges.append(Exchange(self.ids, output.tokens))
        self.history.append({"role": "assistant", "content": output.text})


class LocalAnswerer:
    """Answers conversations turn by turn; when one ends, another takes its place in the batch.

    Args:
        model: The base; heads, if it has any, make single conversations faster.
        settings: How answers are generated.
        batch: Number of conversations that are decoded together.
        speculation: How answers are drafted; None = plain decoding of batches, the fastest drafter for single
            conversations.
    """

    def __init__(
        self, model: MedusaModel, settings: Settings, batch: int = BATCH, speculation: Speculation | None = None
    ) -> None:
        self.model, self._settings, self._batch, self._speculation = model, settings, batch, speculation

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """See ``Answerer``; prompts need token ids.

        A conversation ends before a turn that the base's chat template refuses or that leaves no room for an answer.
        """
        refused: list[str] = []
        waiting = deque(_Conversation(number, prompt) for number, prompt in prompts)
        together = min(self._batch, len(prompts)) > 1
        speculation = self._speculation or Speculation(nodes=1 if together else None)
        batch, growing = self.model.batch(), dict[Request, _Conversation]()
        try:
            while waiting or growing:
                # Several prompts join at once, because a pass over few tokens costs as much as one over more.
                if self._batch - len(growing) >= min(JOIN, self._batch) or not growing:
                    while waiting and len(growing) < self._batch:
                        conversation = waiting.popleft()
                        params = sampling_params(self._settings, conversation.number)
                        growing[batch.add(conversation.ids, params, speculation)] = conversation
                for request in batch.step():
                    if request.active:
                        continue
                    conversation = growing.pop(request)
                    conversation.take(request.output)
                    if self._ask(conversation, refused):
                        waiting.appendleft(conversation)
                    else:
                        yield conversation.number, conversation.exchanges
        finally:
            for request in growing:
                batch.remove(request)
        warn_of_ends(refused)

    def _ask(self, conversation: _Conversation, refused: list[str]) -> bool:
        """Ask the next question; false if there is none, if it is refused, or if there is no room for its answer."""
        if not conversation.questions:
            return False
        conversation.history += conversation.questions.pop(0)
        try:
            conversation.ids = self.model.chat_prompt(conversation.history)
        except ValueError as error:
            refused.append(named(conversation.prompt, error))
            return False
        return len(conversation.ids) <= self.model.base.context_length - self._settings.max_new_tokens
