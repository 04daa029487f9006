"""The commands of ``medusa-bench``: from flags to a report."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig

from benchmarks.decoding.inputs import check_trees, describe, given_dtype, named_prompts, trained, with_random_heads
from benchmarks.decoding.report import publish
from benchmarks.decoding.tree import describe_tree, measure_trees
from benchmarks.decoding.tune import best_settings, measure_arms, others_of_transformers
from benchmarks.machine import choose_device
from benchmarks.peers.process import MODES, PLAIN, engines
from benchmarks.replay.replay import NODES, measure_replay
from benchmarks.replay.trace import SMOLLM2_TRACE, load_trace, record, save_trace
from benchmarks.run.command import run
from benchmarks.step.attention import measure_attention
from benchmarks.step.baseline import TOKENS, measure_baseline
from benchmarks.step.inside import profile_steps, watch_memory
from benchmarks.step.rig import Rig, room_for
from benchmarks.step.scaling import Sizes, measure_scaling
from benchmarks.step.shapes import random_model, shape_config
from benchmarks.step.step import measure_steps
from data import resolve_base_name, shipped_heads
from medusa import BaseModel, DraftHeads, load_tree
from medusa.base import smollm2
from medusa.base.checkpoint import choose_dtype
from medusa.budget.calibrate import calibrate
from medusa.budget.tree_search import grow_tree
from medusa.io.settings_file import save_settings
from medusa.io.tree_file import save_tree
from serve.demo.compare import unpacked_copy
from serve.demo.questions import questions


def _step(options: argparse.Namespace) -> None:
    base, heads = with_random_heads(options)
    figures = measure_steps(base, heads, options.nodes, options.batch, options.context, options.rounds, options.seed)
    figures |= describe(options, base)
    if options.profile or options.memory_steps:
        nodes = max(options.nodes)
        room = room_for(nodes, heads.config.num_heads)
        rig = Rig(base, heads, options.batch[0], options.context, room, options.seed)
        if options.profile:
            figures["profile"] = profile_steps(rig.stepper(rig.drafter(1)), base.device)
        if options.memory_steps:
            stepper = rig.stepper(rig.drafter(nodes))
            figures["memory"] = watch_memory(stepper, options.memory_steps, base.device)
    if options.baseline:
        figures["baseline"] = _baseline(options, base, heads)
    publish(options, base.device, base.dtype, figures)


def _baseline(options: argparse.Namespace, base: BaseModel, heads: DraftHeads) -> list[dict[str, Any]]:
    if options.shape:
        model = random_model(shape_config(options.shape), base.dtype, base.device, options.seed)
    else:
        model = unpacked_copy(base)
    room = room_for(1, 0, TOKENS)
    rigs = (Rig(base, heads, batch, options.context, room, options.seed) for batch in options.batch)
    return [measure_baseline(rig, model, options.rounds) for rig in rigs]


def _scaling(options: argparse.Namespace) -> None:
    device, dtype = choose_device(options.device), given_dtype(options) or torch.bfloat16
    dtype = choose_dtype(dtype, device)
    sizes = Sizes(options.context, options.batch, options.nodes, options.vocabulary, options.levels, options.tree)
    figures = measure_scaling(shape_config(options.shape), dtype, device, sizes, options.rounds)
    publish(options, device, dtype, figures)


def _replay(options: argparse.Namespace) -> None:
    trace = load_trace(options.trace or SMOLLM2_TRACE)
    base, heads = with_random_heads(options)
    nodes = options.nodes or trace.nodes or NODES
    rows = []
    with _others(options, base) as others:
        for batch in options.batch:
            sizes = (nodes, batch, options.context, options.steps, options.rounds, options.seed)
            rows.append(measure_replay(base, heads, trace, *sizes, others=others if batch == 1 else None))
    figures = {
        "label": "replay",
        **describe(options, base),
        "context": options.context,
        "graph": all(row["graph"] for row in rows),
        "trace": trace.provenance | {"tokens_per_step": round(trace.tokens_per_step, 4), "steps": len(trace.emitted)},
        "rows": rows,
    }
    publish(options, base.device, base.dtype, figures)


@contextmanager
def _others(options: argparse.Namespace, base: BaseModel) -> Iterator[dict[str, Callable[[], float]]]:
    """Seconds per token of the plain decoding of other engines."""
    if not options.peers:
        yield {}
        return
    prompt = torch.randint(base.vocab_size, (options.context,)).tolist()
    room, plain = options.context + options.steps + 8, dict.fromkeys(MODES, (PLAIN,))
    with engines(Path(options.peers), options.shape or base.name, room, plain) as found:
        each = {f"{engine.name} {engine.version}": engine for engine in found}
        yield {name: partial(engine.seconds_per_token, prompt, options.steps) for name, engine in each.items()}


def _trace(options: argparse.Namespace) -> None:
    tree = load_tree(options.tree) if options.tree else None
    model = trained(options)
    prompts = named_prompts(options, model, options.count)
    drafter = options.drafter if tree or options.drafter else "heads"
    trace = record(model, prompts, options.max_new_tokens, options.nodes, drafter, tree)
    save_trace(trace, options.out)
    print(f"{len(trace.emitted)} steps, {trace.tokens_per_step:.3f} tokens per step: {options.out}")


def _tree(options: argparse.Namespace) -> None:
    model = trained(options)
    check_trees(model.base)
    known = model.calibration if options.calibrate is None else None
    wanted = options.count + (0 if known else options.calibrate or options.count)
    prompts = named_prompts(options, model, wanted)
    measured, others = prompts[: options.count], prompts[options.count :]
    if not known and not others:
        raise ValueError(
            f"prompts ({options.prompts}) are all measured and none is left to calibrate on; lower --count"
        )
    calibration = known or calibrate(model, others, options.max_new_tokens, options.prompts)
    grown = grow_tree(calibration.accuracies, options.keep or max(options.nodes))
    details = describe_tree(grown, calibration)
    if options.out:
        save_tree(grown.tree, options.out, details)
    sizes = tqdm(options.nodes, desc="tree sizes", unit="size", leave=False)
    figures = {
        "base": "/".join(Path(model.base.name).parts[-2:]),
        "heads": calibration.provenance.get("heads", options.heads),
        "source": options.prompts,
        "prompts": len(measured),
        "max_new_tokens": options.max_new_tokens,
        "rows": measure_trees(model, calibration, measured, options.max_new_tokens, sizes),
        "tree": {"nodes": grown.tree.nodes, "depth": grown.tree.depth, "paths": grown.tree.paths, **details},
    }
    publish(options, model.base.device, model.base.dtype, figures)


def _tune(options: argparse.Namespace) -> None:
    options.heads = options.heads or (None if options.base else shipped_heads("smollm2"))
    small = resolve_base_name(options.draft_model) if options.draft_model else None
    model = trained(options, draft_model=small, int8=options.int8, mtp=options.mtp)
    names = options.drafters or [*model.drafters.choices(), *(["heads"] if model.heads else [])]
    prompts, kinds = questions(model, options.questions, options.count)
    others = {}
    if options.transformers:
        others = others_of_transformers(model, options.max_new_tokens, options.temperature, options.draft_model)
    figures = measure_arms(
        model, prompts, kinds, names, options.nodes,
        options.rounds, options.max_new_tokens, options.temperature, others,
    )  # fmt: skip
    figures |= {"heads": options.heads, "draft_model": options.draft_model, "int8": options.int8}
    options.base = model.base.name
    if options.out:
        save_settings(best_settings(figures), options.out, {"base": model.base.name, "heads": options.heads})
    publish(options, model.base.device, model.base.dtype, figures)


def _attention(options: argparse.Namespace) -> None:
    device = choose_device(options.device)
    name = options.shape or resolve_base_name(options.base)
    try:
        config = shape_config(name) if options.shape else AutoConfig.from_pretrained(smollm2.locate(name))
    except OSError as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; name another with --base") from error
    dtype = given_dtype(options) or choose_dtype(torch.bfloat16, device)
    sizes = (options.nodes, options.batch, options.context, options.rounds, options.seed)
    publish(options, device, dtype, measure_attention(config.get_text_config(), dtype, device, *sizes))


COMMANDS = {
    "run": run,
    "step": _step, "scaling": _scaling, "attention": _attention,
    "replay": _replay, "trace": _trace, "tree": _tree, "tune": _tune,
}  # fmt: skip
