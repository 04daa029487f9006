"""Shows samples as the trainer sees them: what is masked, what is trained on (`medusa-data inspect`)."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data import load_tokenizer
from data.chat import special_tokens
from data.shapes import visible
from data.sources import Sample, Source, samples

TRAINED, MASKED, SPECIAL, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


@dataclass
class Figures:
    """Sums over samples."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    """Tokens of the longest sample."""
    cut: int = 0
    """Samples that are longer than a row."""

    def add(self, sample: Sample, row_tokens: int) -> None:
        """Count one sample; row_tokens is the length of a row."""
        length = len(sample.input_ids)
        self.samples += 1
        self.tokens += length
        self.trained_tokens += int(sample.loss_mask.sum())
        self.longest = max(self.longest, length)
        self.cut += length > row_tokens


def marked_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[int], *, coloured: bool = False
) -> str:
    """A document's text, special tokens visible, with what is trained on between ⟦ and ⟧ or in colour.

    Control characters of the text are written out: a data set may not colour, move or rename a terminal.
    """
    parts = []
    for trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        text = visible(str(tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)))
        if coloured:
            colour = TRAINED if trained else MASKED
            text = special_tokens(tokenizer).sub(rf"{SPECIAL}\g<0>{PLAIN}{colour}", text)
            parts.append(f"{colour}{text}{PLAIN}")
        else:
            parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)


def collect(found: Iterable[Sample], row_tokens: int, index: int, count: int) -> tuple[Figures, list[Sample]]:
    """Figures over all samples, and the samples index .. index + count - 1."""
    figures, shown = Figures(), []
    for number, sample in enumerate(found):
        figures.add(sample, row_tokens)
        if index <= number < index + count:
            shown.append(sample)
    return figures, shown


def inspect(options: argparse.Namespace, logger: logging.Logger) -> None:
    """Run the subcommand: samples go to standard output, or with the figures to a JSON file.

    Raises:
        ValueError, OSError: the source or the base's tokenizer cannot be read, or the sample does not exist.
    """
    tokenizer = load_tokenizer(options.base)
    source = Source(options.source, options.split, options.subset, options.streaming, options.limit)
    figures, shown = collect(samples(source, tokenizer), options.row_tokens, options.index, options.count)
    if options.count and not shown:
        raise ValueError(f"sample (--index {options.index}) does not exist; the {figures.samples} begin at 0")
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and not options.json
    texts = [
        marked_text(tokenizer, sample.input_ids.tolist(), sample.loss_mask.tolist(), coloured=coloured)
        for sample in shown
    ]
    if options.json:
        report: dict[str, Any] = {"source": options.source, "row_tokens": options.row_tokens, **asdict(figures)}
        report["shown"] = [{"index": options.index + place, "text": text} for place, text in enumerate(texts)]
        Path(options.json).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        for number, (sample, text) in enumerate(zip(shown, texts, strict=True), start=options.index):
            trained = int(sample.loss_mask.sum())
            sys.stdout.write(f"--- sample {number}: {len(sample.input_ids)} tokens, {trained} trained\n{text}\n")
    read = f"at most {options.limit} records" if options.limit else "all records"
    logger.info(
        "%d samples of %s: %d tokens, %d trained (%.1f %%), longest %d, %d cut at %d tokens",
        figures.samples, read, figures.tokens, figures.trained_tokens,
        100 * figures.trained_tokens / figures.tokens, figures.longest, figures.cut, options.row_tokens,
    )  # fmt: skip
