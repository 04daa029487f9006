"""Decoding is lossless, ends where it must, and streams what it returns."""

import copy
import dataclasses
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import BaseModel, HeadsConfig, MedusaModel, SamplingParams, Speculation, Tree, build_heads
from medusa.base.names import shipped_heads
from medusa.drafters import Drafter, HeadsDrafter, PlainDrafter
from medusa.formats import save_heads
from medusa.tree import Draft

PROMPTS = ["def f(x):", "a", "once upon a time"]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def plain(base):
    model = MedusaModel(base)
    return {
        temperature: model.generate(PROMPTS, max_new_tokens=24, temperature=temperature, seed=7, nodes=1)
        for temperature in (0.0, 1.0)
    }


@pytest.mark.parametrize(
    "around",
    [
        partial(torch.device, "meta"),
        partial(torch.autocast, "cpu", torch.float16),
        partial(default_dtype, torch.float64),
    ],
    ids=["another default device", "autocast", "another default dtype"],
)
def test_what_a_program_sets_for_its_own_tensors_changes_nothing(base_directory, around):
    options = {"base": base_directory, "dtype": torch.bfloat16, "device": "cpu"}
    rules = [Speculation(nodes=4), Speculation(acceptance="typical", nodes=4)]
    params = [
        SamplingParams(max_new_tokens=12, repetition_penalty=1.2, presence_penalty=0.5),
        SamplingParams(max_new_tokens=12, temperature=1.0, seed=3),
    ]

    def write(model):
        return [each.tokens for each in model.generate(PROMPTS[:2], sampling=params, speculation=rules)]

    model = MedusaModel.from_pretrained(None, **options)
    expected = write(model)
    with around():
        assert write(model) == expected
        assert write(MedusaModel.from_pretrained(None, **options)) == expected


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_goes_on():
    """In a process of its own: what waits for threads that are not there would wait for ever."""
    code = """
import multiprocessing, sys
from medusa import MedusaModel
model = MedusaModel.from_pretrained("embedded", device="cpu")
def write(*_):
    return model.generate("def add(", max_new_tokens=8).tokens
expected = write()
with multiprocessing.get_context("fork").Pool(1) as pool:
    sys.exit(pool.apply_async(write).get(60) != expected)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=180)


def test_prompt_lookup_saves_steps_without_any_heads(base):
    """A base that sees only the newest token soon goes in circles."""
    blind = copy.deepcopy(base.model)
    for layer in blind.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model = MedusaModel(BaseModel(blind, base.tokenizer))
    plain = model.generate("a", max_new_tokens=90, nodes=1)
    looked_up = model.generate("a", max_new_tokens=90, drafter="prompt-lookup", nodes=8)
    assert looked_up.tokens == plain.tokens
    assert looked_up.steps < plain.steps / 1.5


def test_typical_acceptance_takes_more_and_says_what_it_is(base, make_heads):
    model = MedusaModel(base, make_heads())
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 0, "nodes": 16}
    lossless = model.generate("x = ", **options)
    generous = model.generate("x = ", acceptance="typical", epsilon=1e-6, delta=1e-6, **options)
    assert generous.steps < lossless.steps
    assert generous.tokens_per_step > 1.8


def test_limits_and_ends(model, base):
    output = model.generate("abc", max_new_tokens=7)
    assert (len(output.tokens), output.finish_reason) == (7, "length")
    assert model.generate("abc", max_steps=3).steps == 3
    room = base.context_length - 3
    assert len(model.generate("abc", max_new_tokens=10_000).tokens) <= room
    eos_anyway = model.generate("abc", max_new_tokens=10_000, temperature=1.0, seed=3)
    assert (eos_anyway.finish_reason == "eos") == (eos_anyway.tokens[-1] in base.eos_ids)


def test_an_end_token_inside_an_accepted_span_cuts_there(model, ending_with):
    full = model.generate(PROMPTS[2], max_new_tokens=40)
    end = full.tokens[11]
    cut = MedusaModel(ending_with(end), model.heads).generate(PROMPTS[2], max_new_tokens=40, nodes=64)
    assert cut.tokens == full.tokens[: full.tokens.index(end) + 1]
    assert cut.finish_reason == "eos"


def test_stop_strings_end_the_text_before_them(model):
    text = model.generate(PROMPTS[0], max_new_tokens=40).text
    stop = text[9:12]
    for nodes, stops in ((1, stop), (16, [stop, "never"])):
        output = model.generate(PROMPTS[0], max_new_tokens=40, stop=stops, nodes=nodes)
        assert output.text == text[: text.index(stop)]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("nodes", [1, 16])
def test_streamed_pieces_add_up_to_the_text(model, nodes):
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 11, "nodes": nodes}
    expected = model.generate("héllo", **options)
    stream = model.stream("héllo", **options)
    pieces = list(stream)
    assert "".join(pieces) == expected.text == stream.output.text
    assert stream.output.tokens == expected.tokens
    assert nodes > 1 or not any(piece.drafted for piece in pieces)


def test_a_stopped_stream_keeps_what_there_was(model):
    stream = model.stream("abc", max_new_tokens=40)
    first = next(iter(stream))
    assert stream.output.text.startswith(first)
    assert 0 < len(stream.output.tokens) < 40


def test_prompts_come_as_text_ids_or_tensors(model, base):
    ids = base.tokenizer("abc").input_ids
    expected = model.generate("abc", max_new_tokens=5).tokens
    assert model.generate(ids, max_new_tokens=5).tokens == expected
    assert model.generate(torch.tensor(ids), max_new_tokens=5).tokens == expected
    assert [o.tokens for o in model.generate(torch.tensor([ids, ids]), max_new_tokens=5)] == [expected] * 2
    assert [o.tokens for o in model.generate([ids], max_new_tokens=5)] == [expected]
    first, _ = model.generate([torch.tensor(ids), torch.tensor(ids[1:])], max_new_tokens=5)
    assert first.tokens == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "is empty"),
        ([], {}, "at least one prompt"),
        ("x" * 256, {}, "leaves no room in the base's context"),
        ("abc", {"max_new_tokens": 0}, "max_new_tokens"),
        ("abc", {"max_steps": 0}, "max_steps"),
        ("abc", {"nodes": 0}, "nodes"),
        ("abc", {"tree": Tree.chain(4)}, "exceeds the number of heads"),
        ("abc", {"tree": Tree.chain(2), "nodes": 1}, "replaces nodes"),
        ("abc", {"tree": Tree.chain(2), "drafter": PlainDrafter()}, "replaces nodes and drafter"),
        ("abc", {"tree": Tree.full([300])}, "exceeds the tokens that the heads can draft"),
        ("abc", {"prefix": 5}, r"prefix \(5\) is no Prefix"),
        ("abc", {"heads": []}, r"heads \(\[\]\) is no name"),
        ("abc", {"stop": ["x", ""]}, "end every completion at once"),
        ("abc", {"seed": -1}, "seed"),
        ("abc", {"seed": 2**70}, "seed"),
        ("abc", {"seed": [1, 2]}, "one per prompt"),
        ("abc", {"logit_bias": {257: 1.0}}, r"logit_bias: token id \(257\) is not a number from 0 to 256"),
        ("abc", {"logit_bias": {"5": 1.0}}, "logit_bias: token id"),
        ([5, 10**6], {}, "token id"),
        ([5, -1], {}, "token id"),
        (torch.tensor([0.5]), {}, "token id"),
    ],
)
def test_wrong_inputs_are_named(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, **options)


def test_the_base_of_the_heads_is_named_as_it_can_be_given(base_directory, make_heads, tokenizer, tmp_path):
    heads = make_heads()
    heads.config = dataclasses.replace(heads.config, base=str(base_directory))
    save_heads(heads, tmp_path / "heads")
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    other = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=32, **shape)
    LlamaForCausalLM(other).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=f"belong to {re.escape(str(base_directory.resolve()))}: give that one"):
        MedusaModel.from_pretrained(tmp_path / "heads", base=tmp_path / "other", device="cpu")


def test_heads_of_another_base_are_refused(base):
    heads = build_heads(HeadsConfig(base.hidden_size + 1, base.vocab_size, base="other/base"))
    with pytest.raises(ValueError, match=r"hidden size \(33\) is not the base's \(32.*other/base"):
        MedusaModel(base, heads)


def test_missing_bases_are_named(tmp_path, model):
    with pytest.raises(FileNotFoundError, match="base directory"):
        MedusaModel.from_pretrained(None, base=tmp_path / "no" / "base")
    with pytest.raises(ValueError, match="neither heads nor a base is named"):
        MedusaModel.from_pretrained(None)
    MedusaModel(model.base, model.heads.with_config(base="")).save_pretrained(tmp_path / "heads")
    with pytest.raises(ValueError, match="names no base and none is given"):
        MedusaModel.from_pretrained(tmp_path / "heads")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded"):
        MedusaModel.from_pretrained(None, base=tmp_path / "empty")


@pytest.mark.parametrize(
    ("architecture", "weight", "value"),
    [
        ("medusa", lambda heads: heads.weight[0, 1], math.nan),
        ("medusa", lambda heads: heads.weight[0, 1], 1e4),
        ("markov", lambda heads: heads.up[1], math.inf),
        ("hydra", lambda heads: heads.blocks[1][0].outer.weight, 1e4),
        ("recurrent", lambda heads: heads.blocks[0].outer.weight, math.nan),
        ("recurrent", lambda heads: heads.blocks[0].outer.weight, math.inf),
    ],
)
def test_heads_that_overflow_change_speed_and_never_text(base, make_heads, plain, value, architecture, weight):
    heads = make_heads(architecture=architecture)
    weight(heads).data *= value
    model = MedusaModel(base, heads)
    for nodes, unlikely_left_out in ((3, True), (16, True), (3, False), (16, False)):
        drafter = HeadsDrafter(heads, base, nodes, host_decides=unlikely_left_out)
        outputs = model.generate(PROMPTS, max_new_tokens=10, drafter=drafter)
        assert [o.tokens for o in outputs] == [o.tokens[:10] for o in plain[0.0]]
    outputs = model.generate(PROMPTS, max_new_tokens=24)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain[0.0]]
    assert not any(math.isnan(o.tokens_per_step) for o in outputs)


def test_without_a_seed_each_text_is_another_one_and_says_its_seed(model):
    options = {"max_new_tokens": 10, "temperature": 1.0}
    outputs = model.generate(["x = "] * 3, **options)
    assert len({tuple(output.tokens) for output in outputs}) == 3
    for output in outputs:
        assert model.generate("x = ", seed=output.seed, **options).tokens == output.tokens
    stream = model.stream("x = ", **options)
    assert "".join(stream) == model.generate("x = ", seed=stream.output.seed, **options).text
    shared = model.generate(["x = "] * 2, sampling=SamplingParams(**options))
    assert shared[0].tokens != shared[1].tokens


def test_seeds_that_nobody_gives_are_torchs(model):
    seeds = []
    for _ in range(2):
        torch.manual_seed(3)
        seeds.append(model.generate("x = ", max_new_tokens=1, temperature=1.0).seed)
    assert seeds[0] == seeds[1]
    state = torch.get_rng_state()
    assert model.generate("x = ", max_new_tokens=1).seed is None
    assert torch.equal(torch.get_rng_state(), state), "greedy text draws nothing"


def test_heads_saved_elsewhere_find_their_base_and_decode_the_same(model, base, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "heads")
    MedusaModel.from_pretrained(tmp_path / "heads").save_pretrained(tmp_path / "a" / "b" / "c")
    monkeypatch.chdir(tmp_path)
    loaded = MedusaModel.from_pretrained("a/b/c", dtype=torch.float64)
    assert loaded.base.name == base.name
    output, expected = (each.generate("abc", max_new_tokens=20, nodes=16, drafter="heads") for each in (loaded, model))
    assert (output.tokens, output.steps) == (expected.tokens, expected.steps)


def test_a_damaged_base_is_one_clear_error(base_directory, tmp_path):
    shutil.copytree(base_directory, tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"has damaged weights \(.*\); copy or download its files again"):
        MedusaModel.from_pretrained(None, base=tmp_path / "base")


@pytest.mark.parametrize("heads", [None, "smollm2"])
def test_heads_that_are_given_as_a_base_are_named(heads):
    with pytest.raises(ValueError, match=r"base \(.*smollm2\) is a directory of heads; give it as heads, and a base"):
        MedusaModel.from_pretrained(heads, base=shipped_heads("smollm2"))


def test_a_device_that_is_not_there_is_named(base_directory):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch sees no GPU"):
        MedusaModel.from_pretrained(None, base=base_directory, device="cuda")


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["a", 5], r"prompt 2 \(5\) is neither text nor token ids; give"),
        (["a", None], r"prompt 2 \(None\) is neither"),
        ([{"role": "user", "content": "hi"}], r"is a conversation; convert it with chat_prompt first"),
        ([5, "a"], r"token id \('a'\) is not a number"),
        (None, r"prompts \(None\) are neither text nor token ids"),
        ("\ud800", r"prompt 1 \('.ud800'\) cannot be encoded; give Unicode text"),
        ([True], r"token id \(True\) is not a number"),
    ],
)
def test_what_is_no_prompt(model, prompts, said):
    with pytest.raises(ValueError, match=said):
        model.generate(prompts)


def test_an_empty_text_is_a_prompt_where_texts_begin_with_a_token(base):
    tokenizer = copy.deepcopy(base.tokenizer)
    start = processors.TemplateProcessing("<end> $0", special_tokens=[("<end>", 0)])
    tokenizer.backend_tokenizer.post_processor = start
    assert MedusaModel(BaseModel(base.model, tokenizer)).generate("", max_new_tokens=2).prompt_tokens == 1


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi"], [], 5])
def test_what_is_no_conversation(model, messages):
    with pytest.raises(
        ValueError, match=r"are no conversation; give a list as \[\{.role.: .user., .content.: .Hello.\}\]"
    ):
        model.chat_prompt(messages)


def test_unknown_options_are_told_what_is_near(model):
    with pytest.raises(
        TypeError, match=r"option 'max_tokens' is not known; did you mean max_new_tokens\? see Sampling"
    ):
        model.generate("a", max_tokens=5)
    with pytest.raises(TypeError, match="option 'beams' is not known; see SamplingParams and Speculation"):
        model.generate("a", beams=5)


def test_help_explains_every_option():
    for kind in (SamplingParams, Speculation):
        described = re.findall(r"^ {8}(\w+): ", kind.__doc__, re.MULTILINE)
        assert [field.name for field in dataclasses.fields(kind)] == described[: len(dataclasses.fields(kind))]


def test_a_model_shows_what_it_is_and_cannot_be_copied(model, base):
    shown = f"dtype=torch.float64, device='cpu', exact={base.exact})"
    assert repr(model) == f"MedusaModel(base='{base.name}', heads='3 recurrent', {shown}"
    assert repr(MedusaModel(base)) == f"MedusaModel(base='{base.name}', heads=None, {shown}"
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"a MedusaModel cannot be copied or pickled: .*; share it, or load another"
        ):
            copied(model)


def test_a_conversation_that_the_template_refuses(with_template):
    with pytest.raises(ValueError, match="refuses this: no system role"):
        with_template("{{ raise_exception('no system role') }}").chat_prompt([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="has no chat template"):
        with_template(None).chat_prompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": True},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": None},
        {"top_k": None},
        {"nodes": 2.5},
        {"max_steps": 1.5},
        {"seed": 1.0},
        {"seed": [1.5]},
        {"ignore_eos": "no"},
        {"skip_special_tokens": 1},
    ],
    ids=str,
)
def test_values_of_another_type_get_one_sentence(model, options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} \("):
        model.generate("abc", **{"temperature": 1.0} | options)


def test_numbers_of_numpy_are_shown_as_such(model):
    with pytest.raises(ValueError, match=r"nodes \(np.int64\(4\)\) must be a whole number; correct it"):
        model.generate("abc", nodes=np.int64(4))
    with pytest.raises(ValueError, match=r"temperature \(np.float32\(0.5\)\) must be an int or a float between 0"):
        model.generate("abc", temperature=np.float32(0.5))


@pytest.mark.parametrize("what", ["heads", "base", "draft_model"])
def test_what_is_no_name_of_a_model(base_directory, model, what):
    with pytest.raises(
        ValueError, match=rf"{what} \(of type LlamaForCausalLM\) is no path and no Hub id; give one, or"
    ):
        MedusaModel.from_pretrained(**{"base": base_directory, what: model.base.model})


def test_a_model_of_transformers_is_no_base(base):
    with pytest.raises(TypeError, match=r"base \(of type LlamaForCausalLM\) is no BaseModel; make one with"):
        MedusaModel(base.model)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_what_is_no_dtype_of_a_base(base_directory, dtype):
    with pytest.raises(ValueError, match=r"dtype \(.*\) is not one of a base; give torch.bfloat16, float16 or float32"):
        MedusaModel.from_pretrained(base=base_directory, dtype=dtype)


def test_a_class_is_no_drafter(model):
    with pytest.raises(ValueError, match=r"PlainDrafter'>\) is neither a name nor a Drafter"):
        model.generate("abc", drafter=PlainDrafter)


@dataclasses.dataclass
class Unhashable(Drafter):
    """A drafter as somebody may write it: a dataclass that compares by value has no hash."""

    nodes: int = 1

    def propose(self, state, cache=None):
        return PlainDrafter().propose(state)


def test_any_object_may_draft(model):
    expected = model.generate("abc", max_new_tokens=10, nodes=1).tokens
    assert model.generate("abc", max_new_tokens=10, drafter=Unhashable()).tokens == expected


@pytest.mark.parametrize(
    ("propose", "said"),
    [
        (lambda roots: Draft.chain(roots[:, None].expand(-1, 400)), "proposes 400 nodes, and its `nodes` says 4"),
        (lambda roots: None, "proposes None, which is no Draft"),
        (lambda roots: Draft.chain(roots[:, None].expand(-1, 3).int()), "tokens of torch.int32 and parents of"),
        (lambda roots: Draft.chain(roots[:, None] + 1), "trees below other roots; column 0 must hold"),
        (
            lambda roots: Draft.chain(roots[:, None].repeat(2, 1)),
            r"tokens \(2, 1\) and parents \(2, 1\); both must be \[1, N",
        ),
        (
            lambda roots: Draft.of(roots[:, None].expand(-1, 4), torch.tensor([[0, 2, 1, 0]]), 2),
            "parents behind their children",
        ),
    ],
)
def test_what_is_no_draft_of_a_users_drafter_is_an_error(propose, said, model):
    class Mine(Drafter):
        nodes = 4

        def propose(self, state, cache=None):
            return propose(state.roots)

    with pytest.raises(ValueError, match=rf"drafter \(Mine\) proposes .*{said.removeprefix('proposes ')}"):
        model.generate("abc", max_new_tokens=10, drafter=Mine())


def test_the_lowest_temperature_is_greedy(model):
    expected = model.generate("abc", max_new_tokens=20).tokens
    assert model.generate("abc", max_new_tokens=20, temperature=2.0**-126, seed=0).tokens == expected
