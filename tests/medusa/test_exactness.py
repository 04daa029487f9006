"""Plain decoding's tokens in any dtype: rows are equal bit by bit, whatever passes they are computed in.

The same comparisons are made with the reference backend, where they must fail: sums there depend on where keys stand.
"""

import dataclasses
import os

import pytest
import torch

from medusa import BaseModel, HeadsConfig, MedusaModel, Prefix, build_heads
from medusa.attention.backends import choose
from medusa.attention.contract import BlockTable
from medusa.base.names import full_name, shipped_heads
from medusa.cache import BLOCK
from medusa.cpu import build as native
from medusa.cpu.native import kernels
from medusa.loading import exactness
from medusa.loading.self_test import fuse
from medusa.sampling import SamplingParams
from medusa.tree import Draft
from tests.medusa.attention_cases import FEATURES, MIXED, Case, make, path
from tests.medusa.passes import prefill
from tests.medusa.test_conformance import tiny

CPU = torch.device("cpu")
HALF, SINGLE = torch.bfloat16, torch.float32
DTYPES = [
    pytest.param(HALF, id="bfloat16"),
    pytest.param(torch.float16, id="float16"),
    pytest.param(SINGLE, id="float32"),
]
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 5}}
TEXTS = [
    "def read_lines(path):\n    with open(path) as file:\n", "class Stack:\n    def __init__(self):\n",
    "def test_add():\n    assert add(1, 2) == 3\n\ndef test_add_", "x = [",
]  # fmt: skip


def load(directory, dtype, attention="auto"):
    base = BaseModel.load(directory, dtype, "cpu", pack=True, attention=attention)
    if base.attention.name not in ("exact", attention):
        pytest.skip("there is no C++ compiler here")
    return base


def with_random_heads(base):
    """Heads that are wrong mostly; with prompt lookup beside them some drafts are right."""
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 4, architecture="recurrent"))
    heads.init_from_base(base.lm_head_weight.float())
    for parameter in heads.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return MedusaModel(base, heads)


@pytest.fixture(
    scope="module", params=[DTYPES[0], pytest.param(torch.float16, id="float16", marks=pytest.mark.slow), DTYPES[2]]
)
def base(request):
    return load(full_name("embedded"), request.param)


@pytest.fixture(scope="module")
def model(base):
    return with_random_heads(base)


def test_rows_are_equal_in_passes_of_any_size(base):
    assert exactness.find_out(base).exact, "the log says what differs"


def test_the_comparison_fails_where_sums_depend_on_places():
    old = load(full_name("embedded"), HALF, "reference")
    assert exactness._difference(old) is not None
    assert exactness.find_out(old).exact is False


def test_an_output_layer_whose_rows_depend_on_their_number_is_found(monkeypatch):
    """Hidden states are the same, and one logit of one row of such passes is off."""
    base = load(full_name("embedded"), HALF)
    exact = base.logits
    for rows in (1, 33):

        def logits(hidden, rows=rows):
            found = exact(hidden).clone()
            if len(hidden) == rows:
                found[-1, 3] *= 1.01
            return found

        monkeypatch.setattr(base, "logits", logits)
        assert exactness._difference(base) is not None, rows


def test_trees_and_batches_write_what_plain_decoding_writes(model):
    """Greedy rows and sampled ones, side by side."""
    params = [SamplingParams(max_new_tokens=10, **settings) for _ in TEXTS[::2] for settings in SAMPLING.values()]
    requests = list(zip(TEXTS, params, strict=True))
    plain = [model.generate(text, sampling=each, nodes=1).tokens for text, each in requests]
    for nodes in (4, None):
        outputs = model.generate(TEXTS, sampling=params, nodes=nodes)
        assert [output.tokens for output in outputs] == plain
    outputs = [model.generate(text, sampling=each, nodes=16) for text, each in requests]
    assert [output.tokens for output in outputs] == plain
    assert sum(output.steps for output in outputs) < sum(map(len, plain)), "some drafts were right"


def test_states_do_not_depend_on_chunks_or_on_what_was_cached(base):
    prompt = [(31 * i + 7) % base.vocab_size for i in range(160)]
    states, caches = [], []
    for chunk, cached in ((512, 0), (64, 0), (7, 130), (1, 150)):
        pool = base.new_pool()
        if cached:
            (before,), _ = prefill(base, [prompt[: cached + 1]], chunk=33, pool=pool)
            before.remember(prompt)
            before.close()
        (sequence,), state = prefill(base, [prompt], chunk=chunk, pool=pool)
        states.append(state.hidden)
        assert sequence.length == 159
        places = BlockTable(pool.tables.of([sequence.line]), pool.size).places(torch.arange(159)[None])[0]
        buffers = [rows.flatten(0, 1) for arena in pool.arenas for rows in arena.buffers]
        caches.append(torch.cat([rows[places].flatten() for rows in buffers]))
    assert all(torch.equal(state, states[0]) for state in states)
    assert all(torch.equal(rows, caches[0]) for rows in caches)


def test_a_kept_prefix_changes_nothing(model):
    prefix, prompt = Prefix(), model.base.tokenizer(TEXTS[0]).input_ids
    first = model.generate(prompt, prefix=prefix, max_new_tokens=2 * BLOCK, nodes=16, ignore_eos=True)
    second = [*prompt, *first.tokens[: 2 * BLOCK + 1 - len(prompt)], *model.base.tokenizer(TEXTS[1]).input_ids]
    with_prefix = model.generate(second, prefix=prefix, max_new_tokens=16, nodes=16)
    assert with_prefix.cached_tokens == len(second) // BLOCK * BLOCK > len(prompt)
    assert with_prefix.tokens == model.generate(second, max_new_tokens=16, nodes=1).tokens


@pytest.fixture(scope="module")
def exact():
    backend, reason = choose("auto", CPU, HALF)
    if backend.name != "exact":
        pytest.skip(reason)
    return backend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [Case(groups=3, lengths=(300, 127, 0)), *MIXED, *FEATURES.values()], ids=str)
def test_a_row_of_a_tree_is_the_row_of_its_path(exact, case, dtype):
    """Each node once more as the last row of a chain whose keys stand at their positions; nothing else in the pass."""
    layer = make(case, dtype)
    queries, outputs = (rows.split(case.sizes) for rows in (layer.query, layer.run(exact)))
    for sequence, (length, (parents, _)) in enumerate(zip(case.lengths, layer.trees(), strict=True)):
        for node in range(len(parents)):
            nodes = path(parents, node)
            places = layer.places(sequence, torch.tensor([*range(length), *(length + index for index in nodes)]))
            alone = dataclasses.replace(
                layer, drafts=[Draft.chain(torch.zeros(1, len(nodes), dtype=torch.int64))],
                lengths=torch.tensor([length]), kv_length=len(places), query=queries[sequence][nodes],
                table=BlockTable(torch.zeros(1, 1, dtype=torch.int64), len(places)),
                key=layer.key.flatten(0, 1)[places][None], value=layer.value.flatten(0, 1)[places][None],
            )  # fmt: skip
            assert torch.equal(alone.run(exact)[-1], outputs[sequence][node])


def test_layers_that_torch_computes_are_not_exact():
    assert "Conv1D" in str(exactness._known(tiny("gpt2", "exact")[0]))


def test_threads_change_nothing(exact):
    outputs, threads = [], torch.get_num_threads()
    layer = make(Case(nodes=5, groups=3, lengths=(700,)), HALF)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(layer.run(exact))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def forget_kernels():
    native.load.cache_clear()
    kernels.cache_clear()


def test_without_a_compiler_the_reference_computes_and_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    forget_kernels()
    try:
        backend, reason = choose("auto", CPU, HALF)
    finally:
        forget_kernels()
    assert backend.name == "reference"
    assert "no C++ compiler (g++, clang++, c++) is on the path" in reason


def test_a_kernel_that_does_not_build_says_why_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(native.NativeUnavailableError, match=r"kernel \(broken.cpp\) does not build or load: .*error"):
        native.load(source)
    assert {file.suffix for file in (tmp_path / "cache" / "medusa").iterdir()} <= {".lock"}


def test_a_kernel_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    assert native.load(source).seven() == 7
    (built,) = (tmp_path / "cache" / "medusa").glob("*.so")
    before = built.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.load(source).seven() == 7
    assert built.stat().st_mtime_ns == before
    assert built.name.startswith("small-")


QUESTIONS = [
    question.format(topic)
    for question in (
        "Explain {}.", "Write a short story about {}.", "What do you know about {}?", "List five facts about {}.",
    )
    for topic in (
        "the sea", "trains", "a lost key", "the number seven", "bread", "Rome", "recursion", "owls", "the moon",
        "chess", "glass", "a river", "coffee", "maps", "violins", "winter",
    )
]  # fmt: skip


PROMPTS = int(os.environ.get("MEDUSA_EXACT_PROMPTS", "4"))
TOKENS = int(os.environ.get("MEDUSA_EXACT_TOKENS", "16"))
"""Of the comparison below; 64 prompts take an hour."""


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("name", ["embedded", "smollm2"])
def test_texts_of_many_prompts(name, fused, smollm2_directory, monkeypatch):
    """All texts of trees of 4, of 16 and of automatic size, alone or in batches of 4, are those of plain decoding.

    Every other text is sampled.
    """
    if name == "smollm2":
        if not fused:
            monkeypatch.setattr("medusa.loading.load.fuse", lambda base: base)
        model = MedusaModel.from_pretrained(shipped_heads("smollm2"), base=smollm2_directory)
    else:
        base = load(full_name("embedded"), HALF)
        model = with_random_heads(exactness.find_out(fuse(base) if fused else base))
    assert model.base.exact and model.base.fused == fused
    prompts = [model.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS[:PROMPTS]]
    params = [SamplingParams(max_new_tokens=TOKENS, **settings) for _ in prompts[::2] for settings in SAMPLING.values()]
    requests = list(zip(prompts, params, strict=True))
    plain = [model.generate(prompt, sampling=each, nodes=1).tokens for prompt, each in requests]
    for nodes, batch in ((1, 4), (4, 1), (16, 4), (None, 4)):
        groups = [zip(*requests[i : i + batch], strict=True) for i in range(0, len(prompts), batch)]
        outputs = [out for group, each in groups for out in model.generate(list(group), sampling=each, nodes=nodes)]
        same = sum(output.tokens == text for output, text in zip(outputs, plain, strict=True))
        assert same == len(prompts), f"nodes {nodes}, batch {batch}: {same} equal"
