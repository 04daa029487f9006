"""What designs cost and save on this machine: the time of a draft, and the speed of whole calls beside plain decoding.

One base serves all heads, one prompt at a time; ways of decoding take turns, and speeds are compared within a round.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.study.evaluate import tree_drafters
from benchmarks.study.texts import Texts
from benchmarks.study.transcript import Transcript
from medusa import MedusaModel
from medusa.clock import alternate, seconds
from medusa.drafters import Drafter, PlainDrafter
from medusa.formats import load_heads

PROPOSALS = 16
"""Drafts, at different places of a text, whose median is one measurement."""
PLAIN = ("plain decoding", "")


class Way:
    """One way to decode prompts greedily.

    Attributes:
        tokens: Of the last round.
        steps: Verify passes of the last round.
    """

    def __init__(self, model: MedusaModel, drafter: Drafter, texts: Texts, prompts: int) -> None:
        self._model, self._drafter = model, drafter
        every = max(1, len(texts.questions.prompts) // prompts)  # they are sorted by length
        self._texts, self._prompts = texts, [list(prompt) for prompt in texts.questions.prompts[::every][:prompts]]
        self.tokens = self.steps = 0

    def rate(self) -> float:
        """Tokens per second over all prompts, prefill included."""
        spent = seconds(self._decode, self._model.base.device)
        return self.tokens / spent

    def _decode(self) -> None:
        limit, drafter = self._texts.questions.max_new_tokens, self._drafter
        outputs = [self._model.generate(prompt, max_new_tokens=limit, drafter=drafter) for prompt in self._prompts]
        self.tokens, self.steps = sum(len(output.tokens) for output in outputs), sum(output.steps for output in outputs)

    @torch.inference_mode()
    def draft_ms(self) -> float:
        """Median time of a draft for one sequence."""
        base, answer = self._model.base, next(iter(self._texts.answers.values()))[0]
        transcript = Transcript.of(base, self._prompts[:1], [answer])
        roots = torch.arange(int(transcript.first), int(transcript.last), device=base.device)[:PROPOSALS, None]
        states = [transcript.state(torch.zeros_like(root), root) for root in roots]
        return 1e3 * median(seconds(lambda at=state: self._drafter.propose(at), base.device) for state in states)  # type: ignore[misc]


def measure_speed(
    texts: Texts, heads: Mapping[str, Path], trees: Mapping[str, Any], prompts: int, rounds: int, compiled: bool
) -> dict[str, Any]:
    """Time greedy decoding and drafts.

    Args:
        texts: The study's prompts.
        heads: Directory of each variant's heads.
        trees: Paths of each variant's static tree, for those that have one.
        prompts: So many of the study's prompts are decoded, of all lengths.
        rounds: Measurements of each way.
        compiled: Compile the base's pass.

    Returns:
        By variant and tree ("dynamic 16"): "draft_ms", the median over rounds; "speedups" over plain decoding and
        "tokens_per_s", one per round; "tokens_per_step". Plain decoding is a variant of one tree, "".
    """
    base = MedusaModel.from_pretrained(None, base=texts.questions.base, compiled=compiled).base
    ways = {PLAIN: Way(MedusaModel(base), PlainDrafter(), texts, prompts)}
    for name, directory in heads.items():
        model = MedusaModel(base, load_heads(directory, dtype=base.dtype, device=base.device))
        for tree, drafter in tree_drafters(model, texts.questions, trees.get(name)).items():
            ways[name, tree] = Way(model, drafter, texts, prompts)
    with tqdm(desc="speed", total=2 * len(ways) * (rounds + 1), unit="measurement") as bar:
        rates = alternate({key: _shown(way.rate, bar) for key, way in ways.items()}, rounds)
        drafts = alternate({key: _shown(way.draft_ms, bar) for key, way in ways.items()}, rounds)
    figures: dict[str, Any] = {}
    for (name, tree), way in ways.items():
        own = rates[name, tree]
        figures.setdefault(name, {})[tree] = {
            "draft_ms": median(drafts[name, tree]),
            "speedups": [rate / plain for rate, plain in zip(own, rates[PLAIN], strict=True)],
            "tokens_per_s": own,
            "tokens_per_step": way.tokens / way.steps,
        }
    return figures


def _shown(measure: Callable[[], float], bar: Any) -> Callable[[], float]:
    """The same measurement; the bar moves on after it."""

    def measured() -> float:
        value = measure()
        bar.update()
        return value

    return measured
