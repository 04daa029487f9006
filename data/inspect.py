"""Shows samples as the trainer sees them, with the supervised tokens marked (`medusa data inspect`)."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from medusa.data import load_tokenizer, vocabulary_of
from medusa.data.chat import special_tokens
from medusa.data.shapes import visible
from medusa.data.sources import Source, samples

TRAINED, MASKED, SPECIAL, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def marked_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[int], *, coloured: bool = False
) -> str:
    """A document's text with visible special tokens; supervised text is between ⟦ and ⟧ or in colour.

    Control characters of the text are escaped, so that a data set cannot control the terminal.
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


def inspect(options: argparse.Namespace, logger: logging.Logger) -> None:
    """Run the subcommand: print samples to standard output, or write them with statistics to a JSON file.

    Raises:
        ValueError, OSError: the source or the base's tokenizer cannot be read, or the sample does not exist.
    """
    tokenizer = load_tokenizer(options.base)
    source = Source(options.source, options.split, options.subset, options.streaming, options.limit)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and not options.json
    lengths, shown, trained_tokens = [], [], 0
    for number, sample in enumerate(samples(source, tokenizer, vocabulary_of(options.base))):
        lengths.append(len(sample.input_ids))
        trained = int(sample.loss_mask.sum())
        trained_tokens += trained
        if options.index <= number < options.index + options.count:
            ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
            text = marked_text(tokenizer, ids, mask, coloured=coloured)
            shown.append({"index": number, "text": text})
            if not options.json:
                sys.stdout.write(f"--- sample {number}: {len(ids)} tokens, {trained} trained\n{text}\n")
    if options.count and not shown:
        raise ValueError(f"sample (--index {options.index}) does not exist; the {len(lengths)} begin at 0")
    figures = {
        "samples": len(lengths), "tokens": sum(lengths), "trained_tokens": trained_tokens, "longest": max(lengths),
        "cut": sum(length > options.row_tokens for length in lengths),
    }  # fmt: skip
    if options.json:
        report = {"source": options.source, "row_tokens": options.row_tokens, **figures, "shown": shown}
        Path(options.json).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    read = f"at most {options.limit} records" if options.limit else "all records"
    logger.info(
        "%d samples of %s: %d tokens, %d trained (%.1f %%), longest %d, %d cut at %d tokens",
        figures["samples"], read, figures["tokens"], trained_tokens, 100 * trained_tokens / figures["tokens"],
        figures["longest"], figures["cut"], options.row_tokens,
    )  # fmt: skip
