"""Heads that read several layers: what the base gives them, what they make of it, and that no text depends on it."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from medusa import BaseModel, HeadsConfig, MedusaModel, Tree, build_heads
from medusa.base.taps import DecoderPass, spread_layers
from medusa.formats import save_heads
from medusa.heads import ARCHITECTURES
from medusa.train.fresh_heads import last_norm
from medusa.tree import Draft
from tests.medusa.kinds import MEMORYLESS
from tests.medusa.passes import prefill, verify
from tests.medusa.test_conformance import SINGLE, tiny
from tests.medusa.test_heads import Vocabulary

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 2, 9]]
LAYERS = (2, 1)
"""Of three; the order is the heads' own."""


def transformers_own(oracle, text):
    """[T, F]: the last hidden state and the outputs of ``LAYERS``, as transformers itself returns them."""
    states = oracle(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[-1], *(states[layer] for layer in LAYERS)], dim=-1)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gemma3_text", "mixtral"])
@torch.inference_mode()
def test_rows_of_texts_and_trees_are_transformers_hidden_states(family):
    untapped, oracle = tiny(family)
    base = untapped.tapped(LAYERS)
    close = {"atol": 2e-4, "rtol": 1e-4} if family in SINGLE else {"atol": 1e-5, "rtol": 1e-5}
    assert base.feature_size == 3 * base.hidden_size
    text = torch.tensor(PROMPTS[:1])
    torch.testing.assert_close(base.hidden_states(text)[0], transformers_own(oracle, PROMPTS[0]), **close)
    assert torch.equal(base.hidden_states(text)[..., : base.hidden_size], untapped.hidden_states(text))
    assert torch.equal(base.logits(base.hidden_states(text)), untapped.logits(untapped.hidden_states(text)))

    tree, (sequences, state) = Tree.full([2, 1]), prefill(base, PROMPTS, chunk=4)
    torch.testing.assert_close(state.hidden[1], transformers_own(oracle, PROMPTS[1])[-2], **close)
    tokens = torch.randint(3, 50, (2, tree.nodes), generator=torch.Generator().manual_seed(5))
    tokens[:, 0] = torch.tensor([prompt[-1] for prompt in PROMPTS])
    draft = Draft.of(tokens, tree.parents.expand_as(tokens), tree.depth)
    hidden = verify(base, sequences, draft)
    for row, prompt in enumerate(PROMPTS):
        for node in range(tree.nodes):
            drafted = tokens[row, 1:][draft.ancestors[row, node, 1:]].tolist()
            torch.testing.assert_close(hidden[row, node], transformers_own(oracle, prompt + drafted)[-1], **close)


@pytest.fixture(scope="module")
def llama() -> BaseModel:
    return tiny("llama")[0]


@torch.inference_mode()
def test_the_last_layer_is_read_before_the_last_norm():
    base = tiny("llama")[0].tapped((2, 3))
    state = prefill(base, PROMPTS, chunk=4)[1]
    for hidden in (base.hidden_states(torch.tensor(PROMPTS[:1]))[0], state.hidden):
        last, _, layer = hidden.split(base.hidden_size, dim=-1)
        torch.testing.assert_close(base.model.model.norm(layer), last)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_weight_of_the_last_norm_is_found_beside_a_bias(family):
    base = tiny(family)[0]
    norm = base.model.model.norm if family == "llama" else base.model.transformer.ln_f
    with torch.no_grad():
        for value in norm.parameters():
            value.uniform_(0.5, 2)
    torch.testing.assert_close(last_norm(base), norm.weight.to(base.dtype), rtol=1e-4, atol=1e-4)


def test_a_base_without_taps_stays_as_it_is(llama):
    ids = torch.tensor(PROMPTS[:1])
    assert llama.tapped(()) is llama
    assert llama.tapped(LAYERS).tapped(LAYERS).tapped(()).hidden_states(ids).shape[-1] == llama.hidden_size
    assert llama.hidden_states(ids).shape[-1] == llama.feature_size == llama.hidden_size


def test_layers_carry_one_hook_and_keep_no_pass_alive(llama):
    bases = [llama.tapped(layers) for layers in (LAYERS, LAYERS, (1,))]
    outputs = []
    keep = llama.model.model.layers[0].register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))
    for base in bases:
        base.hidden_states(torch.tensor(PROMPTS[:1]))
    keep.remove()
    gc.collect()
    assert [output() for output in outputs] == [None] * 3
    assert [len(layer._forward_hooks) for layer in llama.model.model.layers] == [1, 1, 0]


def test_passes_of_two_threads_do_not_mix(llama):
    """Both stand in the middle of their pass at the same time."""
    layers, texts = [(1,), LAYERS], torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    bases = [llama.tapped(taps) for taps in layers]
    expected = [base.hidden_states(text[None]) for base, text in zip(bases, texts, strict=True)]
    found, meet = [None, None], threading.Barrier(2, timeout=30)

    def run(index):
        found[index] = bases[index].hidden_states(texts[index][None])

    def wait(*_):
        meet.wait()

    waiting = [layer.register_forward_hook(wait) for layer in llama.model.model.layers]
    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in waiting:
        hook.remove()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((1, 4), r"feature layers \(1, 4\) must be different layers of the base, from 1 to 3"),
        ((0,), "must be different layers"),
        ((1, 1), "must be different layers"),
        (("1",), "must be different layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(llama, layers, message):
    with pytest.raises(ValueError, match=message):
        llama.tapped(layers)


class Decoder(nn.Module):
    """Four layers under a name that no family uses, behind as many experts in a layer of their own; two are called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.ModuleList(nn.Identity() for _ in range(4))])
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(4))

    def forward(self, rows):
        self.blocks[1](rows.expand(4, -1, -1, -1))
        return SimpleNamespace(last_hidden_state=self.blocks[0](rows))


def test_a_base_whose_layers_cannot_be_told_is_one_clear_error():
    with pytest.raises(ValueError, match=r"layers of the base \(Decoder\) cannot be found: .* no list of 5 modules"):
        DecoderPass(Decoder(), [1], 5)


def test_what_is_no_hidden_state_is_one_clear_error():
    rows = torch.zeros(1, 2, 8)
    assert DecoderPass(Decoder(), [1], 4)(rows=rows).shape == (1, 2, 16), "the list of layers is the outer one"
    with pytest.raises(ValueError, match=r"a layer of the base gives \(4, 1, 2, 8\) where .* is \(1, 2, 8\)"):
        DecoderPass(Decoder(), [2], 4)(rows=rows)
    with pytest.raises(ValueError, match="a layer of the base gives None"):
        DecoderPass(Decoder(), [3], 4)(rows=rows)


@pytest.mark.parametrize(
    ("count", "num_layers", "layers"),
    [(0, 1, ()), (1, 2, (1,)), (2, 5, (2, 3)), (3, 32, (8, 16, 24)), (4, 5, (1, 2, 3, 4)), (7, 9, None), (8, 12, None)],
)
def test_layers_are_spread_below_the_last(count, num_layers, layers):
    found = spread_layers(count, num_layers)
    assert layers is None or found == layers
    assert len(set(found)) == count
    assert set(found) <= set(range(1, num_layers))


def test_more_layers_than_there_are_cannot_be_spread():
    with pytest.raises(ValueError, match=r"feature layers \(3\) are more than the layers below the last one .* \(2\)"):
        spread_layers(3, 3)


@pytest.mark.parametrize("architecture", MEMORYLESS)
def test_heads_add_what_normed_layers_say_to_the_last_hidden_state(architecture):
    heads = build_heads(HeadsConfig(8, 20, 3, architecture=architecture, feature_layers=(1, 4)))
    hidden, path, with_layers = torch.randn(5, 24), torch.randint(20, (5, 3)), Vocabulary()
    fresh_features = heads(hidden, path, with_layers)
    torch.testing.assert_close(fresh_features, hidden[:, :8].expand(3, -1, -1))
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    normed = [part / part.pow(2).mean(-1, keepdim=True).sqrt() for part in (hidden[:, 8:16], 100 * hidden[:, 16:])]
    fused = hidden[:, :8] + torch.cat(normed, 1) @ heads.fusion.weight.T
    torch.testing.assert_close(heads.fuse(hidden), fused, atol=1e-4, rtol=1e-4)
    plain = build_heads(HeadsConfig(8, 20, 3, architecture=architecture))
    plain.load_state_dict({name: value for name, value in heads.state_dict().items() if name != "fusion.weight"})
    torch.testing.assert_close(heads(hidden, path, with_layers), plain(fused, path, with_layers), atol=1e-3, rtol=1e-3)
    begun, begun_plain = heads.begin(hidden, with_layers), plain.begin(fused, with_layers)
    torch.testing.assert_close(begun, begun_plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("layers", "width"), [((1, 4), 8), ((1, 4), 16), ((), 24)])
@pytest.mark.parametrize("architecture", MEMORYLESS)
def test_hidden_states_of_other_layers_are_one_clear_error(architecture, layers, width):
    heads = build_heads(HeadsConfig(8, 20, 3, architecture=architecture, feature_layers=layers))
    with pytest.raises(ValueError, match=rf"hidden state \({width} numbers\) must hold 8 .* {len(layers)} feature"):
        heads.begin(torch.zeros(2, width), Vocabulary())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_text_depends_on_what_heads_read(base, make_heads, model, architecture):
    heads = make_heads(architecture=architecture, feature_layers=(1,))
    reader, right, prompts = MedusaModel(base, heads), 0, [*PROMPTS, [5]]
    greedy, sampled = [{"nodes": 9, "drafter": "heads"}, {"tree": Tree.full([3, 2])}], [{"nodes": 16}]
    for options, ways in (({}, greedy), ({"temperature": 1.0, "seed": 7}, sampled)):
        expected = model.generate(prompts, max_new_tokens=12, nodes=1, **options)
        for how in ways:
            outputs = reader.generate(prompts, max_new_tokens=12, **how, **options)
            assert [o.tokens for o in outputs] == [o.tokens for o in expected]
            right += sum(sum(o.drafted) for o in outputs)
    assert right
    assert model.base.feature_layers == ()


def test_a_loaded_model_taps_its_base(base_directory, make_heads, tmp_path):
    save_heads(make_heads(feature_layers=(1,)), tmp_path)
    model = MedusaModel.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert (model.base.feature_layers, model.heads.config.feature_layers) == ((1,), (1,))
    assert model.generate([5, 6, 7], max_new_tokens=4).tokens
