"""The model card: what is known of heads and their run, and nothing that is not."""

import json
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard

from medusa import HeadsConfig
from medusa.io.card import base_license, model_card, write_card
from medusa.io.hub import CARD_MARK

CONFIG = HeadsConfig(64, 256, num_heads=2, base="user/base", architecture="medusa")
PROVENANCE = {
    "recipe": {
        "optim": {"loss": "kl", "lr": 0.002, "rows_per_step": 4},
        "lora": {"rank": 0},
        "engine": {"precision": "float32"},
        "evaluate": {"nodes": 16},
    },
    "base": {"name": "user/base", "revision": "abc123", "training": "frozen"},
    "figures": {
        "heldout_samples": [500, 500],
        "heldout_top1": [0.5458, 0.4986],
        "heldout_top5": [0.78, 0.73],
        "heldout_tokens_per_step": 2.2407,
    },
    "totals": {"steps": 493, "epochs": 1.0, "train_seconds": 7200.0, "useful_tokens": 435192},
    "data": {"source": "/home/somebody/secret/train.jsonl", "rows": 1973, "row_tokens": 512},
    "command": "/home/somebody/.venv/bin/python -m train",
    "processes": 2,
    "device": "AMD EPYC",
    "versions": {"torch": "2.13.0", "peft": None},
}
REPORT = {
    "drafters": {"heads": {"tokens_per_step": 2.387, "tokens_per_s": 361.6, "speedup": 1.158}},
    "plain_tokens_per_s": 295.5, "prompts": 24, "max_new_tokens": 128, "dtype": "bfloat16", "fused": True,
    "device": "cpu", "threads": 2,
    "identical_outputs": {"count": 24, "total": 24, "dtype": "float32", "against": "plain greedy"},
}  # fmt: skip


def test_a_gguf_file_on_the_hub_is_named_with_its_repository():
    card = ModelCard(model_card(replace(CONFIG, base="user/base-GGUF:Q4_K_M"), "native"))
    assert card.data.base_model == "user/base-GGUF"
    assert "a local model" not in card.text
    assert "user/base-GGUF:Q4_K_M" in card.text


def test_a_card_tells_the_run():
    card = model_card(CONFIG, "native", "me/heads", PROVENANCE, REPORT, {"license": "mit"})
    assert ModelCard(card).data.to_dict() == {
        "base_model": "user/base", "library_name": "medusa-decoding", "license": "mit",
        "pipeline_tag": "text-generation", "tags": ["medusa", "speculative-decoding"],
    }  # fmt: skip
    for line in (
        "# Draft heads for user/base",
        "| base | user/base, revision abc123 |",
        "| output layer | the base's, shared |",
        "| guessed token | best 1 | best 5 |",
        "| t + 2 | 54.6% | 78.0% |",
        "| t + 3 | 49.9% | 73.0% |",
        "Tokens per step on held-out prompts (plain decoding: 1), trees of 16 nodes: **2.24**",
        "24 held-out prompts, 128 new tokens at most, greedy, on cpu, 2 threads, bfloat16, fused pass:",
        "| none (plain) | 1.00 | 296 | 1.00x |",
        "| heads | 2.39 | 362 | 1.16x |",
        "Outputs identical to plain greedy (float32): 24 of 24.",
        "| base in training | frozen |",
        "| data | train.jsonl |",
        "| rows | 1973 x 512 tokens |",
        "| loss | kl |",
        "| time | 2.0 h |",
        "| machine | 2 x AMD EPYC |",
        "| versions | torch 2.13.0 |",
        'model = MedusaModel.from_pretrained("me/heads")',
    ):
        assert line in card.splitlines()
    others = "`medusa-v2`, `tgi`, `lorax`, `vllm`, `universal`, `custom-generate`."
    assert (
        "`medusa export --heads me/heads --format FORMAT --out DIR` writes the heads in the formats " + others in card
    )
    assert "somebody" not in card


def test_what_is_not_known_is_left_out():
    config = HeadsConfig(64, 256, base="/home/somebody/models/base", architecture="markov")
    card = model_card(config, "native")
    assert yaml.safe_load(card.split("---")[1]).keys() == {"library_name", "pipeline_tag", "tags"}
    assert [line for line in card.splitlines() if line.startswith("#")] == [
        "# Draft heads for base (a local model)", "## The heads", "## Use",
    ]  # fmt: skip
    assert 'MedusaModel.from_pretrained("DIR", base="BASE")' in card
    assert "None" not in card
    assert "somebody" not in card
    wrong = {"heldout_top1": "high", "heldout_tokens_per_step": []}
    nonsense = {"figures": wrong, "recipe": [], "data": 3, "totals": None}
    assert "held-out" not in model_card(config, "native", provenance=nonsense)


def test_joint_training_is_said():
    config = HeadsConfig(64, 256, base="user/base", base_adapter="adapter")
    card = model_card(config, "native", provenance=PROVENANCE | {"recipe": {"lora": {"rank": 32}}})
    assert "the text is that of the base with the adapter" in card
    assert "| base in training | changed by an adapter of rank 32 |" in card


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm", ["vllm serve user/base --speculative-config '"]),
        ("tgi", ["text-generation-launcher --model-id me/heads"]),
        ("lorax", ["lorax-launcher --model-id user/base --adapter-id me/heads"]),
        ("universal", ["vllm serve user/base", "text-generation-launcher --model-id", "lorax-launcher --model-id"]),
        ("custom-generate", ['model.generate(**inputs, custom_generate="me/heads", trust_remote_code=True']),
    ],
)
def test_a_card_says_how_its_format_is_used(name, said):
    card = model_card(CONFIG, name, "me/heads")
    assert all(words in card for words in said)
    assert 'MedusaModel.from_pretrained("me/heads")' in card
    assert "`native`" not in card, "no other engine reads it"
    plain = name == "custom-generate"
    assert ModelCard(card).data.library_name == ("transformers" if plain else "medusa-decoding")
    assert ("custom_generate" in ModelCard(card).data.tags) == plain
    if "vllm serve" in card:
        (line,) = [line for line in card.splitlines() if line.startswith("vllm serve")]
        options = json.loads(line.split("'")[1])
        assert options == {"method": "medusa", "model": "me/heads", "num_speculative_tokens": 2}


def test_the_license_is_the_bases(tmp_path):
    assert base_license(str(tmp_path)) == base_license("") == {}
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: base-license\nlicense_link: LICENSE\ntags: [x]\n---\n# Base\n")
    found = {"license": "other", "license_name": "base-license", "license_link": "LICENSE"}
    assert base_license(str(tmp_path)) == found
    assert ModelCard(model_card(CONFIG, "native", license_data=found)).data.license_name == "base-license"
    for text in ("---\nlicense: [\n---\n", "license: mit\n", "---\ntags: [x]\n---\nlicense: mit\n", ""):
        card.write_text(text)
        assert base_license(str(tmp_path)) == {}
    card.write_bytes(b"\xff")
    assert base_license(str(tmp_path)) == {}


def test_a_card_is_written_again_unless_somebody_has_changed_it(tmp_path):
    write_card(tmp_path, CONFIG, "native")
    write_card(tmp_path, CONFIG, "tgi")
    card = tmp_path / "README.md"
    assert "| format | tgi |" in card.read_text()
    card.write_text(card.read_text().replace(CARD_MARK, ""))
    write_card(tmp_path, CONFIG, "native")
    assert "| format | tgi |" in card.read_text()
