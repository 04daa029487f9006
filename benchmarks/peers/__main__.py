"""``python -m benchmarks.peers``: tokens per second of this engine and others on one model, in one run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers.run import BATCHING, MODES, Engine, Place, measure
from data.arguments import at_least, exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 130 Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add = parser.add_argument
    add("environments", help="the directory that benchmarks/peers/setup.sh has filled")
    add("--heads", help="trained heads of smollm2 (default: those that come with the clone)")
    add("--questions", help="a question file of Spec-Bench or MT-bench (default: the clone's own chat questions)")
    add("--count", type=at_least(1), default=2, help="questions, of each category where there are some")
    add("--engines", nargs="+", choices=MODES, default=list(MODES), help="engines (default: all)")
    add("--modes", nargs="+", help="modes (default: all of each engine)")
    add("--batch", type=at_least(1), nargs="+", default=[1], help="prompts that share a batch, one run each")
    add("--max-new-tokens", type=at_least(1), default=128)
    add("--rounds", type=at_least(1), default=3)
    add("--json", help="write all figures to this file")
    options = parser.parse_args(arguments)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    from data import shipped_heads
    from medusa import MedusaModel
    from medusa.base.smollm2 import locate
    from medusa.files import write_json
    from serve.demo.questions import questions

    heads, base, there = str(options.heads or shipped_heads("smollm2")), locate("smollm2"), Path(options.environments)
    model = MedusaModel.from_pretrained(heads)
    prompts, _ = questions(model, options.questions, options.count)
    del model
    places = {
        "ours": Place(sys.executable, "ours.py", heads),
        "transformers": Place(sys.executable, "hf.py", base),
        "openvino": Place(str(there / "openvino/bin/python"), "openvino_genai_.py", str(there / "smollm2-openvino")),
        "llamacpp": Place(str(there / "llamacpp/bin/python"), "llamacpp.py", str(there / "smollm2.gguf")),
        "vllm": Place(str(there / "vllm/bin/python"), "vllm_.py", base),
    }
    engines: list[Engine] = []
    figures = []
    try:
        for name in options.engines:
            modes = [mode for mode in MODES[name] if mode in (options.modes or MODES[name])]
            engines += [Engine(name, mode, places[name], there / f"{name}-{mode}.log") for mode in modes]
        for batch in options.batch:
            able = [engine for engine in engines if batch == 1 or engine.name in BATCHING]
            figures += measure(able, prompts, batch, options.max_new_tokens, options.rounds)
    finally:
        for engine in engines:
            engine.close()
    table = Table(title=f"{len(prompts)} prompts, {options.max_new_tokens} new tokens each, whole calls")
    for title in ("batch", "engine", "mode", "tokens/s", "of the first", "tokens in common"):
        table.add_column(title, justify="right" if title not in ("engine", "mode") else "left")
    for row in figures:
        first = next(other for other in figures if other["batch"] == row["batch"])
        speed, share = row["tokens_per_second"], row["tokens_per_second"] / first["tokens_per_second"]
        table.add_row(
            str(row["batch"]), row["engine"], row["mode"], f"{speed:.1f}", f"{share:.2f}x", f"{row['common']:.0f}"
        )
    Console().print(table)
    if options.json:
        write_json(Path(options.json), {"arguments": vars(options), "figures": figures})
        print(f"written: {options.json}")


if __name__ == "__main__":
    sys.exit(main())
