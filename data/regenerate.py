"""Let the base answer prompts itself: heads learn what the base says, not what a corpus says.

Labels that the base itself wrote are on-policy: at serving time the heads predict exactly such text.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tqdm import tqdm

from data.sources import read_records
from data.stdlib import Split, chat_pairs, completion_prompts
from medusa import MedusaModel

PROMPT_TOKENS = 160
"""Most tokens of an embedded code prompt; longer ones lose their beginning."""


@dataclass(frozen=True)
class Settings:
    """How the base answers."""

    max_new_tokens: int = 128
    """Tokens per answer."""
    temperature: float = 0.0
    """0 = greedy."""
    seed: int = 0
    """Of sampled answers; each prompt adds its number."""
    batch: int = 64
    """Prompts decoded together."""


def embedded_prompts(model: MedusaModel, split: Split, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of ``count`` prompts from the standard library, half code to continue and half chat requests.

    The choice is a pure function of the split and the seed, and shorter lists are beginnings of longer ones.
    """
    tokenizer = model.base.tokenizer
    shuffled = random.Random(seed)
    code = list(completion_prompts(split))
    chat = list(chat_pairs(split))
    shuffled.shuffle(code)
    shuffled.shuffle(chat)
    prompts: list[list[int]] = []
    for code_text, pair in zip_longest(code, chat):
        if len(prompts) >= count:
            break
        if code_text is not None:
            ids = tokenizer(code_text[-4 * PROMPT_TOKENS :], add_special_tokens=False).input_ids[-PROMPT_TOKENS:]
            prompts.append(ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids])
        if pair is not None:
            prompts.append(model.chat_prompt(pair.messages[:1]))
    return prompts[:count]


def file_prompts(model: MedusaModel, path: str | Path) -> list[list[int]]:
    """Prompts of a sample file (see ``data.sources``), with or without answers: what stands before the first answer.

    Raises:
        ValueError: A line without a prompt.
    """
    prompts: list[list[int]] = []
    for number, record in read_records(path):
        turns = record.get("messages") or [{"role": "user", "content": record.get("prompt")}]
        answers = [i for i, turn in enumerate(turns) if turn.get("role") == "assistant"]
        asked = turns[: answers[0]] if answers else turns
        if not asked or not all(isinstance(turn.get("content"), str) for turn in asked):
            raise ValueError(f"{path}, line {number}: no prompt; give messages that begin with a user turn, or prompt")
        prompts.append(model.chat_prompt(asked))
    return prompts


def regenerate(model: MedusaModel, prompts: Sequence[Sequence[int]], out: str | Path, settings: Settings) -> int:
    """Answer the prompts with the base; write one ``{"input_ids", "loss_mask"}`` line each, the answer supervised.

    Lines are appended to ``OUT.part`` batch by batch, and the file gets its name when it is whole: a stopped run goes
    on where it was. Prompts that leave no room for an answer are left out.

    Args:
        model: The base (heads, where it has any, only make it faster).
        prompts: Token ids.
        out: The file.
        settings: How to answer.

    Returns:
        Supervised tokens in the file.

    Raises:
        ValueError: The unfinished file is damaged or was begun with other prompts or settings.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    room = model.base.context_length - settings.max_new_tokens
    fitting = sorted((list(prompt) for prompt in prompts if len(prompt) <= room), key=len)
    if not fitting:
        raise ValueError(f"prompts ({len(prompts)}) leave no room for {settings.max_new_tokens} tokens; shorten them")
    part = out.with_name(f"{out.name}.part")
    digest = hashlib.sha256(json.dumps(fitting).encode()).hexdigest()[:16]
    header = json.dumps({"base": model.base.name, "prompts": digest, **vars(settings)})
    done = _finished_lines(part, header)
    with part.open("a", encoding="utf-8") as file:
        if not done:
            file.write(header + "\n")
        starts = range(max(done - 1, 0), len(fitting), settings.batch)
        for start in tqdm(starts, desc=f"the base answers {len(fitting)} prompts", unit="batch", disable=not starts):
            batch = fitting[start : start + settings.batch]
            outputs = model.generate(
                batch,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=[settings.seed + start + row for row in range(len(batch))],
                nodes=1 if len(batch) > 1 else None,
            )
            for prompt, output in zip(batch, outputs, strict=True):
                ids = prompt + output.tokens
                mask = [0] * len(prompt) + [1] * len(output.tokens)
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
            file.flush()
    lines = part.read_text(encoding="utf-8").splitlines()[1:]
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(out)
    part.unlink()
    return sum(sum(json.loads(line)["loss_mask"]) for line in lines)


def _finished_lines(part: Path, header: str) -> int:
    """Whole lines of an unfinished file, its header included; a line that was cut off is removed."""
    if not part.exists():
        return 0
    content = part.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.decode("utf-8").splitlines()
    if lines and lines[0] != header:
        raise ValueError(f"unfinished file ({part}) was begun with other prompts or settings; remove it")
    if len(whole) < len(content):
        part.write_bytes(whole)
    return len(lines)
