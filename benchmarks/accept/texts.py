"""The base's greedy answers to questions: generated once, then read from a file; a stopped run can be continued."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from tqdm import tqdm

from medusa import MedusaModel
from medusa.data.exchange import Prompt, Settings, UnansweredError, samples
from medusa.data.local import LocalAnswerer
from medusa.data.sources import read_samples
from medusa.files import cache_directory

Known = dict[tuple[int, ...], list[int]]
"""Answers by prompt."""


def usual_file(model: MedusaModel) -> Path:
    """The default file of this base's answers."""
    base = model.base
    what = json.dumps([base.name, base.source, base.adapter, str(base.dtype), base.int8])
    name = f"{Path(base.name).name}-{hashlib.sha256(what.encode()).hexdigest()[:8]}.jsonl"
    return cache_directory() / "texts" / name


def known_answers(
    model: MedusaModel, prompts: Sequence[list[int]], path: Path, max_new_tokens: int
) -> tuple[list[list[int]], int]:
    """Answers to prompts: from a file, or generated and added to the file one by one.

    Args:
        model: The model whose base answers greedily.
        prompts: Token ids of the prompts.
        path: Samples in any form that ``data.sources`` reads; created if missing.
        max_new_tokens: Longer answers are cut. Shorter ones that did not end by themselves are generated again.

    Returns:
        The answers, and the number of newly generated ones.

    Raises:
        ValueError: The file holds something else, or lacks answers and is not a file of JSON lines.
    """
    known = _read(model, path)
    missing = [prompt for prompt in prompts if not _whole(model, prompt, known, max_new_tokens)]
    if missing and path.suffix != ".jsonl":
        raise ValueError(
            f"texts ({path}) lack {len(missing)} answers, and JSON lines alone get more; name a .jsonl file"
        )
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        answerer = LocalAnswerer(model, Settings(max_new_tokens=max_new_tokens))
        asked = [(number, Prompt(ids=tuple(prompt))) for number, prompt in enumerate(missing)]
        with path.open("a", encoding="utf-8") as file, closing(answerer.answer(asked)) as answered:
            for number, exchanges in tqdm(answered, "the base answers", len(missing), unit="text"):
                assert not isinstance(exchanges, UnansweredError), "this process answers all that fits"
                file.writelines(json.dumps(sample) + "\n" for sample in samples(exchanges))
                file.flush()
                known[tuple(missing[number])] = exchanges[0].answer
    return [known[tuple(prompt)][:max_new_tokens] for prompt in prompts], len(missing)


def _read(model: MedusaModel, path: Path) -> Known:
    """The answers in a file; the longest if there are several to one prompt."""
    known: Known = {}
    if not path.exists():
        return known
    if path.suffix == ".jsonl":
        _mend(path)
        if not path.stat().st_size:
            return known
    for sample in read_samples(path, model.base.tokenizer, model.base.vocab_size):
        prompt, ids, mask = tuple(sample.prompt), sample.input_ids.tolist(), sample.loss_mask.tolist()
        end = next((place for place in range(len(prompt), len(ids)) if not mask[place]), len(ids))
        answer = ids[len(prompt) : end]
        if len(answer) > len(known.get(prompt, ())):
            known[prompt] = answer
    return known


def _mend(path: Path) -> None:
    """Add a missing line end to a file, or remove its last line if it is incomplete."""
    *lines, last = path.read_bytes().split(b"\n")
    if last:
        with suppress(ValueError):
            json.loads(last)
            lines.append(last)
        path.write_bytes(b"\n".join([*lines, b""]))


def _whole(model: MedusaModel, prompt: list[int], known: Known, max_new_tokens: int) -> bool:
    """Whether the known answer to a prompt is complete."""
    answer, room = known.get(tuple(prompt), ()), model.base.context_length - len(prompt)
    return len(answer) >= min(max_new_tokens, room) or bool(answer and answer[-1] in model.base.eos_ids)
