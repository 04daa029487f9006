"""Plain transformers with an exported repository: its own text, from fewer passes."""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)

from medusa import build_heads
from medusa.drafters import HeadsDrafter
from medusa.formats import Export, custom_generate, export_heads, find_format, load_heads
from medusa.formats.repository import generate as code
from medusa.formats.repository.base import Base, Tree
from medusa.formats.repository.heads import Heads
from medusa.heads import ARCHITECTURES, HeadsConfig
from medusa.heads.frozen import freeze
from tests.medusa.test_conformance import config_of

VARIANTS = {
    "medusa": {"architecture": "medusa"},
    "own-lm-heads": {"architecture": "medusa", "num_layers": 2, "own_lm_heads": True},
    "markov": {"architecture": "markov"},
    "hydra": {"architecture": "hydra", "num_layers": 2},
    "recurrent": {"architecture": "recurrent"},
    "features": {"architecture": "recurrent", "feature_layers": (1,)},
    "features-from-the-end": {"architecture": "recurrent", "feature_layers": (-1,)},
    "draft-vocabulary": {"architecture": "hydra", "draft_vocab_size": 40},
    "own-draft-vocabulary": {"architecture": "medusa", "draft_vocab_size": 40, "own_lm_heads": True},
}
MAX_NEW_TOKENS = 12
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [9, 2, 3, 4, 5], [0, 0, 0, 0, 9]])
MASK = (PROMPTS > 0).long()
BATCHES = {
    "one": {"inputs": PROMPTS[1:2]},
    "padded": {"inputs": PROMPTS, "attention_mask": MASK},
}


@pytest.fixture(scope="module")
def export(make_heads, modules_cache, tmp_path_factory):
    """Directory of random heads."""
    known = {}

    def export_of(name="recurrent"):
        if name not in known:
            heads = make_heads(**VARIANTS[name])
            if heads.draft_ids is not None:
                heads.draft_ids.copy_(6 * torch.arange(40) + 3)
            directory = tmp_path_factory.mktemp(name) / "heads-1.0"
            known[name] = str(export_heads(Export(heads), "custom-generate", directory))
        return known[name]

    return export_of


@contextmanager
def passes_of(model):
    """Collects an entry for each pass of the model."""
    passes = []
    hook = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    yield passes
    hook.remove()


def both(model, directory, **options):
    """What the model writes by itself, and what it writes with heads."""
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False} | options
    torch.manual_seed(3)
    expected = model.generate(**options)
    torch.manual_seed(3)
    return expected, model.generate(**options, custom_generate=directory, trust_remote_code=True)


def same(model, directory, **options):
    """The text with heads, which is the model's own."""
    expected, text = both(model, directory, **options)
    assert torch.equal(text, expected)
    return text


def lucky_trees(model, texts, mask):
    """In the place of ``Heads.draft``: random trees, half of whose nodes hold what the model will write."""
    mask = torch.nn.functional.pad(mask, (0, texts.shape[1] - mask.shape[1]), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    states = model.get_decoder()(texts, attention_mask=mask, position_ids=positions).last_hidden_state.detach()
    generator = torch.Generator().manual_seed(0)

    def draft(_, base, roots, hidden, nodes, memory):
        parents = (torch.rand(len(roots), nodes, generator=generator) * torch.arange(nodes)).long()
        depths = Tree.of(parents, parents, nodes).ancestors.sum(-1) - 1
        seen = (states - hidden[:, None, : states.shape[-1]]).norm(dim=-1).argmin(1, keepdim=True)
        right = texts.gather(1, (seen + 1 + depths).clamp(max=texts.shape[1] - 1))
        wrong = torch.randint(base.config.vocab_size, parents.shape, generator=generator)
        tokens = right.where(torch.rand(parents.shape, generator=generator) < 0.5, wrong)
        tokens[:, 0] = roots
        return Tree.of(tokens, parents, nodes)

    return draft


def test_all_heads_can_travel():
    assert set(custom_generate.CustomGenerate.architectures) == set(ARCHITECTURES)


@pytest.mark.parametrize("variant", ["medusa", "features", "draft-vocabulary"])
def test_greedy_text_is_the_models_own(plain, export, variant):
    same(plain, export(variant), **BATCHES["padded"])


@pytest.mark.parametrize("batch", BATCHES)
def test_deep_and_crooked_paths_keep_the_text(plain, export, monkeypatch, batch):
    options = BATCHES[batch] | {"max_new_tokens": 30, "do_sample": False}
    expected = plain.generate(**options)
    mask = options.get("attention_mask", torch.ones_like(options["inputs"]))
    monkeypatch.setattr(Heads, "draft", lucky_trees(plain, expected, mask))
    with passes_of(plain) as passes:
        text = code.generate(plain, heads=export(), nodes=24, **options)
    assert torch.equal(text, expected)
    assert len(passes) < 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_this_project(base, make_heads, plain, export, variant):
    heads = load_heads(export(variant), dtype=torch.float64)
    base = base.tapped(heads.config.layers_of(base.num_layers))
    heads = freeze(heads, base)
    state = SimpleNamespace(
        roots=torch.tensor([5, 77]), active=torch.tensor([True, True]),
        hidden=torch.randn(2, base.feature_size, dtype=torch.float64),
    )  # fmt: skip
    theirs = HeadsDrafter(heads, base, nodes=20, host_decides=False).propose(state)
    parts = Base(plain)
    travelled = Heads.load(parts, *(Path(export(variant)) / name for name in ("config.json", "heads.safetensors")))
    ours = travelled.draft(parts, state.roots, state.hidden, nodes=20)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.parents, theirs.parents)
    assert torch.equal(ours.ancestors, theirs.ancestors)


def test_heads_that_know_the_text_save_passes(tmp_path):
    """The model's next token depends on the last one alone, and Markov heads read the last one."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "vocab_size": 50}
    model = LlamaForCausalLM(
        LlamaConfig(**shape, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None)
    ).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    heads = build_heads(HeadsConfig(**shape, num_heads=4, architecture="markov", rank=16))
    heads.down.data[:] = torch.eye(16)
    heads.up.data[:] = 1e4 * torch.eye(16)
    directory = str(export_heads(Export(heads), "custom-generate", tmp_path / "sure"))
    same(model, directory, inputs=PROMPTS[1:2], max_new_tokens=21)
    with passes_of(model) as passes:
        same(model, directory, inputs=PROMPTS[1:2], max_new_tokens=21)
    assert len(passes) == 21 + 1 + 20 // 5, "by itself, and with heads"


def test_texts_end_where_they_would(plain, export):
    batch = BATCHES["padded"]
    ends = plain.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[:, 9].tolist()
    assert same(plain, export(), **batch, eos_token_id=ends, pad_token_id=1).shape[1] < 5 + MAX_NEW_TOKENS


class Biases(list):
    """A user's own processor, which knows the batch's rows."""

    def __call__(self, input_ids, scores):
        return scores + torch.stack([scores.new_zeros(257).index_fill_(0, torch.tensor(row), 3.0) for row in self])


OPTIONS = {
    "one": {
        "no-repeat": {"no_repeat_ngram_size": 2},
        "one-token": {"max_new_tokens": 1},
        "sampled": {"do_sample": True, "temperature": 0.4, "top_p": 0.9, "top_k": 20},
        "sampled-processed": {"do_sample": True, "repetition_penalty": 1.3, "min_p": 0.05},
    },
    "padded": {
        "penalty": {"repetition_penalty": 1.7},
        "longer": {"eos_token_id": list(range(100)), "min_length": 12, "pad_token_id": 0},
        "max-length": {"max_length": 14, "max_new_tokens": None},
        "allowed": {"prefix_allowed_tokens_fn": lambda row, text: range(50 * row + int(text[-1]) // 9, 255)},
        "own-processor": {"logits_processor": LogitsProcessorList([Biases([[5], [70], [200]])])},
    },
}  # fmt: skip


@pytest.mark.parametrize(("batch", "name"), [(batch, name) for batch in OPTIONS for name in OPTIONS[batch]])
def test_options_and_seed_are_heeded(plain, export, batch, name):
    """Samples too: random numbers are used as transformers uses them."""
    same(plain, export(), **BATCHES[batch], **OPTIONS[batch][name])


@pytest.mark.parametrize("place", ["argument", "configuration", "model"])
def test_stop_strings(plain, export, tokenizer, monkeypatch, place):
    prompt = tokenizer("abc", return_tensors="pt")
    stop = tokenizer.decode(plain.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0, 3:])[6:8]
    options = {
        "argument": {"stop_strings": stop},
        "configuration": {"generation_config": GenerationConfig(stop_strings=[stop])},
        "model": {},
    }[place]
    if place == "model":
        monkeypatch.setattr(plain.generation_config, "stop_strings", [stop])
    assert same(plain, export(), **prompt, **options, tokenizer=tokenizer).shape[1] < 3 + MAX_NEW_TOKENS


def test_what_is_returned(plain, export):
    options = BATCHES["one"] | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, out = both(plain, export(), **options, temperature=0.5, do_sample=True)
    assert type(out) is type(expected)
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_streamers_get_the_same(plain, export):
    ours, theirs = (SimpleNamespace(got=[]) for _ in range(2))
    for streamer, heads in ((theirs, {}), (ours, {"custom_generate": export(), "trust_remote_code": True})):
        streamer.put = lambda value, got=streamer.got: got.append(value.tolist())
        streamer.end = partial(streamer.got.append, "end")
        plain.generate(**BATCHES["one"], max_new_tokens=8, do_sample=False, streamer=streamer, **heads)
    assert ours.got == theirs.got


def law(model, prompt, temperature, length):
    """Probability of every continuation of ``length`` tokens with top_k=2."""
    chances = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor([[*prompt, *path] for path in chances])
        best = (model(texts).logits[:, -1].float() / temperature).topk(2)
        chances = {
            (*path, token): chance * share
            for (path, chance), tokens, shares in zip(
                chances.items(), best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True
            )
            for token, share in zip(tokens, shares, strict=True)
        }
    return chances


def test_samples_of_a_batch_follow_the_models_law(plain, export):
    number, prompt = 400, PROMPTS[1:2]
    chances = law(plain, prompt[0].tolist(), temperature=4.0, length=3)
    torch.manual_seed(0)
    texts = plain.generate(
        prompt, do_sample=True, temperature=4.0, top_k=2, max_new_tokens=3, num_return_sequences=number,
        eos_token_id=None, custom_generate=export("draft-vocabulary"), trust_remote_code=True, nodes=12,
    )  # fmt: skip
    counts = Counter(map(tuple, texts[:, 5:].tolist()))
    assert counts.keys() <= chances.keys()
    chi_square = sum((counts[path] - number * p) ** 2 / (number * p) for path, p in chances.items())
    freedom = len(chances) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def damaged(export, directory, change):
    """A copy of exported heads whose config and tensors are changed."""
    shutil.copytree(export, directory)
    config, weights = directory / "config.json", directory / "heads.safetensors"
    values, tensors = json.loads(config.read_text()), load_file(weights)
    change(values, tensors)
    config.write_text(json.dumps(values))
    save_file(tensors, weights)
    return str(directory)


BAD = {
    "other-size": (lambda values, tensors: values.update(hidden_size=64), "hidden_size .64. is not the model's .32."),
    "other-vocabulary": (lambda values, tensors: values.update(vocab_size=99), "vocab_size .99. .* load that one"),
    "missing-key": (lambda values, tensors: values.pop("num_heads"), "are damaged: KeyError.'num_heads'"),
    "missing-tensor": (lambda values, tensors: tensors.pop("blocks.0.outer.weight"), "are damaged: KeyError"),
    "other-shape": (lambda values, tensors: tensors.update({"blocks.0.outer.weight": torch.ones(2, 2)}), "are damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_do_not_fit(plain, export, tmp_path, name):
    change, message = BAD[name]
    heads = damaged(export(), tmp_path / "heads", change)
    with pytest.raises(ValueError, match=message):
        plain.generate(PROMPTS[:1], custom_generate=heads, trust_remote_code=True)


@pytest.mark.parametrize("name", ["config.json", "heads.safetensors"])
def test_truncated_and_missing_files(plain, export, tmp_path, name):
    shutil.copytree(export(), tmp_path / "heads")
    file = tmp_path / "heads" / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match="are damaged"):
        code.generate(plain, heads=str(tmp_path / "heads"), inputs=PROMPTS[:1])
    file.unlink()
    with pytest.raises(OSError, match=name):
        code.generate(plain, heads=str(tmp_path / "heads"), inputs=PROMPTS[:1])


def test_heads_are_kept_until_they_or_the_model_change(make_heads, base_directory, tmp_path, monkeypatch):
    model, loads, load = AutoModelForCausalLM.from_pretrained(base_directory), [], Heads.load
    monkeypatch.setattr(Heads, "load", lambda *args: loads.append(args[-1]) or load(*args))

    def loads_for(model, architecture=None):
        if architecture:
            export_heads(Export(make_heads(architecture=architecture)), "custom-generate", tmp_path)
        code.generate(model, heads=str(tmp_path), inputs=PROMPTS[:1], max_new_tokens=1)
        return len(loads)

    assert [loads_for(model, change) for change in ("hydra", None, "markov", None)] == [1, 1, 2, 2]
    assert loads_for(model.to(torch.bfloat16)) == 3
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


UNHEEDED = {
    "assistant_model": (torch.nn.Linear(1, 1), "assistant_model cannot be combined"),
    "past_key_values": (DynamicCache(), "past_key_values cannot be combined"),
    "num_beams": (2, r"beam_search \(batch 6\)"),
    "prompt_lookup_num_tokens": (3, "assisted_generation"),
    "output_hidden_states": (True, "output_hidden_states"),
    "output_scores": (True, r"output_scores \(batch 3\) is not supported"),
    "guidance_scale": (2.0, "guidance_scale"),
    "nodes": (0, "must be at least 1"),
}


@pytest.mark.parametrize("name", UNHEEDED)
def test_what_cannot_be_heeded_is_refused(plain, export, name):
    value, message = UNHEEDED[name]
    options = BATCHES["padded"] | {name: value, "return_dict_in_generate": True, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        plain.generate(**options, custom_generate=export(), trust_remote_code=True)


def test_a_call_by_itself_names_the_heads(plain, export):
    function = plain.load_custom_generate(export(), trust_remote_code=True)
    with pytest.raises(ValueError, match="pass heads=DIRECTORY"):
        function(model=plain, inputs=PROMPTS[:1])
    text = function(model=plain, heads=export(), inputs=PROMPTS[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain.generate(PROMPTS[:1], max_new_tokens=4, do_sample=False))


FAMILIES = (
    "cohere2", "falcon", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "opt", "opt-350m", "phi",
    "qwen3", "stablelm",
)  # fmt: skip
CHANGES = {
    "gpt2": {"n_positions": 29}, "llama": {"sliding_window": 7},
    "opt-350m": {"hidden_size": 48, "word_embed_proj_dim": 32},
}  # fmt: skip
"""Fewer positions; a window which no layer applies; embeddings as wide as the heads."""
GPT_NEO = {"num_layers": 3, "num_heads": 4, "window_size": 16}


@pytest.fixture(scope="module")
def small_heads(tmp_path_factory):
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(32, 50, 3, architecture="hydra", feature_layers=(2,)))
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return str(export_heads(Export(heads), "custom-generate", tmp_path_factory.mktemp("small")))


def of_family(family, **options):
    torch.manual_seed(0)
    config = config_of(family, **({"max_position_embeddings": 64, "eos_token_id": None} | options))
    return AutoModelForCausalLM.from_config(config).double().eval()


QUICK = ("gpt2", "llama", "mistral")


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_families(family, small_heads):
    """Texts longer than windows, up to the end of GPT-2's positions."""
    prompts = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 0, 2, 6]])
    options = {"inputs": prompts, "attention_mask": (prompts > 0).long(), "max_new_tokens": 24, "do_sample": False}
    model = of_family(family, **CHANGES.get(family, {}))
    text = code.generate(model, heads=small_heads, **options)
    # Without its cache, which drops rows beyond a window that the config alone mentions.
    assert torch.equal(text, model.generate(**options, use_cache=family != "llama"))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mpt", {"max_seq_len": 64}, "attention of layer . differs"),
        ("gpt_neo", GPT_NEO | {"attention_types": [[["global", "local", "global"], 1]]}, "layer 2 differs"),
        ("bloom", {"n_layer": 3, "n_head": 4}, "cannot verify trees"),
        ("mamba", {}, "has recurrent layers"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "has recurrent layers"),
        ("llama4_text", {"num_local_experts": 2, "attention_chunk_size": 5}, "cannot verify trees"),
    ],
)
def test_families_that_cannot_verify_trees(family, options, message, small_heads):
    with pytest.raises(ValueError, match=message):
        code.generate(of_family(family, **options), heads=small_heads, inputs=PROMPTS[:1], max_new_tokens=2)


def test_attention_without_masks(plain, export, monkeypatch):
    monkeypatch.setattr(plain.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"flash_attention_2.*load the model with attn_implementation='sdpa'"):
        code.generate(plain, heads=export(), inputs=PROMPTS[:1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_come_back_as_they_were(make_heads, export, variant):
    heads, directory = make_heads(**VARIANTS[variant]), export(variant)
    back = load_heads(directory, dtype=None)
    assert find_format(directory).name == "custom-generate"
    assert (back.config.architecture, back.config.num_layers) == (heads.config.architecture, heads.config.num_layers)
    state = {name: tensor for name, tensor in heads.state_dict().items() if name != "draft_ids"}
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in state.items())


def test_an_adapter_cannot_travel(make_heads, tmp_path):
    heads = make_heads(base_adapter="somewhere")
    with pytest.raises(ValueError, match=r"'custom-generate' cannot hold the adapter .*: native"):
        export_heads(Export(heads), "custom-generate", tmp_path / "out")
    assert not (tmp_path / "out").exists()


ALONE = """
import sys, torch
sys.modules["medusa"] = None  # cannot be imported
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64)
options = {"inputs": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12, "do_sample": False}
text = model.generate(**options)
for source in sys.argv[2:]:
    assert torch.equal(text, model.generate(**options, custom_generate=source, trust_remote_code=True)), source
"""


@pytest.mark.slow
def test_without_this_project_from_a_directory_and_from_the_hub(base_directory, export, tmp_path):
    """A Hub repository is what the Hub's own cache says it is."""
    cached = tmp_path / "hub" / "models--some-one--heads-1.5"
    shutil.copytree(export("markov"), cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(base_directory), export("markov"), "some-one/heads-1.5"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
