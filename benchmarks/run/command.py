"""``medusa-bench run``: from flags to the report."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.decoding.inputs import trained
from benchmarks.decoding.report import environment
from benchmarks.peers.process import BATCHING, MODES, Engine, engines
from benchmarks.run.measure import figures, measure
from benchmarks.run.methods import AUTO, LOSSY, PLAIN, Answers, Method, ended, of_transformers, ours
from benchmarks.run.report import markdown, show
from data import resolve_base_name, shipped_heads
from medusa import MedusaModel
from medusa.base import smollm2
from medusa.files import replace_file, write_json
from medusa.formats import Export, export_heads, refusal
from serve.demo.compare import repeated_share, unpacked_copy
from serve.demo.questions import questions

SKIPPED = ("early-exit", "ngram", "heads-sampled")
"""Drafters that are measured where they are asked for: they are slower than plain decoding, or need texts of before."""
VLLM = "vllm"
"""The format of heads that vLLM reads."""


def run(options: argparse.Namespace) -> None:
    """Measure, and write, draw and print the report."""
    options.heads = options.heads or (None if options.base else shipped_heads("smollm2"))
    small = resolve_base_name(options.draft_model) if options.draft_model else None
    model = trained(options, draft_model=small)
    prompts, kinds = questions(model, options.questions, options.count)
    report: dict[str, Any] = {
        "base": "/".join(Path(model.base.name).parts[-2:]), "source": model.base.source, "heads": options.heads,
        "dtype": str(model.base.dtype).removeprefix("torch."), **environment(model.base.device, options.words),
        "prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "rounds": options.rounds, "runs": [],
    }  # fmt: skip
    room = max(map(len, prompts)) + options.max_new_tokens + 8  # some want a little more than they use
    with _peers(options, model, room, report["versions"]) as others:
        copy, draft = unpacked_copy(model.base), _draft_model(options, model)
        for temperature in options.temperature:
            methods = [
                *_ours(options, model, temperature),
                *of_transformers(copy, model.base.eos_ids, options.max_new_tokens, temperature, draft),
                *([] if temperature else others),
            ]
            for batch in options.batch:
                able = [method for method in methods if batch == 1 or method.batches]
                timings = measure(able, prompts, batch, options.rounds)
                rows = figures(able, timings, kinds, batch)
                report["runs"].append({"temperature": temperature, "batch": batch, "rows": rows})
                report.setdefault("repeated_4grams", repeated_share(timings[PLAIN].outputs))
                if options.json:  # after every run: nothing is lost where a later one fails
                    write_json(Path(options.json), report)
    if options.markdown:
        replace_file(Path(options.markdown), lambda path: path.write_text(markdown(report), encoding="utf-8"))
    if options.picture:
        from benchmarks.run.picture import draw

        draw(report, options.picture)
    show(report)
    written = [path for path in (options.json, options.markdown, options.picture) if path]
    if written:
        print(f"written: {', '.join(written)}")


def _ours(options: argparse.Namespace, model: MedusaModel, temperature: float) -> list[Method]:
    """This engine's methods, plain decoding first."""
    names = [name for name in options.methods or _usual(model, temperature) if name != PLAIN]
    return [ours(model, name, options.max_new_tokens, temperature) for name in (PLAIN, *names)]


def _draft_model(options: argparse.Namespace, model: MedusaModel) -> PreTrainedModel | None:
    """What assists transformers."""
    if not options.draft_model:
        return None
    small = smollm2.locate(resolve_base_name(options.draft_model))
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(small, dtype=model.base.dtype)
    return found.to(model.base.device).eval()


def _usual(model: MedusaModel, temperature: float) -> list[str]:
    names = [name for name in model.drafters.names() if name not in SKIPPED]
    return [*names, AUTO, *([f"{AUTO}:{LOSSY}"] if temperature else [])]


@contextmanager
def _peers(
    options: argparse.Namespace, model: MedusaModel, room: int, versions: dict[str, Any]
) -> Iterator[list[Method]]:
    """Other engines with the same weights, and with these heads where they take such heads."""
    if not options.peers:
        yield []
        return
    if model.base.dtype != torch.bfloat16 or model.base.device.type != "cpu":
        where = f"{model.base.dtype} on {model.base.device}"
        raise ValueError(f"--peers compute in bfloat16 on a CPU, and this base is in {where}; leave --peers out")
    eos = model.base.eos_ids

    def method(engine: Engine) -> Method:
        def complete(prompts: Sequence[list[int]], _: Sequence[int]) -> Answers:
            outputs = engine.complete(prompts, options.max_new_tokens, sorted(eos))
            return Answers([ended(tokens, eos) for tokens in outputs])

        return Method(f"{engine.name} {engine.mode}", complete, batches=engine.name in BATCHING)

    with TemporaryDirectory() as directory:
        heads = None
        if model.heads is not None and not refusal(VLLM, model.heads.config):
            heads = export_heads(Export(model.heads, model.base), VLLM, Path(directory) / VLLM)
        with engines(Path(options.peers), model.base.name, room, MODES, heads) as found:
            versions.update({engine.name: engine.version for engine in found})
            yield [method(engine) for engine in found]
