"""Heads as other engines write and read them, after the description of their formats; nothing here uses medusa."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, silu


class ResBlock(nn.Module):
    """The original's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


def original_heads(heads: int, layers: int, dim: int, vocab: int | None, repeat: bool = False) -> nn.ModuleList:
    """Heads as the original builds them; ``repeat``: with one block per head, as often as there are layers."""

    def head() -> nn.Sequential:
        blocks = [ResBlock(dim)] * layers if repeat else [ResBlock(dim) for _ in range(layers)]
        return nn.Sequential(*blocks, *([] if vocab is None else [nn.Linear(dim, vocab, bias=False)]))

    return nn.ModuleList(head() for _ in range(heads))


def write_original(
    directory: Path, state: dict[str, Tensor], name: str = "medusa_lm_head.pt", **config: object
) -> Path:
    """A directory with weights and config of the original."""
    directory.mkdir(parents=True, exist_ok=True)
    keys = {"base_model_name_or_path": "some/base", "medusa_num_heads": 3, "medusa_num_layers": 1}
    (directory / "config.json").write_text(json.dumps(keys | config))
    if name.endswith(".pt"):
        torch.save(state, directory / name)
    else:
        save_file({key: value.clone() for key, value in state.items()}, directory / name)
    return directory


def write_vllm(directory: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """A directory with weights and config of vLLM."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    keys = {"model_type": "medusa", "architectures": ["MedusaModel"], "base_model_name_or_path": "some/base"}
    (directory / "config.json").write_text(json.dumps(keys | config))
    return directory


def read_values(directory: Path) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text())


def read_by_original(directory: Path, hidden: Tensor, base_output: Tensor) -> Tensor:
    """Logits [K, M, V] of the original, version 1 from its .pt and version 2 from its .safetensors."""
    values = read_values(directory)
    heads, layers = values["medusa_num_heads"], values["medusa_num_layers"]
    if values.get("version") == "2":
        state, vocab = load_file(directory / "medusa_lm_head.safetensors"), None
    else:
        state, vocab = torch.load(directory / "medusa_lm_head.pt", weights_only=True), len(base_output)
    modules = original_heads(heads, layers, hidden.shape[1], vocab).to(hidden.dtype)
    modules.load_state_dict(state)
    with torch.no_grad():
        return torch.stack([head(hidden) if vocab else linear(head(hidden), base_output) for head in modules])


def read_by_tgi(directory: Path, hidden: Tensor, base_output: Tensor) -> Tensor:
    """Logits of Text Generation Inference: it tries version 1, and takes version 2 where a tensor of it is missing."""
    values, weights = read_values(directory), load_file(directory / "medusa_lm_head.safetensors")
    assert "architectures" not in values
    assert values["base_model_name_or_path"]
    assert "lm_head.weight" not in weights, "this is the name of the base's output layer: a key in two files"
    return _read_by_version(weights, values["medusa_num_heads"], values["medusa_num_layers"], hidden, base_output)


def read_by_lorax(directory: Path, hidden: Tensor, base_output: Tensor, dynamic: bool = False) -> Tensor:
    """Logits of LoRAX; ``dynamic``: heads that come with a request."""
    values, weights = read_values(directory), {}
    for path in directory.glob("*.safetensors"):
        weights.update(load_file(path))
    assert values["base_model_name_or_path"]
    if dynamic and float(values.get("version", 1)) < 2:
        raise ValueError("Dynamic adapter loading is not supported")
    return _read_by_version(weights, values["medusa_num_heads"], values["medusa_num_layers"], hidden, base_output)


def _read_by_version(weights: dict[str, Tensor], heads: int, layers: int, hidden: Tensor, base: Tensor) -> Tensor:
    if f"0.{layers}.weight" in weights:
        rows = []
        for head in range(heads):
            x = hidden
            for layer in range(layers):
                name = f"{head}.{layer}.linear"
                x = x + silu(linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
            rows.append(linear(x, weights[f"{head}.{layers}.weight"]))
        return torch.stack(rows)
    assert layers == 1
    weight = torch.cat([weights[f"{head}.0.linear.weight"] for head in range(heads)])
    bias = torch.cat([weights[f"{head}.0.linear.bias"] for head in range(heads)])
    inner = silu(linear(hidden, weight, bias)).unflatten(1, (heads, -1)).transpose(0, 1)
    return linear(hidden + inner, base)


def read_by_vllm(directory: Path, hidden: Tensor, base_output: Tensor) -> Tensor:
    """Logits of vLLM 0.32; it takes nothing from the base, and every parameter must be there."""
    values = read_values(directory)
    for key in list(values):
        if "num" in key and "heads" in key:
            values["num_heads"] = values.pop(key)
        elif "num" in key and "layers" in key:
            values["num_hidden_layers"] = values.pop(key)
    heads, layers, dim = values["num_heads"], values["num_hidden_layers"], values["hidden_size"]
    vocab, shared = values["vocab_size"], values.get("original_lm_head", False)
    columns = values.get("truncated_vocab_size", vocab)
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= {_vllm_name(name): tensor for name, tensor in load_file(path).items()}
    if shared and "lm_heads.0.weight" in found:
        found["lm_head.weight"] = found.pop("lm_heads.0.weight")
    shapes = {f"blocks.{k}.layers.{i}.weight": (dim, dim) for k in range(heads) for i in range(layers)}
    if values.get("medusa_fc_bias", False):
        shapes |= {f"blocks.{k}.layers.{i}.bias": (dim,) for k in range(heads) for i in range(layers)}
    shapes |= (
        {"lm_head.weight": (columns, dim)} if shared else {f"lm_heads.{k}.weight": (vocab, dim) for k in range(heads)}
    )
    assert {name: tuple(found[name].shape) for name in shapes} == shapes
    rows = []
    for head in range(heads):
        x = hidden
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}"
            bias = found[f"{name}.bias"] if f"{name}.bias" in shapes else None
            x = x + silu(linear(x, found[f"{name}.weight"], bias))
        logits = linear(x, found["lm_head.weight" if shared else f"lm_heads.{head}.weight"])
        if columns < vocab:
            logits = torch.full((len(x), vocab), -torch.inf, dtype=x.dtype).index_copy(1, found["token_map"], logits)
        rows.append(logits)
    return torch.stack(rows)


def _vllm_name(name: str) -> str:
    parts = name.replace("medusa_heads.", "").split(".")
    if len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return ".".join(parts)
    if "linear" in parts:
        return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[-1]}"
    return f"lm_heads.{parts[0]}.{parts[-1]}"
