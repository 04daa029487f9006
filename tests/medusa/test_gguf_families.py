"""Files that llama.cpp's converter made of small models of many families (tests/data/gguf/make.py)."""

import lzma
from pathlib import Path

import pytest
import torch

from medusa.base import gguf, gguf_convert, gguf_families
from medusa.base import gguf_settings as settings
from medusa.base.gguf_config import _settings, ends_of, read_config
from medusa.base.gguf_reading import tensors_of
from medusa.base.gguf_tensors import stored_tensors
from medusa.cpu.experts import PackedExperts
from tests.medusa.gguf_families import FAMILIES, small

FILES = Path(__file__).parents[1] / "data" / "gguf"
EXPANDED = {"deepseek_v2": "kv_b_proj", "deepseek_v3": "kv_b_proj", "gpt2": "transformer.h.", "llama4_text": "experts."}
"""Matrices whose rows are not rows of the file."""
NUMBERS = (
    "router.weight",
    "router.proj.weight",
    "gate.weight",
    "shared_expert_gate.weight",
    "conv1d.weight",
    "conv.weight",
    "wpe.weight",
    "_bias",
    "_norm.weight",
)
"""Matrices that the converter does not quantise."""


def unpacked(family, directory):
    file = directory / "small.gguf"
    file.write_bytes(lzma.decompress((FILES / f"{family}.gguf.xz").read_bytes()))
    return file


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_file_is_the_model_that_it_was_made_of(family, tmp_path, caplog):
    gguf_convert.convert(unpacked(family, tmp_path), tmp_path / "base")
    assert "left out" not in caplog.text
    wanted, found = small(family), gguf.load(tmp_path / "base", torch.float32, expand=True).eval()
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-3, atol=4e-4)
    text = torch.arange(3, 103)[None]
    expected = wanted(text).logits
    assert expected.std() > 0.02
    torch.testing.assert_close(found(text).logits, expected, rtol=1e-3, atol=2e-3)
    matrices = {name for name, tensor in tensors_of(wanted).items() if tensor.dim() > 1 and not name.endswith(NUMBERS)}
    packed = {name for shard in (tmp_path / "base").glob(gguf.WEIGHTS) for name in gguf._packings(shard)}
    expanded = EXPANDED.get(family.partition("-")[0])
    assert matrices - packed == {name for name in matrices if expanded and expanded in name}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "lfm2_moe", "mixtral"])
@torch.inference_mode()
def test_packed_experts_are_those_of_the_model(family, tmp_path):
    gguf_convert.convert(unpacked(family, tmp_path), tmp_path / "base")
    packed, whole = (gguf.load(tmp_path / "base", torch.bfloat16, expand=expand).eval() for expand in (False, True))
    assert any(isinstance(part, PackedExperts) for part in packed.modules())
    text = torch.arange(3, 43)[None]
    expected = whole.float()(text).logits
    assert (packed(text).logits - expected).std() < 0.1 * expected.std()


def config_with(family, directory, **changes):
    """The config of a family's file with another header, in whose names __ stands for a dot; ... is left out."""
    file = unpacked(family, directory)
    header, stored = stored_tensors(file)
    changes = {f"{header['general.architecture']}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_config(file, {key: value for key, value in (header | changes).items() if value is not ...}, stored)


def test_files_of_old_converters_tell_less(tmp_path):
    whole, old = (
        config_with("deepseek_v3-lite", tmp_path, **changes).to_dict()
        for changes in (
            {},
            {
                "attention__key_length": 16, "attention__key_length_mla": ...,
                "attention__value_length": 8, "attention__value_length_mla": ...,
                "attention__head_count_kv": 4, "expert_group_count": ..., "expert_group_used_count": ...,
            },
        )
    )  # fmt: skip
    assert old == whole
    assert config_with("deepseek_v2", tmp_path, expert_gating_func=...).model_type == "deepseek_v2"
    assert config_with("gemma2", tmp_path, attention__sliding_window=...).sliding_window == 4096


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("glm4", {"rope__dimension_sections": [1, 1, 0, 0]}, "positions turn in sections"),
    ],
)
def test_a_model_of_another_kind_with_the_same_name_is_refused(family, changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        config_with(family, tmp_path, **changes)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end|>", "<|endoftext|>"], {0, 1}),
        (["<|end|>", "<|return|>", "<|call|>"], {1, 2}),
        (["a", "b", "<turn|>", "<|end|>"], {2}),
    ],
)
def test_an_answer_ends_where_llama_cpp_ends_it(tokens, ends):
    class Tokenizer:
        def get_vocab(self):
            return {token: place for place, token in enumerate(tokens)}

    assert set(ends_of({}, Tokenizer(), 3)) == ends


@pytest.mark.parametrize(
    ("more", "told", "reason"),
    [
        (settings.llama4, {"expert_count": 0}, "a Llama 4 without experts"),
        (settings.mixers, {"expert_used_count": [0, 8, 4]}, "differ in how many experts they use"),
    ],
)
def test_models_that_transformers_does_not_know_are_refused(more, told, reason):
    with pytest.raises(ValueError, match=reason):
        more(told, {})


def test_what_a_file_does_not_say_is_as_in_llama_cpp_and_not_as_in_transformers():
    told = {"attention.head_count": 4, "embedding_length": 32, "block_count": 1}
    values = _settings(gguf_families.FAMILIES["starcoder2"], told, {"output.weight": (300, 32)})
    assert (values["num_key_value_heads"], values["rope_theta"]) == (4, 10_000.0)


def test_all_families_have_a_file():
    known = {family.model_type for family in gguf_families.FAMILIES.values()}
    assert known == {name.partition("-")[0] for name in FAMILIES}
    assert FAMILIES.keys() == {path.name.partition(".")[0] for path in FILES.glob("*.xz")}
