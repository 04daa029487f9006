"""Training heads for OPT-350M's shape, whose last hidden states and embeddings are narrower than its layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from medusa import MedusaModel
from tests.train.jobs import metrics, run

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "opt", vocab_size=len(tokenizer), hidden_size=32, word_embed_proj_dim=24, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, do_layer_norm_before=False, init_std=0.3, eos_token_id=0,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("opt")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_trained_heads_share_the_output_layer_and_the_text_is_transformers_own(
    opt: Path, recipe: Path, tmp_path: Path
) -> None:
    values = {"base.name": opt, "heads.feature_layers": 1, "heads.architecture": "recurrent"}
    assert run(recipe, tmp_path, **values) == 0
    *steps, last = metrics(tmp_path)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert last["heldout_tokens_per_step"] >= 1.0
    model = MedusaModel.from_pretrained(tmp_path / "heads", dtype=torch.float64, device="cpu")
    assert model.heads is not None
    assert (model.heads.config.hidden_size, model.heads.config.feature_layers) == (24, (1,))
    text = model.base.tokenizer("say 12").input_ids
    tokens = model.generate(text, max_new_tokens=12, nodes=8, drafter="heads", ignore_eos=True).tokens
    with torch.inference_mode():
        for token in tokens:
            logits = model.base.model(torch.tensor([text]), use_cache=False).logits
            assert int(logits[0, -1].argmax()) == token
            text.append(token)
