"""Multi-token-prediction layers: what transformers computes over a whole text, row by row as the base commits."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from medusa import BaseModel, MedusaModel, Prefix, SamplingParams, Speculation
from medusa.base.mtp import MtpLayer
from medusa.drafters.model import ModelDrafter
from medusa.drafters.writers import MtpWriter
from medusa.engine.graph import StepGraphs
from medusa.engine.step import decode_step
from medusa.loading.self_test import fuse
from tests.medusa.passes import prefill
from tests.medusa.rules import make_rule
from tests.medusa.tape import Recorder
from tests.medusa.test_conformance import FAMILIES, SHAPE
from tests.medusa.test_model_drafter import words

GLM = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN = {
    "mtp_layer_types": ["full_attention"], "mtp_num_hidden_layers": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
KINDS = {"deepseek_v3": FAMILIES["deepseek_v3"], "glm4_moe": GLM} | {
    name: FAMILIES[name] | QWEN for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
}
PROMPTS = [[5, 6, 7, 9, 4, 4, 8], [9, 8], [11] * 20, [4]]
ANSWER = {"max_new_tokens": 16, "ignore_eos": True}


def tiny(family):
    """A random base whose layer is not useless: what it reads of the next token is what the base reads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | KINDS[family] | {"num_mtp_layers": 1}))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    layers = MtpModel(model, 1).float().eval()
    for name, weight in layers.named_parameters():
        if "experts" in name:  # memory that nobody has written
            weight.data.normal_(std=0.02)
    base = BaseModel(model, words(), family)
    base = base.with_traits(gathered=family == "deepseek_v3")
    return base.with_mtp(MtpLayer(layers, base.attention, base.device)), layers


@pytest.mark.parametrize("family", KINDS)
@torch.inference_mode()
def test_drafts_are_those_of_transformers(family):
    base, layers = tiny(family)
    drafter = ModelDrafter(MtpWriter(base), base.vocab_size, 4, 0.0, host_decides=False)
    texts = [list(prompt) for prompt in PROMPTS if len(prompt) > 1]
    sequences, state = prefill(base, texts, observers=[base.mtp])
    for _ in range(4):
        draft = drafter.propose(state, sequences)
        for row, text in enumerate(texts):
            assert draft.tokens[row, 1:].tolist() == drafted(base, layers, text, 3)
        result = decode_step(base, sequences, drafter, make_rule(), state)
        state = result.state
        for text, tokens in zip(texts, result.tokens, strict=True):
            text += tokens


def drafted(base, layers, text, count):
    """The layer over the whole text, then over its own output, by transformers alone."""
    hidden = base.hidden_states(torch.tensor([text]))[:, :-1]
    ids, cache = torch.tensor([text[1:]]), MtpCache(config=base.model.config.get_mtp_config())
    places, found = torch.arange(1, len(text))[None], []
    plain = copy.copy(layers)
    for _ in range(count):
        hidden = plain.forward_layer(0, hidden, places, cache, input_ids=ids)[:, -1:]
        found.append(int(base.logits(hidden).argmax()))
        ids, places = torch.tensor([[found[-1]]]), places[:, -1:] + 1
    return found


@pytest.mark.parametrize(
    ("family", "name", "sampling"),
    [
        ("deepseek_v3", "mtp", {"temperature": 0.8, "top_p": 0.9}), ("glm4_moe", "mtp+prompt-lookup", {}),
        ("qwen3_5_text", "mtp", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value else "greedy",
)  # fmt: skip
def test_texts_are_the_bases_own(family, name, sampling):
    """Qwen 3.5's whole pass is one call of our kernels, and the pass of its first layer is not."""
    base = fuse(tiny(family)[0])
    assert base.fused == (family == "qwen3_5_text")
    model, options = MedusaModel(base), ANSWER | sampling
    plain = model.generate(PROMPTS, nodes=1, seed=[1, 2, 3, 4], **options)
    drafted = model.generate(PROMPTS, nodes=5, drafter=name, seed=[1, 2, 3, 4], **options)
    assert [o.tokens for o in drafted] == [o.tokens for o in plain]
    mixed = [Speculation(drafter=way, nodes=5) for way in (name, "prompt-lookup", "early-exit", name)]
    sampled = [SamplingParams(**options, seed=seed) for seed in (1, 2, 3, 4)]
    outputs = model.generate(PROMPTS, sampling=sampled, speculation=mixed)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]


def test_rows_follow_those_of_the_base_when_others_come_and_go():
    base, _ = tiny("glm4_moe")
    model, prefix = MedusaModel(base), Prefix()
    batch, completions = model.batch(), []
    for number, count in enumerate((9, 20, 16)):
        wanted = Speculation(drafter="mtp" if number else None, nodes=4 if number else 1)
        completions.append(batch.add([7 + number, 9], SamplingParams(max_new_tokens=count, ignore_eos=True), wanted))
        batch.step()
        batch.step()
    while len(batch):
        batch.step()
        for request in completions:
            if request.sequence is not None and request.output.tokens and request.speculation.nodes > 1:
                base.mtp.read([request.sequence])
                (own,) = base.mtp.follow([request.sequence])
                assert own.length == request.sequence.length
    for number, completion in enumerate(completions):
        count = len(completion.output.tokens)
        plain = model.generate([7 + number, 9], max_new_tokens=count, nodes=1, ignore_eos=True)
        assert completion.output.tokens == plain.tokens
    text = [5, 9, 7] * 8
    for _ in range(2):
        output = model.generate(text, drafter="mtp", nodes=4, prefix=prefix, **ANSWER)
        assert output.tokens == model.generate(text, nodes=1, **ANSWER).tokens
        text = [*text, *output.tokens, 3, 4, 5]


def test_the_layer_is_read_from_the_bases_checkpoint(tmp_path, monkeypatch):
    """As DeepSeek-V3 stores it: one layer more than the base has."""
    base, layers = tiny("deepseek_v3")
    # transformers knows the layer by its number in the published checkpoint, 61.
    monkeypatch.setattr(type(base.model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    base.model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    weights, number = load_file(tmp_path / "model.safetensors"), base.num_layers
    stored = {"post_norm": "shared_head.norm"}
    for name, tensor in layers.layers[0].state_dict().items():
        own = name.removeprefix("mtp_block.")
        first, _, rest = own.partition(".")
        weights[f"model.layers.{number}.{stored.get(first, first)}.{rest}"] = tensor.contiguous()
    experts(weights, number)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = MedusaModel.from_pretrained(None, tmp_path, dtype=torch.float32, mtp=True)
    assert "mtp+prompt-lookup" in model.explain()
    prompt = [5, 6, 7, 9, 4, 4, 8]
    ours = MedusaModel(base).generate(prompt, drafter="mtp", nodes=4, **ANSWER)
    loaded = model.generate(prompt, drafter="mtp", nodes=4, **ANSWER)
    assert (loaded.tokens, loaded.steps) == (ours.tokens, ours.steps)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_the_layer_is_read_as_qwen_stores_it(tmp_path, family):
    base, layers = tiny(family)
    del base.model.config.num_mtp_layers, base.model.config.mtp_layer_types
    base.model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    stored = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    for name, tensor in layers.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        weights[f"mtp.{stored.get(first, 'layers.0')}.{rest}"] = tensor.contiguous()
    experts(weights, "0", "mtp.layers")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = MedusaModel.from_pretrained(None, tmp_path, dtype=torch.float32, mtp=True)
    prompt = [5, 6, 7, 9, 4, 4, 8]
    ours = MedusaModel(base).generate(prompt, drafter="mtp", nodes=4, **ANSWER)
    loaded = model.generate(prompt, drafter="mtp", nodes=4, **ANSWER)
    assert (loaded.tokens, loaded.steps) == (ours.tokens, ours.steps)
    with torch.inference_mode():
        for mine, theirs in zip(model.base.mtp._model.layers.parameters(), layers.layers.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def experts(weights, layer, stack="layers"):
    """Experts are stored one by one, and held in one tensor."""
    for name in [name for name in weights if f"{stack}.{layer}.mlp.experts." in name]:
        stem, _, kind = name.rpartition(".")
        tensor = weights.pop(name)
        for expert, matrix in enumerate(tensor):
            if kind == "gate_up_proj":
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    weights[f"{stem}.{expert}.{part}.weight"] = half.contiguous()
            else:
                weights[f"{stem}.{expert}.{kind}.weight"] = matrix.contiguous()


def test_bases_without_the_layer_say_so(base_directory, tmp_path):
    with pytest.raises(ValueError, match="has 0 multi-token-prediction layers and one can be used"):
        MedusaModel.from_pretrained(None, base_directory, mtp=True)
    base, _ = tiny("deepseek_v3")
    base.model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no weights of the layer"):
        MedusaModel.from_pretrained(None, tmp_path, mtp=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(ValueError, match="has 2 multi-token-prediction layers"):
        MedusaModel.from_pretrained(None, tmp_path, mtp=True)
    with pytest.raises(ValueError, match="needs the base's multi-token-prediction layer"):
        MedusaModel.from_pretrained(None, base_directory).generate("a", drafter="mtp")


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_checkpoint_that_lost_the_layer_says_so_in_one_sentence(tmp_path, shard):
    base, _ = tiny("qwen3_5_text")
    del base.model.config.num_mtp_layers, base.model.config.mtp_layer_types
    base.model.save_pretrained(tmp_path, max_shard_size=shard)
    words().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    with pytest.raises(ValueError, match="cannot be loaded") as refused:
        MedusaModel.from_pretrained(None, tmp_path, mtp=True)
    assert str(refused.value) == (
        f"multi-token-prediction layer of the base ({tmp_path}) cannot be loaded: its checkpoint has no weights of the"
        " layer, which tools for fine-tuning often leave out; copy mtp.* from the original checkpoint, or leave mtp out"
    )


def test_where_shapes_are_fixed_steps_run_eagerly(caplog):
    """As on a GPU."""
    base, _ = tiny("glm4_moe")
    plain = MedusaModel(base).generate(PROMPTS, nodes=1, **ANSWER)
    model = MedusaModel(base, graph=StepGraphs(base, Recorder()))
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        outputs = model.generate(PROMPTS, drafter="mtp+prompt-lookup", nodes=5, **ANSWER)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    assert "steps run eagerly" in caplog.text
