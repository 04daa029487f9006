"""Adapters of fine-tuning as bases: the base that an adapter names, with the adapter added to its weights.

peft saves LoRA fine-tuning as a small directory that names its base. Both are merged once, into a cached directory that
transformers reads, as ``merge_and_unload`` and ``save_pretrained`` do.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from medusa.base import gguf
from medusa.base.names import resolve_base
from medusa.files import cache_directory, peek_object, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS, "*.jinja", "token*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
"""Files of an adapter: those that are downloaded, and whose change makes a new merge."""
BASE_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Files of a base whose change makes a new merge."""
INNER = ".language_model."
"""The language model's place in a model that also reads pictures, of which only that part is loaded."""
LAYOUT = 1
"""Version of merged directories; directories of other versions are not touched."""


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    directory = Path(directory)
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


def named_base(adapter: Path) -> str:
    """The base that an adapter names.

    Raises:
        ValueError: It names none.
    """
    base = (peek_object(adapter / CONFIG) or {}).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"adapter ({adapter}) names no base; give it in its {CONFIG}, as base_model_name_or_path")
    return base


def plain_base(name: str) -> str:
    """The base below an adapter, also if that is another adapter; any other name as it is.

    Raises:
        ValueError: An adapter names no base, or it names itself, directly or through others.
    """
    seen, base = list[Path](), name
    while is_adapter(base):
        if Path(base).resolve() in seen:
            raise ValueError(f"adapter ({name}) needs itself as a base; correct base_model_name_or_path in {CONFIG}")
        seen.append(Path(base).resolve())
        base = named_base(Path(base))
    return base


def locate(name: str, find: Callable[[str], str]) -> str:
    """Merge an adapter with its base, if that was not done yet; returns the directory, or any other name unchanged.

    Args:
        name: A directory, or a Hub id that the Hub has.
        find: Finds the directory of a base by its name.

    Raises:
        OSError: The base is not there, or the directory cannot be written.
        ValueError: The adapter cannot be merged.
    """
    adapter = _from_hub(name) if not Path(name).is_dir() else Path(name)
    if adapter is None or not is_adapter(adapter):
        return name
    base = named_base(adapter)
    plain_base(str(adapter))  # which is not itself
    if not (adapter / WEIGHTS).is_file():
        raise ValueError(f"adapter ({name}) has no {WEIGHTS}; save it again with peft, as safetensors")
    try:
        below = find(resolve_base(base))
    except FileNotFoundError as error:
        told = f"correct base_model_name_or_path in its {CONFIG}"
        raise FileNotFoundError(f"adapter ({name}) needs a base that is not there: {error}; or {told}") from error
    what = f"{LAYOUT} {adapter.resolve()} {below} {_files(adapter, FILES)} {_files(Path(below), BASE_FILES)}"
    same = hashlib.sha256(what.encode()).hexdigest()[:12]
    directory = cache_directory() / "bases" / f"{Path(name).resolve().name}-merged-{same}"

    def make(model: Path) -> None:
        logger.info("base %s: merging this adapter with %s and keeping the result in %s, once", name, base, directory)
        _merge(adapter, below, model)
        # Without directories: heads name this source, and may be published.
        names = (Path(one).name if Path(one).exists() else one for one in (base, name))
        write_json(model / gguf.SOURCE, {"source": "weights of {} with the adapter {}".format(*names)})

    gguf.keep(directory, make)
    return str(directory)


def _files(directory: Path, patterns: Iterable[str]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files, which change with their content."""
    found = sorted(path for pattern in patterns for path in directory.glob(pattern))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]


def _from_hub(name: str) -> Path | None:
    """The directory of an adapter of the Hub, downloaded to huggingface_hub's cache; None = it is a model."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    from medusa.base.on_hub import one_sentence

    with one_sentence(f"base ({name}) is not given by the Hugging Face Hub"):
        try:
            hf_hub_download(name, "config.json")
        except EntryNotFoundError:
            return Path(snapshot_download(name, allow_patterns=list(FILES)))
    return None


def _merge(adapter: Path, below: str, directory: Path) -> None:
    """Write the merged model and its tokenizer; the whole model is in memory, in the checkpoint's own dtype."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoTokenizer

    from medusa.base import groupwise
    from medusa.base.adapter import apply_adapter
    from medusa.base.gguf_convert import save_expanded
    from medusa.base.plain import load_plain

    config = AutoConfig.from_pretrained(below)
    grouped, dtype = groupwise.reads(config), config.dtype or torch.float32
    if hasattr(config, "quantization_config") and not grouped:
        raise ValueError(
            f"adapter ({adapter}) changes a quantised base ({below}), into which it cannot be merged; name the plain"
            f" weights in its {CONFIG}, as base_model_name_or_path"
        )
    try:
        model = groupwise.load(below, config, dtype, False) if grouped else load_plain(gguf.expanded(below), dtype, {})
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"base ({below}) of the adapter ({adapter}) is damaged: {error}; copy it again") from error
    try:
        model = _fitted(model, adapter / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"adapter ({adapter}) has a damaged {WEIGHTS}: {error}; copy it again") from error
    own = (adapter / "tokenizer_config.json").is_file()
    tokenizer, rows = AutoTokenizer.from_pretrained(adapter if own else below), len(model.get_input_embeddings().weight)
    if own and len(tokenizer) > rows:
        raise ValueError(
            f"adapter ({adapter}) has a tokenizer of {len(tokenizer)} tokens and the model {rows}: embeddings of the"
            " others are missing; save the adapter with save_embedding_layers=True"
        )
    with TemporaryDirectory() as place:
        model = apply_adapter(model, _of_language_model(adapter, model, Path(place)))
    directory.mkdir()
    save_expanded(model, directory)
    tokenizer.save_pretrained(directory)


def _of_language_model(adapter: Path, model: "PreTrainedModel", place: Path) -> Path:
    """The adapter, or a copy in ``place`` without what only the model with pictures has, on which it was trained."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(adapter / WEIGHTS, "pt") as file:
        names = list(file.keys())
        outer = {name.partition(INNER)[0] + "." for name in names if INNER in name}
        if not outer or any(INNER in f".{name}." for name, _ in model.named_modules()):
            return adapter
        # Parts beside the language model read pictures; the output layer stands elsewhere.
        kept = [name for name in names if INNER in name or not name.startswith(tuple(outer))]
        save_file({name.replace(INNER, "."): file.get_tensor(name) for name in kept}, place / WEIGHTS)
    config = (adapter / CONFIG).read_text(encoding="utf-8")
    (place / CONFIG).write_text(
        config.replace("language_model.", "").replace("language_model\\\\.", ""), encoding="utf-8"
    )
    return place


def _fitted(model: "PreTrainedModel", weights: Path) -> "PreTrainedModel":
    """The model with the tokens of an adapter, and with ends of their own if the adapter changes only one of them.

    Fine-tuning may add tokens. Merged into a weight that is embedding and output layer in one, a change of one of them
    would change both.
    """
    from safetensors import safe_open
    from torch import nn

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    paths = [path for path, module in model.named_modules() if module in ends]
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
        whole = tuple(f"{path}.{own}" for path in paths for own in ("weight", "base_layer.weight"))
        tables = [name for name in names if name.endswith(whole)]
        rows = [int(file.get_slice(name).get_shape()[0]) for name in tables]
    if rows and rows[0] != ends[0].weight.shape[0]:
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    if outer.weight is inner.weight and any(f"{path}.lora_" in name for path in paths for name in names):
        outer.weight = nn.Parameter(inner.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model
