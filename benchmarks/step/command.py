"""``medusa bench step`` and ``attention``: from flags to the report."""

import argparse
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from medusa import BaseModel, Batch, MedusaModel
from medusa.base import smollm2
from medusa.base.checkpoint import choose_dtype
from medusa.base.names import full_name
from medusa.benchmarks.picture import Field, Line
from medusa.benchmarks.report import Report, Table, environment, machine, publish, rounding
from medusa.benchmarks.step.attention import measure_attention
from medusa.benchmarks.step.rig import PLAIN, Rig, Sizes
from medusa.benchmarks.step.shapes import given_device, given_dtype, random_base, random_heads, shape_config
from medusa.benchmarks.step.step import measure_steps
from medusa.loading.self_test import choose_decoding, fuse

STEP = [
    ("B", "{batch}"), ("N", "{nodes}"), ("verify ms", "{verify_ms:.2f}"), ("over N = 1", "{verify_overhead:.2f}x"),
    ("step ms", "{step_ms:.2f}"), ("over N = 1", "{step_overhead:.2f}x"), ("rows/s", "{rows_per_s:.0f}"),
    ("bound ms", "{roofline_ms:.2f}"), ("of bandwidth", "{roofline_share:.0%}"),
]  # fmt: skip
PROJECTED = [("PROJECTED tokens/s", "{projected_tokens_per_s:.1f}"), ("over N = 1", "{projected_speedup:.2f}x")]
ATTENTION = [
    ("backend", "{backend}"), ("B", "{batch}"), ("N", "{nodes}"), ("", "{mode}"), ("ms per layer", "{ms:.4f}"),
    ("bound ms", "{bound_ms:.4f}"), ("of bandwidth", "{share_of_bound:.0%}"),
]  # fmt: skip
PROFILED_STEPS = 10
BELOW = "N, tree nodes with the root (1 = plain decoding)"


def step(options: argparse.Namespace) -> None:
    """Measure whole steps by tree size and batch; heads have random weights, because only their shape affects time."""
    if options.tokens_per_step is not None and not options.tokens_per_step >= 1:
        raise ValueError(
            f"--tokens-per-step ({options.tokens_per_step}) must be at least 1; correct it, or leave it out"
        )
    model = _with_random_heads(options)
    base = model.base
    figures = measure_steps(model, _sizes(options), options.tokens_per_step)
    figures |= {
        "heads": f"{options.num_heads} {options.architecture}, random",
        "attention": base.attention.name,
        "int8": base.int8,
        "fused": base.fused,
        "packed": base.packed,
    }
    if options.profile:
        batch = Rig(model, options.batch[0], options.context).begin(PLAIN)
        figures["profile"] = _profile(batch, base.device)
    report = _report(options, base.dtype, base.device, figures)
    title = f"step: {_title(report)}"
    columns = STEP
    if report["tokens_per_step"]:
        columns = [*STEP, *PROJECTED]
        title += f"\nPROJECTED: with {report['tokens_per_step']} tokens per step, which trained heads have elsewhere"
    if options.profile:
        print(report["profile"])
    lines = {}
    for batch in options.batch:
        rows = [row for row in report["rows"] if row["batch"] == batch]
        nodes = [row["nodes"] for row in rows]
        for key, label, style in (
            ("step_ms", "whole step", "o-"), ("verify_ms", "without its draft", "--"), ("roofline_ms", "bound", ":"),
        ):  # fmt: skip
            lines[f"B = {batch}, {label}"] = Line(nodes, [row[key] for row in rows], style)
    field = Field(lines, BELOW, "ms", doubling=True)
    publish(options, report, [Table.of(title, columns, report["rows"])], title, [field])


def attention(options: argparse.Namespace) -> None:
    """Measure the attention of one layer by backend."""
    device = given_device(options)
    name = options.shape or full_name(options.base)
    try:
        config = shape_config(name) if options.shape else AutoConfig.from_pretrained(smollm2.locate(name))
    except OSError as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; name another with --base") from error
    dtype = given_dtype(options) or choose_dtype(torch.bfloat16, device)
    figures = measure_attention(config.get_text_config(), dtype, device, _sizes(options))
    report = _report(options, dtype, device, figures)
    missing = "".join(f"; without {name}: {reason}" for name, reason in report["missing"].items())
    title = f"attention: {_title(report)}"
    lines = {}
    for batch, backend in sorted({(row["batch"], row["backend"]) for row in report["rows"]}):
        rows = [row for row in report["rows"] if (row["batch"], row["backend"]) == (batch, backend)]
        nodes = [row["nodes"] for row in rows]
        lines[f"B = {batch}, {backend}"] = Line(nodes, [row["ms"] for row in rows])
        lines[f"B = {batch}, bound"] = Line(nodes, [row["bound_ms"] for row in rows], ":")
    tables = [Table.of(title + missing, ATTENTION, report["rows"])]
    publish(options, report, tables, title, [Field(lines, BELOW, "ms per layer", doubling=True)])


def _sizes(options: argparse.Namespace) -> Sizes:
    return Sizes(options.nodes, options.batch, options.context, options.rounds)


def _with_random_heads(options: argparse.Namespace) -> MedusaModel:
    """A base with random heads, prepared as by ``MedusaModel.from_pretrained``.

    Raises:
        ValueError: The base does not verify trees.
    """
    disable_progress_bar()
    device, dtype = given_device(options), given_dtype(options)
    if options.packed and (not options.shape or dtype not in (None, torch.bfloat16)):
        raise ValueError("--packed is for a --shape in bfloat16; a GGUF file as --base is packed by itself")
    if options.shape:
        config = shape_config(options.shape)
        base = random_base(config, dtype, device, options.attention, options.int8, options.packed)
    else:
        how: dict[str, Any] = {"pack": True, "int8": options.int8, "attention": options.attention}
        base = choose_decoding(BaseModel.load(full_name(options.base), dtype=dtype, device=device, **how))
        if base.decoding != "tree":
            raise ValueError(f"base ({options.base}) does not verify trees, see above; name another with --base")
    return MedusaModel(fuse(base), random_heads(base, options.architecture, options.num_heads))


def _profile(batch: Batch, device: torch.device) -> str:
    """A profile of plain steps by torch's profiler: by kernel on a GPU, by operator on a CPU."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        for _ in range(PROFILED_STEPS):
            batch.step()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=order, row_limit=12))


def _report(options: argparse.Namespace, dtype: torch.dtype, device: torch.device, figures: Report) -> Report:
    return {
        "kind": options.command,
        "base": options.shape or options.base,
        "weights": "random" if options.shape else "real",
        "dtype": str(dtype).removeprefix("torch."),
        **environment("medusa bench", options.words, device),
        **figures,
    }


def _title(report: Report) -> str:
    """The measured model and machine."""
    ways = rounding(report) + (", fused pass" if report.get("fused") else "")
    ways += ", steps as graphs" if report.get("graph") else ""
    return (
        f"{report['base']} ({report['weights']} weights){ways}, {report['context']} cached tokens; {machine(report)};\n"
        f"memory {report['bandwidth_gb_per_s']:.1f} GB/s ({report['bandwidth_method']})"
    )
