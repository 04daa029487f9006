"""Logits of EAGLE-3, DSpark and DFlash drafts by the speculators package; runs in its environment.

`python speculators_check.py JOB.json TENSORS.safetensors RESULT.safetensors`. The job has `base`, `steps`, `exports`
(directories by name), and `made`: by name, a directory and options of drafts with random weights that are written
there. The tensors are `ids` [T] of a text, and `hidden`: outputs of all of the base's layers at its positions [L, T,
D]. The result has logits [steps, places, V] by name: place t of a step reads the base at t and the text's next tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

ALGORITHMS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
}


def make(base: str, directory: str, kind: str, vocabulary: int, algorithm: str = "eagle3", **options: Any) -> None:
    """Write a draft with random weights, as their trainer would."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(base)
    shape = {
        name: getattr(config, name)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
    }
    layer = AutoConfig.for_model(kind, **{"num_hidden_layers": 1, "head_dim": 16} | shape | options.pop("layer", {}))
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    speculators = SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=[proposal], default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(base),
    )  # fmt: skip
    config_class, model_class = ALGORITHMS[algorithm]
    model = model_class(
        config_class(
            transformer_layer_config=layer, draft_vocab_size=vocabulary, speculators_config=speculators, **options
        )
    )
    if vocabulary < config.vocab_size:
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[2 : 2 + 2 * vocabulary : 2] = True
        model.load_vocab_mappings(known, known.nonzero()[:, 0] - torch.arange(vocabulary))
    model.load_verifier_weights()
    for name, parameter in model.named_parameters():
        if "embed" not in name and "verifier" not in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)


@torch.no_grad()
def logits(directory: str, steps: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What a draft says along a text."""
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    if config.speculators_model_type != "eagle3":
        return block_logits(model, ids, hidden)
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, arguments, out: said.append(out[0]))
    features = torch.cat([hidden[layer - 1] for layer in model.config.eagle_aux_hidden_state_layer_ids], dim=-1)
    model(features[None, :-1], ids[None, 1:], torch.zeros(1, len(ids) - 1, dtype=torch.int64), ttt_steps=steps)
    return torch.stack(said)


def block_logits(model: SpeculatorModel, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The same of a block behind every place; its first row is the token behind, from which DFlash guesses nothing."""
    said: list[torch.Tensor] = []

    def loss(logits: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        said.append(logits[0])
        return logits.sum(), {}

    sys.modules[type(model).__module__].compute_metrics = loss
    features = torch.cat([hidden[layer - 1] for layer in model.config.aux_hidden_state_layer_ids], dim=-1)
    places = len(ids) - model.block_size
    nothing = torch.zeros(1, len(ids), dtype=torch.int64)
    model(features[None], ids[None], 1 + nothing, hidden[-1:], nothing, max_anchors=places)
    by_place = said[0].view(places, model.block_size, -1)[1:]  # nothing stands before the first
    return by_place[:, 0 if model.config.sample_from_anchor else 1 :].transpose(0, 1).contiguous()


def main(job_file: str, tensors_file: str, result_file: str) -> None:
    job, tensors = json.loads(Path(job_file).read_text(encoding="utf-8")), load_file(tensors_file)
    for options in job["made"].values():
        make(job["base"], **options)
    made = {name: options["directory"] for name, options in job["made"].items()}
    results = {
        name: logits(directory, job["steps"], tensors["ids"], tensors["hidden"])
        for name, directory in (job["exports"] | made).items()
    }
    save_file(results, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
