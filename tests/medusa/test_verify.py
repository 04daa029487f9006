"""What a user may say about how a base is loaded reaches transformers."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel, MedusaModel


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"quantization_config": "int8"}])
def test_a_base_that_is_spread_or_quantised_stays_where_transformers_puts_it(base_directory, monkeypatch, options):
    """The options reach transformers; a machine with accelerate and torchao takes them from there."""
    load, asked = AutoModelForCausalLM.from_pretrained, {}

    def loading(name, dtype, **rest):
        asked.update(rest)
        model, found = load(name, dtype=dtype, output_loading_info=True)
        monkeypatch.setattr(model, "to", None)
        return model, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu", pack=True, load_options=options)
    assert asked == options | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    assert base.logits(base.hidden_states(torch.tensor([[1, 2, 3]]))).shape == (1, 3, base.vocab_size)


@pytest.mark.parametrize("offloaded", ["model.layers.1", "lm_head"])
def test_layers_on_a_disk_give_the_same_text(base_directory, tmp_path, offloaded):
    pytest.importorskip("accelerate")
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {part: "disk" if part == offloaded else "cpu" for part in parts}
    options = {"device_map": places, "offload_folder": str(tmp_path)}
    texts = [
        MedusaModel.from_pretrained(base=base_directory, dtype=torch.float32, device="cpu", load_options=load_options)
        .generate(list(range(60, 90)), max_new_tokens=16)
        .tokens
        for load_options in (None, options)
    ]
    assert texts[0] == texts[1]


def test_a_device_map_needs_accelerate(base_directory):
    if importlib.util.find_spec("accelerate"):
        pytest.skip("accelerate is installed")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*accelerate"):
        BaseModel.load(base_directory, load_options={"device_map": "auto"})
