"""Answers of the base through an OpenAI-compatible server (vLLM, SGLang, TGI, llama.cpp)."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from itertools import islice

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from medusa.data.chat import render
from medusa.data.chat_completions import GIVE_UP_AFTER, ChatClient, Completion, EndpointError
from medusa.data.exchange import Answered, Exchange, Message, Prompt, UnansweredError, named, warn_of_ends


class EndpointAnswerer:
    """Answers many conversations concurrently through chat completions.

    Token ids are the server's own if it returns them (vLLM does). Otherwise its text is tokenised with the base's chat
    template. The template then adds an end-of-turn token, which is removed if a limit cut the answer.

    Args:
        connect: Makes the client; called in the event loop of the requests.
        tokenizer: The base's tokenizer.
        concurrency: Number of concurrent conversations.
        seed: Seed of sampled answers.
    """

    def __init__(
        self, connect: Callable[[], ChatClient], tokenizer: PreTrainedTokenizerBase, concurrency: int, seed: int
    ) -> None:
        self._connect, self._tokenizer, self._concurrency, self._seed = connect, tokenizer, concurrency, seed
        self._rendered = False
        self._refused = 0  # conversations before the first that the template accepts
        self._ends: list[str] = []

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """See ``Answerer``; prompts need no token ids.

        Raises:
            EndpointError: The server cannot be reached, refuses the key, does not have the model, or is down.
        """
        with asyncio.Runner() as runner:
            answers = self._answers(prompts)
            while (answered := runner.run(_next(answers))) is not None:
                yield answered
        warn_of_ends(self._ends)

    async def _answers(self, prompts: Sequence[tuple[int, Prompt]]) -> AsyncGenerator[tuple[int, Answered]]:
        waiting, running = iter(prompts), set[asyncio.Task[tuple[int, Answered | EndpointError]]]()
        async with self._connect() as client:
            while True:
                for number, prompt in islice(waiting, self._concurrency - len(running)):
                    running.add(asyncio.create_task(self._converse(client, number, prompt)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for number, answered in [task.result() for task in done]:
                    if isinstance(answered, EndpointError):
                        raise answered
                    yield number, answered

    async def _converse(self, client: ChatClient, number: int, prompt: Prompt) -> tuple[int, Answered | EndpointError]:
        """Answer all turns of a conversation; it ends at a later turn that gets no answer."""
        history: list[Message] = []
        exchanges: list[Exchange] = []
        try:
            for turn, asked in enumerate(prompt.asked):
                history += asked
                seed = random.Random(f"{self._seed}/{number}/{turn}").getrandbits(31)
                completion = await client.complete(history, seed)
                exchanges.append(self._exchange(history, completion))
                history.append({"role": "assistant", "content": completion.text})
        except EndpointError as error:
            return number, error
        except UnansweredError as error:
            if exchanges:
                self._ends.append(named(prompt, error))
            return number, exchanges or error
        return number, exchanges

    def _exchange(self, messages: Sequence[Message], completion: Completion) -> Exchange:
        """The tokens of an answer: from the server, or from its text."""
        if not completion.ids:
            return self._tokenised(messages, completion)
        if max(*completion.prompt_ids, *completion.ids) >= len(self._tokenizer):
            raise EndpointError(
                f"endpoint returns a token id ({max(*completion.prompt_ids, *completion.ids)}) that the tokenizer"
                f" ({self._tokenizer.name_or_path}) does not have; give the base that the server runs as --base"
            )
        return Exchange(completion.prompt_ids, completion.ids)

    def _tokenised(self, messages: Sequence[Message], completion: Completion) -> Exchange:
        try:
            ids, mask = render(self._tokenizer, [*messages, {"role": "assistant", "content": completion.text}])
        except ValueError as error:
            # A template that cannot render the first answer cannot render any; one that refuses turns may take others.
            refused = isinstance(error.__cause__, TemplateError)
            self._refused += refused
            hopeless = not self._rendered and (not refused or self._refused >= GIVE_UP_AFTER)
            raise (EndpointError if hopeless else UnansweredError)(str(error)) from error
        self._rendered = True
        stop = len(mask) - mask[::-1].index(1)
        start = max((place for place in range(stop) if not mask[place]), default=-1) + 1
        answer = self._without_end(ids[start:stop]) if completion.cut else ids[start:stop]
        if not answer:
            raise UnansweredError("endpoint sent an empty answer")
        return Exchange(ids[:start], answer)

    def _without_end(self, answer: list[int]) -> list[int]:
        """An answer without its last special token, the end of the turn that the template added."""
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        ends = [place for place, token in enumerate(answer) if token in special]
        return answer[: ends[-1]] if ends else answer


async def _next(answers: AsyncGenerator[tuple[int, Answered]]) -> tuple[int, Answered] | None:
    return await anext(answers, None)
