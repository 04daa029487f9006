"""``medusa bench run`` and ``tune``: from flags to the report."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from medusa import MedusaModel, Speculation
from medusa.base import smollm2
from medusa.base.names import full_name, shipped_heads
from medusa.benchmarks.peers.copies import copy_draft, openvino_reads
from medusa.benchmarks.peers.engine import BATCHING, EAGLE3_CHAIN, EAGLE3_TREE, MEDUSA, Engine, engines
from medusa.benchmarks.questions import Kinds, questions
from medusa.benchmarks.report import Report, environment, publish
from medusa.benchmarks.run.measure import figures, measure, repeated_share
from medusa.benchmarks.run.methods import (
    AUTO,
    LOSSY,
    PLAIN,
    Answers,
    Method,
    ended,
    of_transformers,
    ours,
    speculation,
    unpacked_copy,
)
from medusa.benchmarks.run.shown import fields, tables
from medusa.benchmarks.step.shapes import given_device, given_dtype, random_base, random_model, shape_config
from medusa.data.arguments import base_arguments
from medusa.files import write_json
from medusa.formats import Export, export_heads, refusal
from medusa.io.settings_file import save_settings
from medusa.loading.self_test import fuse

SKIPPED = ("early-exit", "ngram", "heads-sampled")
"""Drafters that are measured only on request: they are slower than plain decoding, or need earlier texts."""
VLLM, EAGLE3 = "vllm", "eagle3"
"""Formats of heads for other engines."""
RANDOM_PROMPT = 256
"""Tokens of a prompt with random weights."""
MARGIN = 8
"""Additional tokens of context that engines need."""


def run(options: argparse.Namespace) -> None:
    """Compare methods: this engine's, transformers' and other engines'."""
    model = named_model(options)
    prompts, kinds = _prompts(options, model)
    report = _report(options, model, prompts)
    with _peers(options, model, max(map(len, prompts)) + options.max_new_tokens + MARGIN, report["versions"]) as others:
        theirs = _transformers(options, model)
        for temperature in options.temperature:
            names = [name for name in options.methods or _usual(options, model, temperature) if name != PLAIN]
            methods = [ours(model, name, options.max_new_tokens, temperature) for name in (PLAIN, *names)]
            methods += [*theirs(temperature), *([] if temperature else others)]
            for batch in options.batch:
                able = [method for method in methods if batch == 1 or method.batches]
                timings = measure(able, prompts, batch, options.rounds)
                rows = figures(able, timings, kinds, batch)
                report["runs"].append({"temperature": temperature, "batch": batch, "rows": rows})
                report.setdefault("repeated_4grams", repeated_share(timings[PLAIN].outputs))
                if options.json:  # after every run, so that nothing is lost if a later one fails
                    write_json(Path(options.json), report)
    _publish(options, report)


def tune(options: argparse.Namespace) -> None:
    """Measure all drafters in all sizes, plain decoding and the automatic choice; save the best one."""
    if max(options.nodes) < 2:
        raise ValueError(f"nodes ({options.nodes}) leave no guess to try; give a size of 2 or more")
    for name in options.drafters or ():
        speculation(name)  # one that remembers the answers of earlier rounds is refused
    model = named_model(options, int8=options.int8, mtp=options.mtp)
    prompts, kinds = _prompts(options, model)
    report = _report(options, model, prompts) | {"int8": options.int8, "draft_model": options.draft_model}
    usual = dict.fromkeys([*model.drafters.choices(), *(["heads"] if model.heads else [])])
    ways = {
        f"{name} {nodes}": Speculation(drafter=name, nodes=nodes)
        for name in options.drafters or usual for nodes in options.nodes if nodes > 1
    }  # fmt: skip
    (temperature,) = options.temperature
    wanted = {PLAIN: Speculation(nodes=1), AUTO: Speculation(), **ways}
    methods = [ours(model, name, options.max_new_tokens, temperature, way) for name, way in wanted.items()]
    if options.transformers:
        methods += _transformers(options, model, early_exit=True)(temperature)
    rows = figures(methods, measure(methods, prompts, 1, options.rounds), kinds, 1)
    report["runs"].append({"temperature": temperature, "batch": 1, "rows": rows})
    speeds = {row["method"]: row["over_plain"]["value"] for row in rows}
    best = max((PLAIN, *ways), key=lambda name: speeds[name])
    for row in rows:
        way = ways.get(row["method"])
        row |= {"drafter": way.drafter, "nodes": way.nodes} if way else {"drafter": None, "nodes": None}
    report |= {"auto": model.explain(), "best": best, "auto_over_best": speeds[AUTO] / speeds[best]}
    if options.out:
        save_settings(wanted[best], options.out, {"base": model.base.name, "heads": options.heads})
    _publish(options, report)
    if options.out:
        sys.stdout.write(f"settings of {best}, {speeds[best]:.2f}x of plain decoding: {options.out}\n")


def named_model(options: argparse.Namespace, **how: Any) -> MedusaModel:
    """The model that the flags name: heads with their base, a base alone, or random weights of a shape."""
    disable_progress_bar()
    if options.shape:
        for name in ("heads", "base", "draft_model", "questions"):
            if getattr(options, name, None):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} cannot be combined with --shape, whose weights are random; leave one out")
        device = given_device(options)
        return MedusaModel(fuse(random_base(shape_config(options.shape), given_dtype(options), device)))
    options.heads = options.heads or shipped_heads(options.base or "smollm2") or None
    return MedusaModel.from_pretrained(options.heads, **base_arguments(options), **how)


def _prompts(options: argparse.Namespace, model: MedusaModel) -> tuple[list[list[int]], Kinds]:
    if not options.shape:
        return questions(model, options.questions, options.count)
    shape = (options.count, RANDOM_PROMPT)
    ids = torch.randint(model.base.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return ids.tolist(), {"random": list(range(options.count))}


def _report(options: argparse.Namespace, model: MedusaModel, prompts: Sequence[list[int]]) -> Report:
    return {
        "kind": options.command, "base": options.shape or "/".join(Path(model.base.name).parts[-2:]),
        "source": model.base.source, "heads": options.heads, "dtype": str(model.base.dtype).removeprefix("torch."),
        **environment("medusa bench", options.words, model.base.device), "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens, "rounds": options.rounds, "runs": [],
    }  # fmt: skip


def _usual(options: argparse.Namespace, model: MedusaModel, temperature: float) -> list[str]:
    """The default methods; with random weights drafts are never right, so only plain decoding is useful."""
    if options.shape:
        return []
    names = [name for name in model.drafters.names() if name not in SKIPPED]
    return [*names, AUTO, *([f"{AUTO}:{LOSSY}"] if temperature else [])]


def _transformers(
    options: argparse.Namespace, model: MedusaModel, early_exit: bool = False
) -> Callable[[float], list[Method]]:
    """transformers' methods at a temperature, on a copy of the weights in plain layers."""
    base, draft_model = model.base, None
    config = shape_config(options.shape) if options.shape else None
    plain = random_model(config, base.dtype, base.device) if config else unpacked_copy(base)
    if options.draft_model:
        small = smollm2.locate(full_name(options.draft_model))
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(small, dtype=base.dtype)
        draft_model = found.to(base.device).eval()
    exit_layer = max(1, base.num_layers // 2) if early_exit else 0
    return lambda temperature: of_transformers(
        plain, base.eos_ids, options.max_new_tokens, temperature, draft_model, exit_layer
    )


@contextmanager
def _peers(
    options: argparse.Namespace, model: MedusaModel, room: int, versions: dict[str, Any]
) -> Iterator[list[Method]]:
    """Other engines with the same weights, and with these heads if they support them."""
    if not options.peers:
        yield []
        return
    if model.base.dtype != torch.bfloat16 or model.base.device.type != "cpu":
        where = f"{model.base.dtype} on {model.base.device}"
        raise ValueError(f"--peers compute in bfloat16 on a CPU, and this base is in {where}; leave --peers out")
    if model.base.adapter:
        raise ValueError(f"--peers load {model.base.name} without the adapter of these heads; leave --peers out")
    eos = model.base.eos_ids

    def method(engine: Engine) -> Method:
        def complete(prompts: Sequence[list[int]], _: Sequence[int]) -> Answers:
            outputs = engine.complete(prompts, options.max_new_tokens, sorted(eos))
            return Answers([ended(tokens, eos) for tokens in outputs])

        return Method(f"{engine.name} {engine.mode}", complete, batches=engine.name in BATCHING)

    with TemporaryDirectory() as directory:
        environments, base = Path(options.peers), options.shape or model.base.name
        heads = _exported(model, environments, base, Path(directory))
        with engines(environments, base, room, heads) as found:
            versions.update({engine.name: engine.version for engine in found})
            yield [method(engine) for engine in found]


def _exported(model: MedusaModel, environments: Path, base: str, directory: Path) -> dict[str, Path]:
    """Export these heads for other engines' modes, if they support them."""
    if model.heads is None:
        return {}
    export, config, heads = Export(model.heads, model.base), model.heads.config, dict[str, Path]()
    if not refusal(VLLM, config):
        heads[MEDUSA] = export_heads(export, VLLM, directory / VLLM)
    if openvino_reads(config) and not refusal(EAGLE3, config):
        draft = export_heads(export, EAGLE3, directory / EAGLE3)
        heads |= dict.fromkeys(
            [EAGLE3_CHAIN, EAGLE3_TREE], copy_draft(environments, base, draft, directory / "openvino")
        )
    return heads


def _publish(options: argparse.Namespace, report: Report) -> None:
    publish(
        options, report, tables(report), f"{report['base']}, {report['dtype']}, {report['device_name']}", fields(report)
    )
