"""``medusa-bench``: what a decode step costs on this machine, beside what it could cost at best."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import EMBEDDED, resolve_base_name
from data.arguments import show_messages
from serve.bench.arguments import build_parser

if TYPE_CHECKING:
    import torch

    from medusa import BaseModel, DraftHeads, MedusaModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(words, argparse.Namespace(words=words))
    show_messages()
    try:
        for name in ("json", "picture", "out"):
            if path := getattr(options, name, None):
                Path(path).parent.mkdir(parents=True, exist_ok=True)  # a wrong path is found before the work is done
        COMMANDS[options.command](options)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _compare(options: argparse.Namespace) -> None:
    from data import shipped_heads
    from serve.bench.report import write_json
    from serve.demo_report import show, show_kinds
    from serve.figures import measure
    from serve.questions import chat_questions, file_questions

    options.heads = options.heads or shipped_heads("smollm2")
    model = _trained(options, compiled=options.compile)
    if options.questions:
        prompts, kinds = file_questions(model, options.questions, options.count)
    else:
        prompts, kinds = chat_questions(model, options.count)
    figures = measure(model, prompts, kinds, options.rounds, options.max_new_tokens)
    if options.json:
        write_json(figures, options.json)
    show(model.base.name, figures)
    show_kinds(figures)


def _step(options: argparse.Namespace) -> None:
    from serve.bench.inside import profile_steps, watch_memory
    from serve.bench.rig import Rig, room_for
    from serve.bench.step import measure_steps

    base, heads = _subject(options)
    figures = measure_steps(base, heads, options.nodes, options.batch, options.context, options.rounds, options.seed)
    figures |= _how(options, base)
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
    _publish("step", options, base.device, base.dtype, figures)


def _baseline(options: argparse.Namespace, base: "BaseModel", heads: "DraftHeads") -> list[dict[str, Any]]:
    from serve.bench.baseline import TOKENS, measure_baseline
    from serve.bench.rig import Rig, room_for
    from serve.bench.shapes import unpacked_copy

    model, room = unpacked_copy(base, options.shape, options.seed), room_for(1, 0, TOKENS)
    rigs = (Rig(base, heads, batch, options.context, room, options.seed) for batch in options.batch)
    return [measure_baseline(rig, model, options.rounds) for rig in rigs]


def _replay(options: argparse.Namespace) -> None:
    from serve.bench.replay import CPU_NODES, GPU_NODES, measure_replay
    from serve.bench.trace import EMBEDDED_TRACE, load_trace

    trace = load_trace(options.trace or EMBEDDED_TRACE)
    base, heads = _subject(options)
    nodes = options.nodes or (CPU_NODES if base.device.type == "cpu" else GPU_NODES)
    rows = [
        measure_replay(base, heads, trace, nodes, batch, options.context, options.steps, options.rounds, options.seed)
        for batch in options.batch
    ]
    figures = {
        "label": "replay",
        **_how(options, base),
        "context": options.context,
        "graph": all(row["graph"] for row in rows),
        "trace": trace.provenance | {"tokens_per_step": round(trace.tokens_per_step, 4), "steps": len(trace.emitted)},
        "rows": rows,
    }
    _publish("replay", options, base.device, base.dtype, figures)


def _trace(options: argparse.Namespace) -> None:
    from medusa import load_tree
    from serve.bench.trace import record, save_trace

    tree = load_tree(options.tree) if options.tree else None
    model = _trained(options)
    prompts = _prompts(options, model, options.count)
    drafter = options.drafter if tree or options.drafter else "heads"
    trace = record(model, prompts, options.max_new_tokens, options.nodes, drafter, tree)
    save_trace(trace, options.out)
    print(f"{len(trace.emitted)} steps, {trace.tokens_per_step:.3f} tokens per step: {options.out}")


def _tree(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from medusa.budget.calibrate import calibrate
    from medusa.budget.tree_search import grow_tree
    from medusa.io.tree_file import save_tree
    from serve.bench.tree import describe_tree, measure_trees

    model = _trained(options)
    if model.base.decoding != "tree":
        raise ValueError(f"base ({model.base.name}) does not verify trees, see above; name another with --base")
    known = model.calibration if options.calibrate is None else None
    wanted = options.count + (0 if known else options.calibrate or options.count)
    prompts = _prompts(options, model, wanted)
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
    _publish("tree", options, model.base.device, model.base.dtype, figures)


def _trained(options: argparse.Namespace, **how: Any) -> "MedusaModel":
    """The heads that the flags name, with their base."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from medusa import MedusaModel

    disable_progress_bar()
    return MedusaModel.from_pretrained(
        options.heads,
        base=resolve_base_name(options.base) if options.base else None,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        device=None if options.device == "auto" else options.device,
        **how,
    )


def _prompts(options: argparse.Namespace, model: "MedusaModel", count: int) -> list[list[int]]:
    """The first ``count`` prompts of what the flags name, or fewer where there are fewer."""
    from data.prompts import embedded_prompts, file_prompts

    if options.prompts == "heldout":
        return embedded_prompts(model, "heldout", count)
    return file_prompts(model, options.prompts)[:count]


def _nodes(options: argparse.Namespace) -> None:
    from data.prompts import embedded_prompts
    from medusa import MedusaModel
    from serve.bench.nodes import measure_nodes

    if options.heads:
        model = _trained(options, attention=options.attention, compiled=options.compile, int8=options.int8)
    else:
        options.base = options.base or EMBEDDED
        model = MedusaModel(*_subject(options))
    prompts = embedded_prompts(model, "heldout", options.count)
    sizes = (options.nodes, options.drafter, options.max_new_tokens, options.rounds)
    figures = _how(options, model.base) | measure_nodes(model, prompts, *sizes)
    figures["heads"] = options.heads or figures["heads"]
    options.base = model.base.name
    _publish("nodes", options, model.base.device, model.base.dtype, figures)


def _attention(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoConfig

    from medusa.base import smollm2
    from medusa.base.checkpoint import choose_dtype
    from serve.bench.attention import measure_attention
    from serve.bench.shapes import choose_device, shape_config

    device = choose_device(options.device)
    name = options.shape or resolve_base_name(options.base)
    try:
        config = shape_config(name) if options.shape else AutoConfig.from_pretrained(smollm2.locate(name))
    except OSError as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; name another with --base") from error
    dtype = choose_dtype(torch.bfloat16, device) if options.dtype == "auto" else getattr(torch, options.dtype)
    text = config.get_text_config()
    sizes = (options.nodes, options.batch, options.context, options.rounds, options.seed)
    _publish("attention", options, device, dtype, measure_attention(text, dtype, device, *sizes))


def _how(options: argparse.Namespace, base: "BaseModel") -> dict[str, Any]:
    """How steps are made, as reports say it."""
    heads = f"{options.num_heads} {options.architecture}, random"
    heads += f", reading {options.feature_layers} layers" if options.feature_layers else ""
    return {"heads": heads, "attention": base.attention.name, "int8": base.int8, "compiled": options.compile}


def _subject(options: argparse.Namespace) -> tuple["BaseModel", "DraftHeads"]:
    """The base that the flags name and random heads for it, prepared for decoding."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from medusa import BaseModel, MedusaModel
    from medusa.loading.self_test import choose_decoding, compile_base
    from serve.bench.shapes import choose_device, random_base, random_heads

    if options.int8 and getattr(options, "baseline", False):
        raise ValueError("--baseline compares engines with the same weights, --int8 rounds ours; leave one of them out")
    disable_progress_bar()
    device = choose_device(options.device)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.shape:
        base = random_base(options.shape, dtype, device, options.seed, options.attention, options.int8)
    else:
        how: dict[str, Any] = {"pack": True, "int8": options.int8, "attention": options.attention}
        base = BaseModel.load(resolve_base_name(options.base), dtype=dtype, device=device, **how)
        base = choose_decoding(base)
        if base.decoding != "tree":
            raise ValueError(f"base ({options.base}) does not verify trees, see above; name another with --base")
    shape = (options.architecture, options.num_heads, options.seed, options.feature_layers)
    heads = random_heads(base, *shape)
    base = base.tapped(heads.config.feature_layers)
    if options.compile and not (base := compile_base(base)).compiled:
        raise ValueError("the base's pass cannot be compiled, see above; leave --compile out")
    model = MedusaModel(base, heads)
    assert model.heads is not None, "given above"
    return model.base, model.heads


def _publish(
    kind: str, options: argparse.Namespace, device: "torch.device", dtype: "torch.dtype", figures: dict[str, Any]
) -> None:
    from serve.bench.report import environment, show, write_json

    report = {
        "kind": kind,
        "base": options.shape or options.base,
        "weights": "random" if options.shape else "real",
        "dtype": str(dtype).removeprefix("torch."),
        **environment(device, options.words),
        **figures,
    }
    if options.json:
        write_json(report, options.json)
    show(report)
    if options.picture:
        try:
            from serve.bench.picture import draw
        except ImportError as error:  # on a bare machine the figures count
            print(f"no picture: {error}", file=sys.stderr)
        else:
            draw(report, options.picture)


COMMANDS = {
    "compare": _compare,
    "step": _step, "replay": _replay, "trace": _trace, "tree": _tree, "nodes": _nodes, "attention": _attention,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
