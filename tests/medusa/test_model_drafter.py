"""Draft models and early exit: caches that follow the base's, drafts that are the model's own, texts that stay."""

import logging
import random

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from medusa import BaseModel, MedusaModel, Prefix, SamplingParams, Speculation
from medusa.acceptance.logits import NO_NOISE, Warper
from medusa.drafters import EarlyExitDrafter, ExitLayer, ModelDrafter, SmallModel
from medusa.drafters.early_exit import FEWEST
from medusa.engine.graph import StepGraphs
from medusa.loading.load import load_base_and_heads
from tests.medusa.passes import finish, prefill
from tests.medusa.tape import Recorder
from tests.medusa.test_conformance import config_of

FAMILIES = ("llama", "gpt2", "opt", "qwen3")
PROMPTS = [[5, 6, 7], [9, 8, 3, 12, 40, 9, 8], [11] * 20, [4]]
ANSWER = {"max_new_tokens": 16, "ignore_eos": True}


def words(size=50):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    )


def tiny(family, seed=0, noise=0.0, dtype=torch.float64, **shape):
    """A random base of a family; with noise, one that mostly agrees with the base of the same seed."""
    torch.manual_seed(seed)
    config = config_of(family, **shape)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return BaseModel(model, words(config.vocab_size), family)


def pair(family, noise=0.02):
    """A base, and a draft model that is right about some of what it says."""
    return tiny(family), tiny(family, noise=noise)


GREEDY, SAMPLED = {}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


@pytest.mark.parametrize(
    ("family", "name", "sampling"),
    [
        ("gpt2", "draft-model", SAMPLED), ("opt", "early-exit", SAMPLED),
        ("qwen3", "draft-model", SAMPLED), ("qwen3", "early-exit", GREEDY),
        ("llama", "draft-model+prompt-lookup", SAMPLED), ("llama", "draft-model+early-exit", GREEDY),
    ],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value else "greedy",
)  # fmt: skip
def test_texts_are_the_bases_own(family, name, sampling):
    base, small = pair(family)
    model, options = MedusaModel(base, draft_model=small), ANSWER | sampling
    plain = model.generate(PROMPTS, nodes=1, seed=[1, 2, 3, 4], **options)
    drafted = model.generate(PROMPTS, nodes=6, drafter=name, seed=[1, 2, 3, 4], **options)
    alone = model.generate(PROMPTS[1], nodes=6, drafter=name, seed=2, **options)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert alone.tokens == plain[1].tokens
    if "draft-model" in name:
        assert sum(output.steps for output in drafted) < 0.8 * sum(output.steps for output in plain)


def watch(monkeypatch, seen):
    """Note how many tokens of each row models have to read before they draft."""
    read = SmallModel._read

    def noting(self, state, own, missing):
        seen.append(missing)
        return read(self, state, own, missing)

    monkeypatch.setattr(SmallModel, "_read", noting)


def test_rows_come_and_go_and_the_models_cache_follows(monkeypatch):
    base, small = pair("llama")
    model, passes = MedusaModel(base, draft_model=small), []
    watch(monkeypatch, passes)
    wanted = Speculation(drafter="draft-model", nodes=4)
    lengths = [9, 30, 16, 24, 12]
    plain = [model.generate([7 + n, 9], max_new_tokens=k, nodes=1, ignore_eos=True) for n, k in enumerate(lengths)]
    batch, completions = model.batch(), []
    for number, count in enumerate(lengths):
        completions.append(batch.add([7 + number, 9], SamplingParams(max_new_tokens=count, ignore_eos=True), wanted))
        batch.step()
        batch.step()
    finish(batch)
    assert [c.output.tokens for c in completions] == [output.tokens for output in plain]
    assert max(max(missing) for missing in passes) <= 4, "nothing is computed again when rows come and go"


def test_a_conversation_keeps_the_models_rows(monkeypatch):
    base, small = pair("llama")
    model, prefix, missing = MedusaModel(base, draft_model=small), Prefix(), []
    watch(monkeypatch, missing)
    text = [5, 9, 7] * 24
    for _ in range(2):
        output = model.generate(text, max_new_tokens=8, drafter="draft-model", nodes=4, prefix=prefix, ignore_eos=True)
        assert output.tokens == model.generate(text, max_new_tokens=8, nodes=1, ignore_eos=True).tokens
        text, first = [*text, *output.tokens, 3, 4, 5], missing[0]
        missing.clear()
    assert first[0] < len(text) / 2


def test_a_model_that_is_the_base_is_always_right():
    base, twin = pair("llama", noise=0.0)
    for options in ({}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}):
        noise = Warper(0.9, top_p=0.95) if options else NO_NOISE
        drafter = ModelDrafter(SmallModel(twin), base.vocab_size, 5, 0.1, host_decides=False, noise=noise)
        outputs = MedusaModel(base).generate(PROMPTS, drafter=drafter, **ANSWER | options)
        assert [output.steps for output in outputs] == [4] * 4, "the same noise, the same draws"
    drawn = {"temperature": 0.9, "top_k": 9, "seed": 3, "acceptance": "speculative", "nodes": 5}
    model = MedusaModel(base, draft_model=twin)
    assert model.generate([5, 6, 7], drafter="draft-model", **ANSWER | drawn).steps == 4, "p / q is 1"


@torch.inference_mode()
def test_drafts_are_what_the_model_says_and_leave_no_trace():
    base, small = pair("llama", noise=0.1)
    drafter = ModelDrafter(SmallModel(small), base.vocab_size, 5, 0.0, width=1)
    sequences, state = prefill(base, PROMPTS)
    draft = drafter.propose(state, sequences)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for token in draft.tokens[row, 1 : draft.row_sizes[row]].tolist():
            assert token == int(small.model(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)
    assert torch.equal(draft.tokens, drafter.propose(state, sequences).tokens)
    assert [one.length for one in sequences] == [len(prompt) - 1 for prompt in PROMPTS]
    assert [one.followers[small].length for one in sequences] == [len(prompt) for prompt in PROMPTS]


@torch.inference_mode()
def test_drafts_end_where_one_more_guess_does_not_pay():
    base, small = pair("llama")
    small.model.lm_head.weight.data *= 4  # surer than it should be
    sizes, (sequences, state) = {}, prefill(base, PROMPTS)
    for cost in (0.01, 0.3, 3.0):
        drafter = ModelDrafter(SmallModel(small), base.vocab_size, 12, cost, width=1)
        sizes[cost] = sum(drafter.propose(state, sequences).row_sizes)
    assert sizes[0.01] > sizes[0.3] > sizes[3.0]


@torch.inference_mode()
def test_other_children_stand_beside_the_best_ones():
    base, small = pair("llama", noise=0.05)
    sequences, state = prefill(base, PROMPTS)
    draft = ModelDrafter(SmallModel(small), base.vocab_size, 9, 0.05).propose(state, sequences)
    logprobs = small.model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    first = [int(t) for t, p in zip(draft.tokens[0, 1:], draft.parents[0, 1:], strict=True) if p == 0 and t]
    assert first[: len(first)] == logprobs.topk(len(first)).indices.tolist()
    assert draft.scores[0, 1].item() == pytest.approx(float(logprobs.max()), abs=1e-4)


def test_a_text_that_fills_the_models_context_is_not_drafted():
    base, small = tiny("llama"), tiny("llama", max_position_embeddings=20)
    model = MedusaModel(base, draft_model=small)
    plain = model.generate(PROMPTS, nodes=1, **ANSWER)
    outputs = model.generate(PROMPTS, nodes=5, drafter="draft-model", **ANSWER)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    assert outputs[2].steps == plain[2].steps
    assert outputs[0].steps < plain[0].steps


@pytest.mark.parametrize("sizes", [(50, 64), (64, 50)], ids=["padded base", "padded draft model"])
def test_models_may_pad_their_vocabularies_differently(sizes):
    """Qwen2.5-0.5B and 7B do; tokens of the padding are never drafted by the smaller matrix, and harmless in texts."""
    base, small = (tiny("llama", vocab_size=size) for size in sizes)
    for part in (base, small):
        part.tokenizer = words(50)
    model, prompts = MedusaModel(base, draft_model=small), [[5, 6, 7], [3, base.vocab_size - 1, 4]]
    for options in ({}, {"temperature": 1.0, "seed": 2}, {"temperature": 1.0, "seed": 2, "acceptance": "speculative"}):
        outputs = model.generate(prompts, drafter="draft-model", nodes=4, **ANSWER | options)
        if "acceptance" not in options:
            plain = model.generate(prompts, nodes=1, **ANSWER | options)
            assert [o.tokens for o in outputs] == [o.tokens for o in plain]


def test_early_exit_finds_its_layer(caplog):
    torch.manual_seed(0)
    base = tiny("llama", num_hidden_layers=8)
    for layer in base.decoder.layers[4:]:  # layers that change nothing
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model = MedusaModel(base)
    with caplog.at_level(logging.INFO, "medusa.drafters.early_exit"):
        output = model.generate([3, 4, 5], max_new_tokens=FEWEST + 20, drafter="early-exit", nodes=5, ignore_eos=True)
    plain = model.generate([3, 4, 5], max_new_tokens=FEWEST + 20, nodes=1, ignore_eos=True)
    assert output.tokens == plain.tokens
    assert "early exit after layer 4 of 8: right for 100 % of" in caplog.text
    assert output.steps <= FEWEST + 20 / 2


def test_a_given_exit_and_a_wrong_one():
    base = tiny("gpt2")
    exit_layer = ExitLayer(base)
    exit_layer.model = base.shallow(2)
    drafter = EarlyExitDrafter(exit_layer, 4)
    model = MedusaModel(base)
    plain = model.generate(PROMPTS, nodes=1, **ANSWER)
    assert [o.tokens for o in model.generate(PROMPTS, drafter=drafter, **ANSWER)] == [o.tokens for o in plain]
    with pytest.raises(ValueError, match=r"exit layer \(3\) must be from 1 to 2"):
        base.shallow(3)
    with pytest.raises(ValueError, match="at least 2 for an early exit"):
        EarlyExitDrafter(exit_layer, 1)
    with pytest.raises(ValueError, match="has one layer and no early exit"):
        MedusaModel(tiny("llama", num_hidden_layers=1)).generate([3], drafter="early-exit", nodes=4)


def test_fused_passes_draft_too(base_directory):
    """Both models as one call of C++, trees of several sizes, rows that are not drafted for."""
    model = MedusaModel.from_pretrained(None, base_directory, dtype=torch.float32, draft_model=base_directory)
    plain = model.generate(PROMPTS, nodes=1, **ANSWER)
    for name in ("draft-model", "early-exit", "draft-model+early-exit"):
        outputs = model.generate(PROMPTS, nodes=6, drafter=name, **ANSWER)
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    mixed = [Speculation(drafter=name, nodes=6) for name in ("draft-model", "prompt-lookup", "early-exit", "ngram")]
    outputs = model.generate(PROMPTS, speculation=mixed, sampling=SamplingParams(**ANSWER))
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]


def test_wrong_pairs_are_refused(base_directory, tmp_path):
    base = load_base_and_heads(None, base_directory)[0]
    other = tiny("llama")
    with pytest.raises(ValueError, match="another vocabulary than the base"):
        MedusaModel(base, draft_model=other)
    with pytest.raises(ValueError, match="cannot take back what it has drafted"):
        MedusaModel(base, draft_model=base.with_traits(decoding="plain"))
    with pytest.raises(ValueError, match="needs a draft model and there is none"):
        MedusaModel(base).generate("a", drafter="draft-model")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        MedusaModel.from_pretrained(None, base_directory, draft_model=tmp_path / "missing")
    with pytest.raises(ValueError, match="at least 2 for a draft model"):
        ModelDrafter(SmallModel(other), other.vocab_size, 1, 0.1)


def test_the_default_where_there_is_a_draft_model():
    base, small = pair("llama")
    model = MedusaModel(base, draft_model=small)
    assert "draft-model+prompt-lookup" in model.explain()
    plain = model.generate([5, 6, 7], nodes=1, **ANSWER)
    output = model.generate([5, 6, 7], **ANSWER)
    assert output.tokens == plain.tokens
    assert output.steps < plain.steps


@pytest.mark.parametrize("nodes", [2, 4])
def test_few_nodes_go_to_the_drafters_that_know_most(nodes):
    base, small = pair("llama")
    model = MedusaModel(base, graph=StepGraphs(base, Recorder()), draft_model=small)
    plain = model.generate([5, 6, 7], nodes=1, **ANSWER)
    output = model.generate([5, 6, 7], drafter="ngram+prompt-lookup+draft-model", nodes=nodes, **ANSWER)
    assert output.tokens == plain.tokens
    assert output.steps < plain.steps


NAMES = (
    None, "draft-model", "early-exit", "prompt-lookup", "draft-model+prompt-lookup", "draft-model+early-exit+ngram",
)  # fmt: skip


@pytest.mark.parametrize("seed", [1, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))])
def test_rows_that_come_and_go_with_any_drafters_keep_their_texts(seed):
    chance = random.Random(seed)
    base, small = pair(FAMILIES[seed % 4])
    model = MedusaModel(base, draft_model=small, graph=StepGraphs(base, Recorder()) if seed % 3 == 0 else None)
    batch, plain, rows = model.batch(), MedusaModel(base), []
    for _ in range(30):
        action = chance.random()
        if action < 0.35:
            prompt = [chance.randrange(1, 50) for _ in range(chance.randint(1, 40))]
            new, temperature = chance.randint(1, 20), chance.choice([0.0, 0.9])
            params = SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=temperature, seed=seed)
            wanted = Speculation(drafter=chance.choice(NAMES), nodes=chance.choice([None, 2, 5, 9]))
            rows.append((prompt, params, batch.add(prompt, params, wanted)))
        elif action < 0.42 and rows:
            batch.remove(chance.choice(rows)[2])
        else:
            batch.step()
    finish(batch)
    for prompt, params, completion in rows:
        expected = plain.generate(prompt, sampling=params, speculation=Speculation(nodes=1)).tokens
        found = completion.output
        assert found.tokens == expected[: len(found.tokens)]
        assert found.finish_reason == "abort" or len(found.tokens) == len(expected)
