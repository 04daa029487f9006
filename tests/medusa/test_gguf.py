"""GGUF files as bases: what is found by a name, read tensor by tensor as transformers reads the whole, and refused."""

import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quantize
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from medusa import BaseModel, MedusaModel, SamplingParams
from medusa.base import gguf, gguf_convert, gguf_names, gguf_reading, gguf_tensors, on_hub
from medusa.base.gguf_tokenizer import read_tokenizer
from medusa.base.names import resolve_base
from medusa.base.packing import packed_weights
from medusa.cpu.experts import PackedExperts, use_experts
from medusa.cpu.gguf_types import KINDS
from medusa.cpu.native import use_kernels
from medusa.cpu.packed import Packed
from medusa.drafters.model import ModelDrafter
from medusa.drafters.writers import MtpWriter
from medusa.serve.server import main
from tests.medusa.gguf_files import SIZES, write_file
from tests.medusa.gguf_hybrid import hybrid, mtp_of, write_hybrid
from tests.medusa.packed_sums import same

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma3": Gemma3TextConfig}
FAMILIES |= {"qwen2moe": Qwen2MoeConfig, "qwen3moe": Qwen3MoeConfig}


def expanded(file, dtype=torch.bfloat16):
    how = {"dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}
    if any(one.name.endswith("_exps.weight") for one in gguf_tensors.stored_tensors(file)[1]):
        how["config"] = gguf_convert.read_config(file)  # transformers does not read how wide experts are
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how).to(torch.bfloat16)


def check(directory, whole):
    read = gguf.load(directory, torch.bfloat16, expand=True)
    assert read.state_dict().keys() == whole.state_dict().keys()
    for name, weight in whole.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    # Those that the file does not tell; transformers takes defaults of one model for all.
    defaults = dict.fromkeys(("bos_token_id", "pad_token_id", "query_pre_attn_scalar"))
    assert read.config.to_diff_dict() | defaults == whole.config.to_diff_dict() | defaults


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "Q4_1") for family in FAMILIES),
        *(("llama", "Q5_1"), ("llama", "F16"), ("qwen3moe", "BF16"), ("qwen3moe", "MXFP4")),
    ],
)
def test_every_number_is_that_of_transformers(family, kind, tokenizer, tmp_path, monkeypatch):
    file = write_file(tmp_path / "small.gguf", family, FAMILIES[family], tokenizer, kind)
    whole = expanded(file)
    monkeypatch.setattr(gguf_convert, "SHARD", 20_000)
    monkeypatch.setattr(gguf_tensors, "SLICE", 3_000)
    monkeypatch.setattr(gguf_convert, "SLICE", 3_000)
    told = gguf_convert.convert(file, tmp_path / "base")
    assert ("kept packed" in told) == (kind in KINDS)
    assert len(list((tmp_path / "base").glob(gguf.WEIGHTS))) > 2
    check(tmp_path / "base", whole)


def test_packed_experts_give_what_expanded_ones_do(tokenizer, tmp_path):
    """Gates and up projections of one type are packed together; of several types they are expanded."""

    def blocks(name, numbers):
        kind = "Q8_0" if name.startswith("blk.1.ffn_up_exps") else "Q4_1"
        return quantize(numbers, GGMLQuantizationType[kind]), kind

    file = write_file(tmp_path / "small.gguf", "qwen3moe", Qwen3MoeConfig, tokenizer, blocks=blocks)
    gguf_convert.convert(file, tmp_path / "base")
    written = sum(len(path.read_bytes()) for path in (tmp_path / "base").glob(gguf.WEIGHTS))
    assert gguf_convert.held_bytes(file) == pytest.approx(written, rel=0.1)
    packed, whole = (gguf.load(tmp_path / "base", torch.bfloat16, expand=expand) for expand in (False, True))
    experts = [layer.mlp.experts for layer in packed.model.layers]
    assert [type(one.gate_up).__name__ for one in experts] == ["Packed", "Parameter"]
    assert all(isinstance(one.down, Packed) for one in experts)
    use_kernels(whole), use_experts(whole)
    text = torch.tensor([[5, 6, 7, 8, 9, 5]])
    with torch.inference_mode():
        assert same(packed(text).logits, whole(text).logits)
    assert sum(one.inputs * one.outputs for one in packed_weights(packed)) > sum(
        one.numel() for one in packed.parameters()
    )


@pytest.fixture(scope="module")
def file(tokenizer, tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", LlamaConfig, tokenizer)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "medusa" / "bases"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that holds a few repositories, and what has been downloaded of it."""
    online = {
        "user/one-GGUF": ["README.md", "config.json", "one.Q8_0.gguf", "mmproj-one.gguf"],
        "user/many-gguf": [
            "many-Q4_K_S.gguf",
            "many-q4_k_m.gguf",
            "many-IQ4_XS.gguf",
            "many-BF16.gguf",
            "many-F16.gguf",
        ],
        "user/others-gguf": ["a-Q4_0.gguf", "a-Q8_0.gguf"],
        "user/split-gguf": ["Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf"],
        "user/both-gguf": ["config.json", "model.safetensors", "both.Q4_K_M.gguf"],
        "user/plain": ["config.json", "model.safetensors", "plain.Q4_0.gguf"],
    }

    def list_repo_files(repository):
        if repository not in online:
            raise RepositoryNotFoundError("no such repository at https://secret@hub", response=Mock())
        return online[repository]

    def hf_hub_download(repository, name, local_files_only=False):
        path = tmp_path / "hub" / repository / name
        if not path.exists():
            if local_files_only:
                raise LocalEntryNotFoundError("not here")
            assert name in online[repository]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return str(path)

    def snapshot_download(repository, local_files_only):
        assert local_files_only
        if not (tmp_path / "hub" / repository).exists():
            raise LocalEntryNotFoundError("not here")
        return str(tmp_path / "hub" / repository)

    monkeypatch.setattr(on_hub, "reach", lambda: None)
    for function in (list_repo_files, hf_hub_download, snapshot_download):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    return online


@pytest.mark.parametrize("kind", ["Q4_1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q8_0", "F16"))])
@pytest.mark.parametrize(("family", "first"), [("qwen35", 28), ("qwen35moe", 74), ("lfm2", 78)])
def test_hybrid_models(family, first, kind, tokenizer, tmp_path, monkeypatch, caplog):
    """Numbers are those that transformers computes in float32, rounded once; in 16 bits it rounds more often."""
    file = write_hybrid(tmp_path / "small.gguf", family, tokenizer, kind)
    whole = expanded(file, torch.float32)
    whole.config.dtype = torch.bfloat16
    gguf_convert.convert(file, tmp_path / "base")
    assert "leaves out" not in caplog.text
    check(tmp_path / "base", whole)
    model = MedusaModel.from_pretrained(str(file), dtype=torch.bfloat16, device="cpu")
    base = model.base
    assert base.fused and base.recurrent
    matrices = {type(part).__name__ for name, part in base.model.named_modules() if "proj" in name}
    # Heads of values take turns in the file, so columns of one layer have other places in it.
    others = {"NativeLinear"} if family != "lfm2" or kind == "F16" else set()
    assert matrices == others | ({"PackedLinear"} if kind != "F16" else set())
    text = [first, 6, 7, 8, first, 6]  # of its next tokens none is nearly tied with another
    with torch.inference_mode():
        expected = whole.generate(torch.tensor([text]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 6:]
    output = model.generate(text, max_new_tokens=5, drafter="prompt-lookup", nodes=4)
    assert output.tokens == expected.tolist()
    experts = [part for part in base.model.modules() if isinstance(part, PackedExperts)]
    assert len(experts) == (4 if family == "qwen35moe" and kind != "F16" else 0)
    if family != "lfm2":
        check_mtp(base, family, tokenizer, kind)


def check_mtp(base, family, tokenizer, kind):
    """The multi-token-prediction layer holds the numbers that were written, and drafts."""
    layer = base.with_mtp().mtp._model.layers[0]
    torch.manual_seed(0)
    whole = hybrid(family, tokenizer)
    prefix = f"model.layers.{whole.config.num_hidden_layers}."
    for name, weight in mtp_of(whole).items():
        own = name.removeprefix(prefix)
        own = own.replace("nextn.shared_head_norm", "nextn.post_norm").removeprefix("nextn.")
        read = layer.state_dict()[own if own in layer.state_dict() else f"mtp_block.{own}"]
        largest = float(weight.abs().max())
        assert read.shape == weight.shape and read.dtype == base.dtype
        limit = {"F16": 0.01, "Q8_0": 0.02, "Q4_1": 0.12}[kind] * largest
        assert float((read.float() - weight).abs().max()) <= limit, name
    model, text = MedusaModel(base.with_mtp()), [28, 6, 7, 8]
    plain = model.generate(text, max_new_tokens=12, ignore_eos=True, nodes=1)
    drafter = ModelDrafter(MtpWriter(model.base), model.base.vocab_size, 4, 0.0, host_decides=False)
    drafted = model.generate(text, max_new_tokens=12, ignore_eos=True, drafter=drafter)
    assert drafted.tokens == plain.tokens and drafted.draft_tokens > 9
    (Path(base.model.config.name_or_path) / gguf_reading.MTP).unlink()
    with pytest.raises(ValueError, match="its GGUF file has none that can be read; give a checkpoint in safetensors"):
        base.with_mtp()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("user/one-GGUF", "one.Q8_0.gguf"),
        ("user/one-GGUF:Q8_0", "one.Q8_0.gguf"),
        ("user/many-gguf", "many-q4_k_m.gguf"),
        ("user/many-gguf:q4_k_s", "many-Q4_K_S.gguf"),
        ("user/many-gguf:F16", "many-F16.gguf"),
        ("user/many-gguf:many-BF16.gguf", "many-BF16.gguf"),
        ("user/plain:Q4_0", "plain.Q4_0.gguf"),
        ("user/both-gguf:Q4_K_M", "both.Q4_K_M.gguf"),
        ("user/both-gguf", None),
        ("user/plain", None),
        ("user/missing", None),
        ("smollm2", None),
    ],
)
def test_a_name_on_the_hub_means_one_file(name, found, hub, monkeypatch):
    path = gguf_names.find(name)
    assert (path and path.name) == found
    if path:
        assert path == gguf_names.find(name, download=False)
        monkeypatch.delitem(hub, name.partition(":")[0])
        assert path == gguf_names.find(name), "it is here, and the Hub does not answer"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "user/others-gguf",
            r"holds several GGUF files \(a-Q4_0.gguf, a-Q8_0.gguf\); name one of them, as user/others",
        ),
        ("user/others-gguf:Q5_0", r"has no GGUF file of that type; its files are: a-Q4_0.gguf, a-Q8_0.gguf"),
        ("user/many-gguf:Q4_K", "has no GGUF file of that type"),
        ("user/split-gguf", "is a part of a model, .* join the parts"),
        ("user/missing:Q4_0", "the Hugging Face Hub does not provide it: the repository does not exist"),
        ("user/missing-gguf", "the Hugging Face Hub does not provide it: the repository does not exist"),
    ],
)
def test_a_name_on_the_hub_that_means_no_file_is_one_error(name, message, hub):
    with pytest.raises((OSError, ValueError), match=message) as caught:
        gguf_names.find(name)
    assert "secret" not in str(caught.value)


def test_a_directory_with_one_file_is_a_base(file, cache, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "README.md").touch()
    (directory / "mmproj-small.gguf").touch()
    assert gguf_names.find(str(directory)) is None
    shutil.copy(file, directory / "small.gguf")
    assert resolve_base(str(directory)) == str(directory)
    assert BaseModel.load(directory, device="cpu").name == str(directory)
    assert main(["--dry-run", "--base", str(directory)]) == 0
    (directory / "other.gguf").touch()
    with pytest.raises(ValueError, match=r"holds several GGUF files \(other.gguf, small.gguf\); give the path of one"):
        BaseModel.load(directory, device="cpu")
    (directory / "model.safetensors").touch()
    assert gguf_names.find(str(directory)) is None


def test_a_dry_run_converts_and_downloads_nothing(file, hub, cache, capsys, caplog):
    assert main(["--dry-run", "--base", str(file)]) == 0
    assert "weights" in capsys.readouterr().out
    assert not cache.exists()
    assert main(["--dry-run", "--base", "user/one-GGUF"])
    assert "none is downloaded" in caplog.text


def damaged(file, path, how):
    content = file.read_bytes()
    first = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    path.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "cut in its last tensor": content[:-40],
            "cut in its header": content[:3000],
            "empty": b"",
            "magic": b"GGML" + content[4:],
            "version": content[:4] + b"\x09" + content[5:],
            "type": content[:first] + b"\x63" + content[first + 1 :],
            "family": content.replace(b"llama", b"lemma"),
        }[how]
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", r"it is cut short: it ends \(\d+ bytes\) before tensor .* does"),
        ("cut in its last tensor", r"it is cut short: it ends \(\d+ bytes\) before tensor .* does"),
        ("cut in its header", "its header is cut short or damaged"),
        ("empty", "it is empty"),
        ("magic", "it begins with b'GGML' and not with b'GGUF'"),
        ("version", "its version is 9, and"),
        ("type", "tensor token_embd.weight is of type 99, which the package gguf does not know"),
        ("family", r"its family \(lemma\) is not known; known are afmoe, "),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error_and_nothing_is_kept(how, reason, file, cache, tmp_path, caplog):
    damaged(file, path := tmp_path / "bad.gguf", how)
    with pytest.raises(ValueError, match=rf"GGUF file \(.*bad.gguf\) cannot be read: {reason}.*; give another file"):
        BaseModel.load(path, device="cpu", pack=True)
    assert [kept.suffix for kept in cache.iterdir()] == [".lock"]
    assert main(["--dry-run", "--base", str(path)])
    assert re.search(reason, caplog.text)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            {"without": ["blk.1.attn_q.weight"]},
            "it lacks 1 tensors of the model, for example model.layers.1.self_attn",
        ),
        ({"wrong": {"hidden_size": 32}}, r"tensor .* has the shape \(.*\), and the model's is \(.*\)"),
    ],
)
def test_a_file_without_what_its_config_promises_is_one_error(sizes, reason, cache, tokenizer, tmp_path):
    path = write_file(tmp_path / "bad.gguf", "llama", LlamaConfig, tokenizer, **sizes)
    with pytest.raises(ValueError, match=rf"cannot be read: {reason}.*; give another file or base"):
        BaseModel.load(path, device="cpu")
    assert [kept.suffix for kept in cache.iterdir()] == [".lock"]


def test_what_transformers_leaves_out_is_said(tokenizer, tmp_path, caplog):
    file = write_file(tmp_path / "small.gguf", "llama", LlamaConfig, tokenizer, extra=["other.weight"])
    gguf_convert.convert(file, tmp_path / "base")
    assert "small.gguf: other.weight are left out; texts may differ" in caplog.text
    check(tmp_path / "base", expanded(file))


@pytest.mark.parametrize(
    ("how", "scaling"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("llama3", {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }),
    ],
)  # fmt: skip
def test_positions_turn_as_the_file_says(how, scaling, tokenizer, tmp_path):
    config = LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters={"rope_theta": 10_000.0, **scaling})
    expected, attention = ROPE_INIT_FUNCTIONS[how](config, "cpu")

    def describe(writer):
        if how == "llama3":
            plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
            return writer.add_tensor("rope_freqs.weight", (plain / expected).numpy())
        writer.add_rope_scaling_type(RopeScalingType(how))
        writer.add_rope_scaling_factor(4.0)
        return writer.add_rope_scaling_orig_ctx_len(64) if how == "yarn" else None

    file = write_file(tmp_path / "small.gguf", "llama", LlamaConfig, tokenizer, describe=describe)
    gguf_convert.convert(file, tmp_path / "base")
    rotary = gguf.load(tmp_path / "base", torch.float32, expand=True).model.rotary_emb
    assert rotary.rope_type == how and rotary.attention_scaling == pytest.approx(attention)
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-3, atol=0)


def test_positions_that_turn_in_an_unknown_way_are_refused(tokenizer, tmp_path):
    def describe(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32))

    file = write_file(tmp_path / "small.gguf", "llama", LlamaConfig, tokenizer, describe=describe)
    with pytest.raises(ValueError, match="rope_freqs are not those of a Llama 3 or 4"):
        gguf_convert.convert(file, tmp_path / "base")


def test_control_tokens_keep_their_ids(tokenizer, tmp_path):
    """As DeepSeek spells them: with characters that byte-level vocabularies do not have."""
    controls = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]
    file = write_file(tmp_path / "small.gguf", "llama", LlamaConfig, tokenizer, controls=controls)
    base, first = BaseModel.load(file, device="cpu"), len(tokenizer) + 1
    assert base.tokenizer.convert_tokens_to_ids(controls) == [first, first + 1]
    ids = base.tokenizer("<\uff5cUser\uff5c>ab<\uff5cAssistant\uff5c>").input_ids
    assert (ids[0], ids[-1]) == (first, first + 1) and base.vocab_size == first + 2
    assert base.tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def sentencepiece(file, family, prefix=None):
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "\u2581", "a", "b", "\u2581a"]
    writer = GGUFWriter(file, family)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, 2, 4, 1, 1, 1, 1])
    writer.add_token_scores([0.0] * 9)
    for name, number in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(number)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return read_tokenizer(file)


def test_tokens_of_spaces_keep_the_spelling_of_their_vocabulary(tmp_path):
    """Gemma's: user-defined, and written with another character in place of spaces."""
    tokenizer = sentencepiece(tmp_path / "small.gguf", "gemma3")
    assert tokenizer("a  b", add_special_tokens=False).input_ids == [6, 4, 7]


@pytest.mark.parametrize(
    ("prefix", "text", "ids"),
    [(None, "a", [8]), (True, " a", [5, 8]), (None, "a<eos>a", [8, 1, 8]), (False, "a", [6]), (False, " a", [8])],
)
def test_a_space_stands_in_front_where_llama_cpp_puts_one(prefix, text, ids, tmp_path):
    tokenizer = sentencepiece(tmp_path / "small.gguf", "llama", prefix)
    tokenizer.save_pretrained(tmp_path / "base")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "base")):
        assert one(text, add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize(("family", "ids"), [("phi3", [1, 8]), ("llama", [1, 5, 8])])
def test_the_space_behind_a_control_token_of_phi_3_is_part_of_it(family, ids, tmp_path):
    tokenizer = sentencepiece(tmp_path / "small.gguf", family)
    tokenizer.save_pretrained(tmp_path / "base")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "base")):
        assert one("<eos> a", add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize(
    ("split", "text", "ids"),
    [
        ("gpt-2", "ab", [1, 2]),
        ("gpt-2", "11", [5]),
        ("smollm", "11", [3, 3]),
        ("deepseek-llm", "11", [5]),
        (None, "1111", [5, 3, 3]),
    ],
)
def test_texts_are_split_as_the_file_says(split, text, ids, tmp_path):
    assert byte_level(tmp_path / "small.gguf", split)(text).input_ids == ids


def test_a_split_that_is_not_known_is_said(tmp_path, caplog):
    byte_level(tmp_path / "small.gguf", "some-new")
    assert "split (some-new) is not known" in caplog.text


@pytest.mark.parametrize(("told", "ids"), [(None, [0, 4]), (True, [0, 4]), (False, [4])])
def test_llama_3_takes_parts_whole_and_begins_texts_unless_the_file_says_otherwise(told, ids, tmp_path):
    tokenizer = byte_level(tmp_path / "small.gguf", "llama-bpe", told)
    tokenizer.save_pretrained(tmp_path / "base")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "base")):
        assert one("ab").input_ids == ids


def test_spaces_as_such_stand_beside_those_of_merges(tmp_path):
    """GPT-NeoX's, which OLMoE and StableLM have."""
    words = {"<end>": 3, "\u0120": 1, "\u0120\u0120": 1, "a": 1, "  ": 4}
    tokenizer = byte_level(tmp_path / "small.gguf", "olmo", words=words, merges=["\u0120 \u0120"])
    tokenizer.save_pretrained(tmp_path / "base")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "base")):
        assert one("a  a").input_ids == [3, 4, 3]
        assert one.convert_tokens_to_ids(["\u0120\u0120", "  "]) == [2, 4]


WORDS = {"<end>": 3, "a": 1, "b": 1, "1": 1, "ab": 1, "11": 1}


def byte_level(file, split, begun=None, words=WORDS, merges=("1 1",)):
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    if begun is not None:
        writer.add_add_bos_token(begun)
    writer.add_bos_token_id(0)
    writer.add_token_list(list(words))
    writer.add_token_types(list(words.values()))
    writer.add_token_merges(merges)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return read_tokenizer(file)


@pytest.mark.parametrize(("controls", "ends"), [(["<|end|>"], {0}), (["<|end|>", "<|call|>"], {1})])
def test_an_answer_ends_where_a_turn_does(controls, ends, tokenizer, tmp_path):
    """Where tools are called, <|end|> ends a message only."""
    file = write_file(
        tmp_path / "small.gguf",
        "llama",
        LlamaConfig,
        tokenizer,
        controls=controls,
        describe=lambda writer: writer.add_eot_token_id(7),
    )
    first = len(tokenizer) + 1
    assert BaseModel.load(file, device="cpu").eos_ids == {0, 7, *(first + one for one in ends)}


def test_a_lost_file_of_converted_weights_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_convert, "SHARD", 20_000)
    gguf_convert.convert(file, tmp_path / "base")
    *_, last = sorted((tmp_path / "base").glob(gguf.WEIGHTS))
    last.unlink()
    with pytest.raises(ValueError, match=r"base\) lack .*; remove that directory and load again"):
        gguf.load(tmp_path / "base", torch.bfloat16, expand=False)


def test_a_damaged_conversion_is_named(file):
    directory = Path(gguf.locate(str(file)))
    kept = (directory / "config.json").read_bytes()
    (directory / "config.json").write_bytes(b"")
    with pytest.raises(ValueError, match=f"remove {re.escape(str(directory))}, which is made again"):
        BaseModel.load(file, device="cpu")
    (directory / "config.json").write_bytes(kept)


def test_a_cache_that_is_a_file_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cache \(.*file/medusa/bases\) cannot be written \(Not a directory\); set XDG"):
        gguf.locate(str(file))


def test_a_full_disk_is_one_error_and_nothing_is_kept(file, cache, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_convert, "save_file", full)
    with pytest.raises(OSError, match="cannot be written: No space left on device; free disk space"):
        gguf.locate(str(file))
    assert [kept.suffix for kept in cache.iterdir()] == [".lock"]


def test_a_base_goes_on_when_its_file_is_overwritten_and_the_next_load_is_of_the_new_file(
    file, cache, tokenizer, tmp_path
):
    path = Path(shutil.copy(file, tmp_path / "base.gguf"))
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    old = MedusaModel(BaseModel.load(path, device="cpu", pack=True))
    before = old.generate([5, 9, 7], sampling=sampling).tokens
    write_file(path, "qwen2", Qwen2Config, tokenizer, seed=1)
    assert old.generate([5, 9, 7], sampling=sampling).tokens == before
    new = MedusaModel(BaseModel.load(path, device="cpu", pack=True))
    assert new.base.model.config.model_type == "qwen2"
    assert new.generate([5, 9, 7], sampling=sampling).tokens != before


def test_a_file_that_changes_while_it_is_read_is_not_kept(file, cache, tmp_path, monkeypatch):
    path = Path(shutil.copy(file, tmp_path / "base.gguf"))
    convert = gguf_convert.convert

    def slowly(file, directory):
        told = convert(file, directory)
        path.touch()
        return told

    monkeypatch.setattr(gguf_convert, "convert", slowly)
    with pytest.raises(ValueError, match="changed while it was being read; load it again"):
        gguf.locate(str(path))
    assert [kept.suffix for kept in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_what_transformers_loads_in_its_own_ways_is_expanded_once(family, cache, tokenizer, tmp_path):
    file = write_file(tmp_path / "small.gguf", family, FAMILIES[family], tokenizer)
    plain = BaseModel.load(file, torch.float32, "cpu")
    for _ in range(2):
        placed = BaseModel.load(file, torch.float32, "cpu", load_options={"device_map": {"": "cpu"}})
        assert placed.source == plain.source
        for name, weight in plain.model.state_dict().items():
            assert torch.equal(placed.model.state_dict()[name], weight)
    assert [kept.name.endswith("-expanded") for kept in sorted(cache.iterdir()) if kept.is_dir()] == [False, True]


def test_a_directory_of_one_file_of_another_name_is_read_too(file, tmp_path):
    gguf_convert.convert(file, tmp_path / "base")
    (tmp_path / "base" / "packed-00000.safetensors").rename(tmp_path / "base" / "packed.safetensors")
    check(tmp_path / "base", expanded(file))
