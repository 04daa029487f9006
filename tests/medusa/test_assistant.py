"""Gemma 4's assistants: drafts are what transformers' own say of a text and a path, and texts are the base's own."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel, MedusaModel, Prefix, SamplingParams, Speculation
from medusa.cache import BLOCK, FixedTexts
from medusa.cache.follower import Followed
from medusa.cpu.native import available
from medusa.drafters import HeadsDrafter, SampledHeadsDrafter
from medusa.engine.config import EngineConfig
from medusa.engine.graph import StepGraphs
from medusa.formats import find_format, holders, load_heads, refusal
from medusa.heads.frozen import freeze
from medusa.io.hub import is_model
from medusa.loading.load import load_draft_model
from medusa.tree import Tree
from tests.medusa.assistants import BASES, KINDS, VOCABULARY, as_published, assistant, config_of_base, gemma, logits_of
from tests.medusa.formats.stored import change_config
from tests.medusa.passes import finish, prefill
from tests.medusa.remembering import Watched
from tests.medusa.tape import Recorder, Strict
from tests.medusa.test_graph import contents, meta_state
from tests.medusa.test_model_drafter import tiny as words_of
from tests.medusa.test_replay import compared
from tests.medusa.trees import by_path

INTERPRETED = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="see test_attention_triton.py")
TEXTS = [[5, 6, 7, 9, 4, 4, 8], [9, 8], [11, 3, 40] * 20]
OPTIONS = {"max_new_tokens": 16, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": [1, 2, 3]}


@pytest.fixture(scope="module")
def base():
    return gemma()


@pytest.fixture(scope="module")
def double():
    """In float64: sums in another order choose no other token, and torch's operators compute all."""
    return gemma(attention="reference", dtype=torch.float64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An assistant that scores tokens of the best centroids alone, as those of E2B and E4B."""
    assistant(tmp_path / "assistant", monkeypatch)
    return tmp_path / "assistant"


@pytest.fixture
def model(base, folder):
    return MedusaModel(base, load_heads(folder))


@torch.no_grad()
def scores(known, base, text, paths):
    """For each path the sum of log-probabilities along it, less what each depth costs."""
    found = {}
    for path in paths:
        found[path] = 0.0
        for depth, token in enumerate(path):
            logits = logits_of(known, base, text, path[:depth])
            if known.masked_embedding is not None:  # transformers gives the others a little less than the least
                logits = logits.masked_fill(logits == logits.min(), -torch.inf)
            found[path] += float(logits.log_softmax(-1)[token]) - 1e-4
    return found


@pytest.mark.parametrize(
    ("kind", "attention", "centroids"),
    [
        ("layers that share keys", "exact", 8),
        ("own keys", "reference", 0),
        ("layers that share keys", "flash", 0),
        pytest.param("layers that share keys", "triton", 8, marks=INTERPRETED),
    ],
)
def test_every_node_is_what_transformers_says_of_text_and_path(tmp_path, monkeypatch, kind, attention, centroids):
    """In a batch of texts of several lengths, behind accepted drafts, longer than the windows."""
    known, base = assistant(tmp_path, monkeypatch, centroids), gemma(kind, attention)
    as_published(tmp_path)
    model = MedusaModel(base, load_heads(tmp_path))
    assert (model.heads.fused is not None) == (attention == "exact" and available())
    drafter = Watched(model.heads, model.base, 9, host_decides=False)
    batch, params = model.batch(config=EngineConfig(chunk=5)), SamplingParams(max_new_tokens=8, ignore_eos=True)
    for text in TEXTS:
        batch.add(text, params, Speculation(drafter))
    finish(batch)
    assert max(draft.depth for _, draft, _ in drafter.seen) == 5 and len(drafter.seen) > 9
    for text, draft, row in drafter.seen[::6]:
        found = by_path(draft, row)
        assert len(found) > 1
        assert found == pytest.approx(scores(known, base, text, found), abs=2e-3)


@pytest.mark.skipif(not available(), reason="there is no C++ compiler here")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
@torch.inference_mode()
def test_layers_in_one_call_are_those_in_python(folder, dtype, tolerance):
    """For several nodes of several texts."""
    base = gemma("own keys", "exact", dtype)
    heads = freeze(load_heads(folder).to(dtype), base)
    sequences, state = prefill(base, TEXTS)
    level = heads.begin(state.hidden, base, sequences)
    x_BmA = torch.randn(len(TEXTS), 5, 16, dtype=dtype)
    ours, heads.fused = heads._through(x_BmA, level.text), None
    torch.testing.assert_close(ours, heads._through(x_BmA, level.text), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize(("name", "sampling"), [("heads", {}), ("hybrid", SAMPLED), (None, {})])
def test_texts_are_the_bases_own(folder, kind, name, sampling):
    model = MedusaModel(gemma(kind), load_heads(folder))
    plain = model.generate(TEXTS, nodes=1, **OPTIONS | sampling)
    drafted = model.generate(TEXTS, drafter=name, nodes=name and 7, **OPTIONS | sampling)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert name is None or sum(one.draft_tokens for one in drafted) > 9


def test_a_prompt_that_is_known_serves_drafts_as_well(model):
    prefix, prompt = Prefix(), TEXTS[2]
    for turn in range(2):
        output = model.generate(prompt, prefix=prefix, drafter="heads", nodes=7, **OPTIONS)
        again = model.generate(prompt, drafter="heads", nodes=7, **OPTIONS)
        assert (output.tokens, output.accepted) == (again.tokens, again.accepted)
        assert (output.cached_tokens > 0) == (turn > 0)
        prompt = [*prompt, *output.tokens, 3, 4]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_recorded_step_is_the_eager_step(double, folder, monkeypatch, drawn):
    monkeypatch.setattr("medusa.cache.pool.RESERVED", 2048)
    recorded = MedusaModel(double, load_heads(folder), StepGraphs(double, recorder := Recorder()))
    eager, heads, options = MedusaModel(double, load_heads(folder)), recorded.heads, OPTIONS
    drafter = HeadsDrafter(heads, double, 9, host_decides=False)
    if drawn:
        options = options | {"temperature": 1.0, "seed": 2, "acceptance": "speculative"}
        drafter = SampledHeadsDrafter(heads, double, 7, 1.0)
    outputs = recorded.generate(TEXTS, drafter=drafter, **options)
    assert contents(outputs) == contents(eager.generate(TEXTS, drafter=drafter, **options))
    assert any(any(output.drafted) for output in outputs), "some guesses are right"
    assert recorder.recorded == 1 and recorder.replays > 5


def test_the_draft_on_the_device_never_asks_the_host(base, folder):
    plain = AutoModelForCausalLM.from_config(base.model.config).to("meta")
    for layer in (plain.lm_head, plain.model.embed_tokens):
        layer._hf_hook = SimpleNamespace(execution_device="meta")
    meta = BaseModel(plain, None)
    meta.spans, heads = base.spans, freeze(load_heads(folder).to("meta"), meta)
    pool = meta.new_pool(4 * BLOCK)
    for layer in base.key_layers.values():
        shape = (1, 2, 1, 16 if layer % 2 else 8)
        pool.arenas[layer].allocate(5, torch.empty(shape, device="meta"), torch.empty(shape, device="meta"))
    with torch.inference_mode():
        state, table = meta_state(meta)
        part = Followed(FixedTexts(pool, table, state.positions, 64), state.hidden)
        with Strict():
            draft = HeadsDrafter(heads, meta, 9, host_decides=False).propose(state, {None: part})
    assert draft.tokens.shape == (2, 9)


def test_replays_draft_what_decoding_drafts(double, folder):
    outputs = list(compared(lambda: MedusaModel(double, load_heads(folder)), "hybrid", 20, ignore_eos=True))
    assert any(any(output.drafted) for output in outputs), "some guesses are right"


def test_heads_by_name_stand_beside_others(base, model):
    both = MedusaModel(base).with_heads({"assistant": model.heads})
    plain = both.generate(TEXTS[0], nodes=1, **OPTIONS)
    output = both.generate(TEXTS[0], heads="assistant", drafter="heads", tree=None, nodes=5, **OPTIONS)
    assert output.tokens == plain.tokens and output.draft_tokens > 0


def test_a_static_tree_is_filled(model):
    output = model.generate(TEXTS[0], tree=Tree.full([3, 2, 1]), **OPTIONS)
    assert output.tokens == model.generate(TEXTS[0], nodes=1, **OPTIONS).tokens
    assert output.draft_tokens == 15 * (output.steps - 1)


def test_its_folder_is_one_of_heads_that_is_only_read(folder):
    heads = load_heads(folder)
    assert find_format(folder).name == "gemma4-assistant" and not is_model(folder)
    assert holders(heads.config) == ["native"]
    assert "is only read" in refusal("gemma4-assistant", heads.config)
    with pytest.raises(ValueError, match="not trained here"):
        heads(torch.zeros(1, 32), torch.zeros(1, 5), None)


def test_it_is_kept_in_the_native_format(model, folder, tmp_path):
    model.save_pretrained(tmp_path / "native")
    again, first = load_heads(tmp_path / "native"), load_heads(folder)
    assert again.config.assistant == first.config.assistant
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in first.state_dict().items())


def test_another_base_is_refused(folder):
    with pytest.raises(ValueError, match="no layers of full_attention, sliding_attention whose keys"):
        MedusaModel(words_of("llama", vocab_size=VOCABULARY), load_heads(folder))


def test_as_a_draft_model_it_is_called_by_its_name(base, folder):
    with pytest.raises(ValueError, match="these are heads; give them as heads"):
        load_draft_model(folder, base)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("hidden_activation", "silu", "another activation"),
        ("attention_bias", True, "biases"),
        (
            "rope_parameters",
            {key: {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0} for key in KINDS},
            "its positions are dynamic",
        ),
        ("vocab_size", VOCABULARY + 8, "does not fit"),
    ],
)
def test_other_layers_are_refused(folder, key, value, why):
    layers = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=layers | {key: value})
    with pytest.raises(ValueError, match=why):
        load_heads(folder)


@pytest.mark.parametrize(
    "sizes", [{"head_dim": 4}, {"global_head_dim": 32}, {"num_attention_heads": 6, "num_key_value_heads": 3}]
)
def test_a_base_whose_heads_have_other_sizes_is_refused(folder, sizes):
    """Kernels would read beside its keys."""
    changed = config_of_base("own keys", **sizes)
    base = BaseModel(AutoModelForCausalLM.from_config(changed).eval(), None, "other", "exact")
    with pytest.raises(ValueError, match="does not fit the assistant's 4 heads of size"):
        MedusaModel(base, load_heads(folder))


@torch.inference_mode()
def test_scores_do_not_depend_on_the_number_of_nodes(base, folder):
    """Many nodes are scored in another way than few."""
    heads = freeze(load_heads(folder), base)
    normed_BmA = torch.randn(3, 5, 16)
    each = [heads._logits(one[None, None])[0, 0] for one in normed_BmA.flatten(0, 1)]
    torch.testing.assert_close(heads._logits(normed_BmA).flatten(0, 1), torch.stack(each))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("centroid_intermediate_top_k", 9, "reads 9 centroids"), ("centroid_intermediate_top_k", 0, "at least 1")],
)
def test_more_centroids_than_there_are_cannot_be_read(folder, key, value, why):
    change_config(folder, **{key: value})
    with pytest.raises(ValueError, match=why):
        load_heads(folder)
