"""The model card of heads: known facts about them and their training run, and how to use them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, hf_hub_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from medusa.files import replace_text
from medusa.formats import holders
from medusa.heads import HeadsConfig
from medusa.io.hub import CARD, CARD_MARK, base_repository
from medusa.io.published import published

Row = tuple[object, ...]
OPTIM = {"loss": "loss", "learning rate": "lr", "rows per step": "rows_per_step"}
FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
LICENSE = re.compile(r"^(license(?:_name|_link)?): *[\"']?([\w./:-]+)[\"']? *$", re.MULTILINE)

SUMMARY = (
    "{heads} small heads that guess tokens ahead of a language model; the model checks all guesses in one pass and"
    " keeps those that it would have written itself. Its text stays its own, in fewer passes."
)
ADAPTED = (
    " These heads were trained together with an adapter of the base, which is in `adapter/`: the text is that of the"
    " base with the adapter."
)
HERE = """```python
from medusa import MedusaModel

model = MedusaModel.from_pretrained("{name}"{base_argument})
print(model.generate("...").text)
```"""
VLLM = """vLLM up to 0.32 (a chain of each head's best token, no tree):

```bash
vllm serve {base} --speculative-config '{{"method": "medusa", "model": "{name}", "num_speculative_tokens": {heads}}}'
```"""
TGI = """Text Generation Inference:

```bash
text-generation-launcher --model-id {name}
```"""
LORAX = """LoRAX:

```bash
lorax-launcher --model-id {base} --adapter-id {name}
```"""
EAGLE3 = """vLLM (SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path {name}`):

```bash
vllm serve {base} --speculative-config '{{"method": "eagle3", "model": "{name}", "num_speculative_tokens": {heads}}}'
```"""
SPECULATORS = """vLLM, which finds the base by itself:

```bash
vllm serve {name}
```"""
CUSTOM = """Plain transformers, with nothing else installed (it runs `custom_generate/generate.py` of this repository):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = AutoModelForCausalLM.from_pretrained("{base}")
inputs = tokenizer("...", return_tensors="pt")
output = model.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=64)
```"""
READERS = {
    "tgi": (TGI,), "lorax": (LORAX,), "vllm": (VLLM,), "universal": (VLLM, TGI, LORAX), "custom-generate": (CUSTOM,),
    "eagle3": (EAGLE3,), "speculators": (SPECULATORS,), "dspark": (SPECULATORS,),
}  # fmt: skip
"""How other programs read a format."""


def write_card(
    directory: Path,
    config: HeadsConfig,
    format_name: str,
    repo: str = "",
    provenance: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Write the card of heads into their directory, unless there is one that somebody wrote by hand.

    The license of a base on the Hub is looked up only if the heads will be pushed to the Hub.
    """
    path = directory / CARD
    if path.is_file() and CARD_MARK not in path.read_text(encoding="utf-8"):
        return
    license_data = base_license(config.base) if repo or not base_repository(config.base) else {}
    replace_text(path, model_card(config, format_name, repo, provenance, report, license_data))


def model_card(
    config: HeadsConfig,
    format_name: str,
    repo: str = "",
    provenance: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    license_data: Mapping[str, Any] | None = None,
) -> str:
    """The text of a README.md: a metadata block, then the known facts; unknown ones are left out.

    Args:
        config: The heads' shape and base.
        format_name: Key in ``FORMATS``.
        repo: Hub id of the heads; "" = unknown, so the card says DIR.
        provenance: The provenance that training or other programs wrote; any content is accepted.
        report: A report of the demo about these heads.
        license_data: License of the base, see ``base_license``.

    Source:
        https://huggingface.co/docs/hub/model-cards
    """
    told, plain = provenance or {}, format_name == "custom-generate"
    metadata = ModelCardData(
        base_model=base_repository(config.base) or None,
        library_name="transformers" if plain else "medusa-decoding",
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", *(["custom_generate"] if plain else [])],
        **(license_data or {}),
    )
    parts = [f"---\n{metadata.to_yaml()}\n---", CARD_MARK, f"# Draft heads for {base_title(config.base)}"]
    parts.append(SUMMARY.format(heads=config.num_heads) + (ADAPTED if config.base_adapter else ""))
    for title, body in (
        ("The heads", _table(("", ""), _shape(config, format_name, told))),
        ("How often they are right", _accuracy(told)),
        ("Speed", _speed(report or {})),
        ("Training", _table(("", ""), _training(told))),
        ("Use", _use(config, format_name, repo or "DIR")),
    ):
        parts += [f"## {title}", body] if body else []
    return "\n\n".join(parts) + "\n"


def base_title(base: str) -> str:
    """The name of a base for readers: its Hub id, or the last part of a path."""
    return base if base_repository(base) else f"{Path(base).name} (a local model)" if base else "an unnamed base"


def base_license(base: str) -> dict[str, str]:
    """The license in the base's model card: ``license``, and for some bases ``license_name`` and ``license_link``.

    Empty if the card is missing or damaged, or if the Hub cannot be reached.
    """
    if not base:
        return {}
    try:
        repository = base_repository(base)
        path = hf_hub_download(repository, CARD) if repository else Path(base) / CARD
        text = Path(path).read_text(encoding="utf-8")
    except (HTTPError, OSError, ValueError):
        return {}
    block = FRONT_MATTER.match(text)
    return dict(LICENSE.findall(block[1])) if block else {}


def _shape(config: HeadsConfig, format_name: str, provenance: Mapping[str, Any]) -> list[Row]:
    revision, own = _at(provenance, "base", "revision"), "one for all heads" if config.layer else "one per head"
    return [
        ("base", base_title(config.base) + (f", revision {revision}" if revision else "")),
        ("format", format_name),
        ("architecture", config.architecture),
        ("heads", config.num_heads),
        ("layers per head", config.num_layers),
        ("output layer", own if config.own_lm_heads else "the base's, shared"),
        ("vocabulary", config.vocab_size or "the base's"),
        ("draft vocabulary", config.draft_vocab_size or "all"),
        ("feature layers", ", ".join(map(str, config.feature_layers)) or "the last only"),
        ("hidden size", config.hidden_size),
    ]


def _accuracy(told: Mapping[str, Any]) -> str:
    """A table of accuracies per head on held-out texts, and tokens per step."""
    columns = {rank: _at(told, "figures", f"heldout_top{rank}") for rank in (1, 5, 10)}
    columns = {rank: values for rank, values in columns.items() if _are_numbers(values)}
    texts = []
    if columns:
        samples = _at(told, "figures", "heldout_samples")
        where = f" at {samples[0]} held-out positions" if _are_numbers(samples) else ""
        rows = [
            (f"t + {head}", *(f"{value:.1%}" for value in values))
            for head, values in enumerate(zip(*columns.values(), strict=False), start=2)
        ]
        texts.append(f"How often the right token is among a head's best 1, 5 and 10{where}:")
        texts.append(_table(("guessed token", *(f"best {rank}" for rank in columns)), rows))
    if _are_numbers([tokens := _at(told, "figures", "heldout_tokens_per_step")]):
        nodes = _at(told, "recipe", "evaluate", "nodes")
        trees = f", trees of {nodes} nodes" if nodes else ""
        texts.append(f"Tokens per step on held-out prompts (plain decoding: 1){trees}: **{tokens:.2f}**")
    return "\n\n".join(texts)


def _speed(report: Mapping[str, Any]) -> str:
    """The demo's comparison of drafters with plain decoding on one machine."""
    rows: list[Row] = [
        (name, f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_s']:.0f}", f"{row['speedup']:.2f}x")
        for name, row in (report.get("drafters") or {}).items()
    ]
    if not rows:
        return ""
    rows.insert(0, ("none (plain)", "1.00", f"{report['plain_tokens_per_s']:.0f}", "1.00x"))
    threads = f", {report['threads']} threads" if report.get("threads") else ""
    where = f"{report['device']}{threads}, {report['dtype']}{', fused pass' if report.get('fused') else ''}"
    texts = [
        f"{report['prompts']} held-out prompts, {report['max_new_tokens']} new tokens at most, greedy, on {where}:",
        _table(("drafter", "tokens per step", "tokens/s", "speedup over plain"), rows),
    ]
    if same := report.get("identical_outputs"):
        texts.append(f"Outputs identical to {same['against']} ({same['dtype']}): {same['count']} of {same['total']}.")
    return "\n\n".join(texts)


def _training(told: Mapping[str, Any]) -> list[Row]:
    """Facts about the training run; paths of its machine are cut to their last part."""
    lora, versions = _at(told, "recipe", "lora", "rank"), _at(told, "versions")
    versions = versions if isinstance(versions, Mapping) else {}
    used = [f"{name} {version}" for name, version in versions.items() if version]
    rows: list[Row] = [
        ("base in training", f"changed by an adapter of rank {lora}" if lora else "frozen" if told else None),
        ("data", published(str(_at(told, "data", "source") or "")) or None),
        ("rows", _times(_at(told, "data", "rows"), _at(told, "data", "row_tokens"), " tokens")),
        *((name.replace("_", " "), _at(told, "totals", name)) for name in ("steps", "epochs", "useful_tokens")),
        ("step of these heads, the best ones", _at(told, "figures", "heads_step")),
        *((name, _at(told, "recipe", "optim", key)) for name, key in OPTIM.items()),
        ("precision", _at(told, "recipe", "engine", "precision")),
        ("time", _seconds(_at(told, "totals", "train_seconds"))),
        ("machine", _times(_at(told, "processes"), _at(told, "device"))),
        ("finished", _at(told, "finished")),
        ("versions", ", ".join(used) or None),
        ("revision of the code", _at(told, "revision")),
    ]
    return [row for row in rows if row[1] is not None]


def _use(config: HeadsConfig, format_name: str, name: str) -> str:
    known = bool(base_repository(config.base))
    words = {
        "name": name, "base": config.base if known else "BASE", "heads": config.num_heads,
        "base_argument": "" if known else ', base="BASE"',
    }  # fmt: skip
    texts = [HERE.format(**words), *(text.format(**words) for text in READERS.get(format_name, ()))]
    if not known:
        texts.append("BASE is the base, which is not named by an address on the Hub.")
    others = [f"`{other}`" for other in holders(config) if other not in (format_name, "native")]
    if others:
        command = f"medusa export --heads {name} --format FORMAT --out DIR"
        texts.append(f"For other engines, `{command}` writes the heads in the formats {', '.join(others)}.")
    return "\n\n".join(texts)


def _at(values: Any, *keys: str) -> Any:
    """The value at a chain of keys; None if one is missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(isinstance(value, int | float) for value in values)


def _times(count: object, what: object, unit: str = "") -> str | None:
    return None if count is None or what is None else f"{count} x {what}{unit}"


def _seconds(value: object) -> str | None:
    if not isinstance(value, int | float):
        return None
    return f"{value:.0f} s" if value < 3600 else f"{value / 3600:.1f} h"


def _table(headings: Sequence[str], rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
