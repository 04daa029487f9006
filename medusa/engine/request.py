"""One request, from its start to its end: its options, its cache and its completion."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa.acceptance import BuiltRule
from medusa.cache import CachedSequence, Observer
from medusa.engine.constraint import Constraint
from medusa.engine.output import Completion, Output
from medusa.sampling import SamplingParams, Speculation


@dataclass(eq=False)
class Request:
    """One request of a ``Batch``; everything else about it follows from these fields.

    Attributes:
        prompt: Token ids.
        params: How tokens are chosen.
        speculation: How tokens are drafted.
        rule: The acceptance rule that follows from both.
        observers: Layers of its drafters that read the hidden states of committed tokens.
        completion: The completion so far.
        constraint: A grammar that the completion must follow; None = anything.
        client: Name of the client; among waiting requests, the client with the fewest running requests comes first.
        priority: Lower numbers come first, before the order of clients.
        number: Its number in the order of arrival.
        sequence: The cached part of its text; None while it waits and after it has ended.
    """

    prompt: list[int]
    params: SamplingParams
    speculation: Speculation
    rule: BuiltRule
    completion: Completion
    observers: Sequence[Observer] = ()
    constraint: Constraint | None = None
    client: str = ""
    priority: int = 0
    number: int = 0
    sequence: CachedSequence | None = None

    @property
    def output(self) -> Output:
        """The completion so far."""
        return self.completion.output

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return self.completion.active

    @property
    def text(self) -> list[int]:
        """Token ids of the prompt and of the completion so far."""
        return self.prompt + self.output.tokens

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self.prompt) + len(self.output.tokens)

    @property
    def cached(self) -> CachedSequence:
        """``sequence`` of a request that has been admitted."""
        assert self.sequence is not None, "the request was admitted"
        return self.sequence

    @property
    def resumed(self) -> bool:
        """Whether it has decoded before. Its last token is then a root, which its next step computes."""
        return bool(self.output.tokens)

    @property
    def missing(self) -> int:
        """Tokens of its text that must be computed before it can decode."""
        return self.length - self.resumed - self.cached.length

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are still missing; for these all of the prompt must be computed."""
        told = self.output.prompt_logprobs
        return told is not None and len(told) < len(self.prompt)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key for preemption: if the cache is full, requests with the smallest key keep their place."""
        return self.priority, self.number

    @property
    def drafting(self) -> tuple[object, ...]:
        """Key of the drafter: requests with equal keys can share one."""
        wanted = self.speculation
        name = wanted.drafter if isinstance(wanted.drafter, str) else id(wanted.drafter)
        return wanted.heads, name, wanted.nodes, wanted.tree

    def close(self) -> None:
        """Free the cached part of the text, which others can find from now on; the request may be admitted again."""
        if self.sequence is not None:
            self.sequence.remember(self.text)
            self.sequence.close()
            self.sequence = None
