"""Plain transformers with exported heads that remember: this project's drafts, and the model's own text."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.formats import Export, export_heads
from medusa.formats.repository import generate as code
from medusa.formats.repository.base import HOLE, Rows
from medusa.formats.repository.heads import Heads
from medusa.heads.layer import LayerConfig
from tests.medusa import test_remembering_heads
from tests.medusa.formats.test_custom_generate import damaged, lucky_trees, of_family, passes_of, same
from tests.medusa.kinds import REMEMBER
from tests.medusa.remembering import TEXTS, Watched

model = test_remembering_heads.model
"""A fixture: heads of many shapes."""
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
SIMPLER = {
    "attention", "attention, a layer of features", "block", "block, a part of the vocabulary", "block, masked rows",
}  # fmt: skip
"""Shapes of heads whose parts others have too."""
QUICK, SLOW = [("gpt2", "attention"), ("mistral", "block")], ["gemma2", "gemma3_text", "opt-350m", "qwen3"]


@pytest.fixture(scope="module", params=REMEMBER)
def export(request, make_heads, tmp_path_factory):
    heads = make_heads(4, architecture=request.param, feature_layers=(1,))
    return str(export_heads(Export(heads), "custom-generate", tmp_path_factory.mktemp(request.param) / "heads"))


def padded(texts):
    """A batch as tokenizers pad it."""
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_side="left")
    ones = [torch.ones(len(text), dtype=torch.int64) for text in texts]
    return {"inputs": tokens, "attention_mask": pad_sequence(ones, batch_first=True, padding_side="left")}


def check_drafts(model, plain, texts, tmp_path, monkeypatch):
    """Both write the same text from the same drafts."""
    drafter = Watched(model.heads, model.base, nodes=9, host_decides=False)
    outputs = model.generate(texts, drafter=drafter, max_new_tokens=12, ignore_eos=True)
    trees, draft = [], Heads.draft
    monkeypatch.setattr(Heads, "draft", lambda *news, **named: trees.append(draft(*news, **named)) or trees[-1])
    directory = str(export_heads(Export(model.heads), "custom-generate", tmp_path / "heads"))
    written = code.generate(plain, heads=directory, nodes=9, **padded(texts), **OPTIONS)
    assert written[:, -12:].tolist() == [output.tokens for output in outputs]
    for row, text in enumerate(texts):
        theirs = [(told.tokens[at], told.parents[at]) for said, told, at in drafter.seen if said[: len(text)] == text]
        assert 2 < len(theirs) < len(trees)
        for tree, (tokens, parents) in zip(trees[1:], theirs, strict=False):  # the first one tested the files
            assert torch.equal(tree.tokens[row], tokens)
            assert torch.equal(tree.parents[row], parents)


@pytest.mark.parametrize(
    "model", [shape for shape in test_remembering_heads.SHAPES if shape not in SIMPLER], indirect=True
)
def test_drafts_are_those_of_this_project(model, plain, tmp_path, monkeypatch):
    check_drafts(model, plain, TEXTS, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(SLOW, REMEMBER * 2, strict=True))],
)
def test_families(family, architecture, tokenizer, tmp_path, monkeypatch):
    """The heads read the last layer too, whose output transformers hands out behind the last norm only."""
    base, plain = BaseModel(of_family(family), tokenizer, family), of_family(family)
    shape = {"architecture": architecture, "feature_layers": (2, 3), "layer": LayerConfig.of(base.config)}
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 3, **shape)).to(base.dtype)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    check_drafts(MedusaModel(base, heads), plain, TEXTS[:1], tmp_path, monkeypatch)


def test_memory_is_that_of_the_committed_text(plain, export, monkeypatch):
    """Whatever was drafted and rejected, and in a batch of texts of several lengths."""
    batch, memories, remember = padded(TEXTS) | OPTIONS | {"max_new_tokens": 20}, [], Heads.remember
    expected = plain.generate(**batch)
    monkeypatch.setattr(Heads, "remember", lambda *news: memories.append(remember(*news)) or memories[-1])
    monkeypatch.setattr(Heads, "draft", lucky_trees(plain, expected, batch["attention_mask"]))
    with passes_of(plain) as passes:
        text = code.generate(plain, heads=export, nodes=24, **batch)
    assert torch.equal(text, expected)
    assert len(passes) < 17
    base, heads = code._load(plain, export, {})
    for row, prompt in enumerate(TEXTS):
        ids = text[row, text.shape[1] - len(prompt) - 20 :][None]
        positions = torch.arange(ids.shape[1])[None]
        hidden = Rows(base, heads.feature_layers).prefill(ids, positions, None)
        at_once = remember(heads, base, None, hidden[:, :-1], ids[:, 1:], positions[:, :-1])
        kept = memories[-1].positions[row] != HOLE
        count = int(kept.sum())
        assert count > len(prompt) + 12
        assert torch.equal(memories[-1].positions[row, kept], torch.arange(count))
        for ours, whole in zip(memories[-1][1:], at_once[1:], strict=True):
            torch.testing.assert_close(ours[:, row, :, kept], whole[:, 0, :, :count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(base_directory, export, dtype):
    model = AutoModelForCausalLM.from_pretrained(base_directory, dtype=dtype)
    with passes_of(model) as passes:
        text = code.generate(model, heads=export, **padded(TEXTS), **OPTIONS)
    assert text.shape == (len(TEXTS), len(TEXTS[2]) + 12)
    assert len(passes) > 1


def test_options_and_seed_are_heeded(plain, export):
    same(plain, export, inputs=torch.tensor([[9]]), do_sample=True, temperature=0.4, top_p=0.9)
    ends = plain.generate(**padded(TEXTS[:2]), **OPTIONS)[:, -4].tolist()
    same(plain, export, **padded(TEXTS[:2]), eos_token_id=ends, pad_token_id=1)


BAD = {
    "no-layer": (lambda values, tensors: values.update(layer=None), "are damaged: TypeError"),
    "odd-heads": (lambda values, tensors: values["layer"].update(head_dim=7), "layer's 4 heads of size 7"),
    "no-norm": (lambda values, tensors: tensors.pop("output_norm.weight"), "are damaged: KeyError"),
    "other-layers": (lambda values, tensors: values.update(feature_layers=[9]), "must be different layers of the base"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_do_not_fit(plain, export, tmp_path, name):
    change, message = BAD[name]
    heads = damaged(export, tmp_path / "heads", change)
    with pytest.raises(ValueError, match=message):
        code.generate(plain, heads=heads, inputs=torch.tensor([[5, 6, 7]]))
