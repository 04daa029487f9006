"""Rows in blocks of a shared pool: the same bits as side by side, found by content, and never lost."""

import copy
import random
import weakref

import pytest
import torch

from medusa import BaseModel, HeadsConfig, MedusaModel, Prefix, Tree, build_heads
from medusa.acceptance import greedy
from medusa.attention import TreePlan, choose
from medusa.attention.contract import BlockTable
from medusa.base.verify import verify
from medusa.cache import BLOCK, BlockPool, PoolFullError
from medusa.drafters import HeadsDrafter
from medusa.engine.prefill import prefill
from medusa.engine.step import decode_step
from medusa.loading.self_test import fuse
from medusa.sampling import SamplingParams, Speculation
from medusa.tree import Draft
from tests.medusa.attention_cases import FEATURES, Case, make

HALF, SINGLE = torch.bfloat16, torch.float32
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module", params=["eager", "fused"])
def paged(request, base_directory):
    """The small base in float32, its attention exact."""
    base = BaseModel.load(base_directory, SINGLE, "cpu", pack=True)
    if base.attention.name != "exact":
        pytest.skip("there is no C++ compiler here")
    base = fuse(base) if request.param == "fused" else base
    assert base.in_blocks and base.fused == (request.param == "fused")
    return base


@pytest.fixture(scope="module")
def model(paged):
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(paged.hidden_size, paged.vocab_size, 3, architecture="recurrent"))
    heads.init_from_base(paged.lm_head_weight.float())
    return MedusaModel(paged, heads, draft_model=paged)


def side_by_side(base):
    """The same base with every cache in buffers of its own."""
    return copy.copy(base).with_traits(blocks=False)


def finish(batch):
    while len(batch):
        batch.step()


def text(chance, length, vocab_size=250):
    return [chance.randrange(3, vocab_size) for _ in range(length)]


# The kernel.


def in_blocks(rows, lengths, nodes, size, chance):
    """Rows [B, Hkv, S, D] in blocks anywhere; all that nobody may read is NaN."""
    needed = [-(-(length + nodes) // size) for length in lengths]
    blocks = list(range(sum(needed) + 3))
    chance.shuffle(blocks)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int64)
    arena = rows.new_full((len(blocks), size, *rows.shape[1::2]), torch.nan)
    for b, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        for index in range(count):
            table[b, index] = block = blocks.pop()
            there = rows[b, :, index * size : min(length + nodes, (index + 1) * size)].transpose(0, 1)
            arena[block, : len(there)] = there
    return table, arena.flatten(0, 1).transpose(0, 1)[None]


LENGTHS = [(0, BLOCK - 1, BLOCK, BLOCK + 1), (127, 128, 129, 5), (300, 2 * BLOCK - 3, 95, 260)]


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("nodes", [1, 7, 37])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernel_reads_blocks_as_it_reads_rows_side_by_side(lengths, nodes, dtype):
    backend, _ = choose("auto", torch.device("cpu"), dtype)
    if backend.name != "exact":
        pytest.skip("there is no C++ compiler here")
    chance = random.Random(nodes)
    for case in (Case(nodes=nodes, groups=3, lengths=lengths), *FEATURES.values()):
        layer = make(Case(**{**vars(case), "nodes": nodes, "lengths": lengths}), dtype)
        for size in (16, 32):
            state = chance.getstate()
            table, key = in_blocks(layer.key, lengths, nodes, size, chance)
            chance.setstate(state)
            same, value = in_blocks(layer.value, lengths, nodes, size, chance)
            assert torch.equal(table, same)
            plan = TreePlan(layer.draft, layer.lengths, layer.key.shape[2], backend, table=BlockTable(table, size))
            found = backend.attend(plan, layer.query, key, value, layer.scoring)
            assert torch.equal(found, layer.run(backend)), (case, size)
            assert not plan.gathered(key).isnan().any()
            for b, length in enumerate(lengths):
                rows = length + nodes
                assert torch.equal(plan.gathered(key)[b, :, :rows], layer.key[b, :, :rows])


@torch.inference_mode()
def test_a_pass_gives_the_same_bits(paged):
    """Ragged prompts, a tree that crosses blocks, and rows that move when a path of it is accepted."""
    prompts = [[3 + i % 50 for i in range(length)] for length in (BLOCK - 1, 70, 2, BLOCK + 2)]
    tree = Tree.full([2, 2, 1])
    outcomes = []
    for base in (paged, side_by_side(paged)):
        cache = base.new_cache(len(prompts), 8)
        prefill(base, cache, prompts, chunk=9)
        passes = []
        for _ in range(20):
            tokens = torch.arange(tree.nodes).repeat(len(prompts), 1) + cache.lengths[:, None] % 90
            draft = Draft.of(tokens, torch.tensor([tree.parents.tolist()] * len(prompts)), tree.depth)
            passes.append(verify(base, cache, draft))
            cache.commit(torch.tensor([[0, 2, 5, 9]] * 4), torch.tensor([3, 1, 2, 0]))
            cache.grow([3, 1, 2, 0])
        outcomes.append(torch.stack(passes))
    assert torch.equal(*outcomes)


def test_layers_that_the_kernel_leaves_out_are_right_too(base_directory, monkeypatch):
    base = BaseModel.load(base_directory, SINGLE, "cpu", pack=True)
    if not base.in_blocks:
        pytest.skip("there is no C++ compiler here")
    prompt = list(range(3, 3 + 2 * BLOCK))
    expected = MedusaModel(base).generate(prompt, max_new_tokens=40).tokens
    monkeypatch.setattr(type(base.attention), "objection", lambda *_: "it is a test")
    assert MedusaModel(base).generate(prompt, max_new_tokens=40).tokens == expected


# Batches.


def requests(chance, count):
    """Prompts that share beginnings, most of them longer than a block."""
    roots = [text(chance, chance.choice([40, 70, 100])) for _ in range(2)]
    for _ in range(count):
        prompt = chance.choice(roots)[: chance.randrange(1, 100)] + text(chance, chance.choice([0, 1, 3, 40]))
        params = SamplingParams(
            max_new_tokens=chance.randrange(1, 50), temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(9)
        )
        drafter = chance.choice(["heads", "prompt-lookup", "hybrid", "draft-model", "early-exit"])
        yield prompt, params, Speculation(drafter, nodes=chance.choice([1, 3, 6]))


def check(model, pool, seed):
    chance, batches = random.Random(seed), [model.batch(pool) for _ in range(2)]
    waiting, started = list(requests(chance, 6)), []
    while waiting or any(map(len, batches)):
        while waiting and chance.random() < 0.4:
            batch = chance.choice(batches)
            started.append((batch, waiting[0], batch.add(*waiting.pop(0))))
        for batch in batches:
            batch.step()
        growing = [(batch, one) for batch, _, one in started if one.active]
        if growing and chance.random() < 0.03:
            batch, one = chance.choice(growing)
            batch.remove(one)
    for _, (prompt, params, speculation), completion in started:
        alone, tokens = (
            model.generate(prompt, sampling=params, speculation=speculation).tokens,
            completion.output.tokens,
        )
        assert tokens == (alone[: len(tokens)] if completion.output.finish_reason == "abort" else alone)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=str)
def test_rows_write_what_they_write_alone_and_no_block_is_lost(model, seed):
    pools = [model.base.new_pool(tokens) for tokens in (None, 640)]
    for each in [seed] if isinstance(seed, int) else seed:
        for pool in pools:
            check(model, pool, each)
            assert (pool.held_tokens, pool.claimed_tokens) == (0, 0)
    assert pools[0].found > 0


def computed(monkeypatch):
    """Rows that passes of the base compute, pass by pass."""
    rows, run = [], BaseModel.tree_hidden_states

    def count(base, passes):
        rows.append(sum(sum(plan.draft.row_sizes) for _, plan in passes))
        return run(base, passes)

    monkeypatch.setattr(BaseModel, "tree_hidden_states", count)
    return rows


def test_equal_prompts_that_come_together_are_computed_once(model, monkeypatch):
    prompt, rows = list(range(3, 103)), computed(monkeypatch)
    batch = model.batch()
    params = SamplingParams(max_new_tokens=1, **ENDLESS)
    completions = [batch.add(prompt, params, Speculation(nodes=1)) for _ in range(8)]
    finish(batch)
    known = (len(prompt) - 2) // BLOCK * BLOCK
    assert [one.output.cached_tokens for one in completions] == [0, *[known] * 7]
    rest = len(prompt) - known
    assert sum(rows) <= len(prompt) + 16 + 7 * (rest + 16) + 8
    assert len({tuple(one.output.tokens) for one in completions}) == 1


def test_a_chunked_prefill_is_found_as_far_as_it_has_come(model, monkeypatch):
    from medusa.engine.prefill import Prefill

    monkeypatch.setattr("medusa.engine.prompts.CHUNK", BLOCK)
    monkeypatch.setattr("medusa.engine.prompts.Prefill", lambda *args: Prefill(*args, chunk=BLOCK))
    prompt, params, batch = list(range(3, 203)), SamplingParams(max_new_tokens=5, **ENDLESS), model.batch()
    first = batch.add(prompt, params)
    for _ in range(3):
        batch.step()
    second = batch.add([*prompt[: 2 * BLOCK + 5], 9, 9], params)
    batch.remove(first)
    finish(batch)
    assert second.output.cached_tokens == 2 * BLOCK
    assert second.output.tokens == model.generate([*prompt[: 2 * BLOCK + 5], 9, 9], sampling=params).tokens


def test_the_next_turn_of_a_chat_finds_the_answer(model):
    batch, params = model.batch(), SamplingParams(max_new_tokens=60, **ENDLESS)
    prompt = list(range(3, 43))
    first = batch.add(prompt, params)
    finish(batch)
    said = [*prompt, *first.output.tokens, 7, 8, 9]
    second = batch.add(said, params)
    finish(batch)
    assert second.output.cached_tokens == (len(prompt) + 60 - 1) // BLOCK * BLOCK
    assert second.output.tokens == model.generate(said, sampling=params).tokens


def test_what_was_accepted_is_cut_and_shared_safely(paged):
    """A slot that is cut inside a block which others know goes on in a block of its own."""
    pool, prompt = paged.new_pool(), list(range(3, 3 + 3 * BLOCK))
    first, second = paged.new_cache(1, pool=pool), paged.new_cache(1, pool=pool)
    prefill(paged, first, [prompt])
    first.remember(0, prompt)
    assert second.recall([prompt]) == [2 * BLOCK]
    second.cut([BLOCK + 4])
    assert pool.held_tokens == 4 * BLOCK
    other = [*prompt[: BLOCK + 4], *range(100, 150)]
    state, alone = prefill(paged, second, [other]), prefill(paged, paged.new_cache(1), [other])
    assert torch.equal(state.hidden, alone.hidden)
    third = paged.new_cache(1, pool=pool)
    third.recall([prompt])
    assert torch.equal(prefill(paged, third, [prompt]).hidden, prefill(paged, paged.new_cache(1), [prompt]).hidden)


def test_a_prefix_keeps_every_row(model):
    prefix, prompt = Prefix(), list(range(3, 73))
    first = model.generate(prompt, prefix=prefix, max_new_tokens=20, **ENDLESS)
    said = [*prompt, *first.tokens[:7], 9, 9, 9]
    second = model.generate(said, prefix=prefix, max_new_tokens=20)
    assert second.cached_tokens == len(prompt) + 7
    assert second.tokens == model.generate(said, max_new_tokens=20).tokens


# The pool.


def test_the_block_that_was_not_used_for_longest_goes_first_and_the_last_of_a_text_before_its_beginning():
    pool = BlockPool(1, 4 * BLOCK)

    def write(tokens):
        blocks, before = pool.take(len(tokens) // BLOCK), 0
        for index, block in enumerate(blocks):
            before = pool.add(block, before, tokens[index * BLOCK : (index + 1) * BLOCK]).number
        pool.release(blocks)

    old, new = [1] * 2 * BLOCK, [2] * 2 * BLOCK
    write(old)
    write(new)
    pool.release([entry.block for entry in pool.find(old)])  # used again
    pool.release(pool.take(1))
    assert (pool.known(old), pool.known(new), pool.evictions) == (2 * BLOCK, BLOCK, 1)
    held = pool.take(2)
    assert (pool.known(old), pool.known(new)) == (2 * BLOCK, 0)
    with pytest.raises(PoolFullError, match=r"KV cache \(128 rows\) is full: 64 are held, 96 more needed"):
        pool.take(3)
    pool.release(held)
    assert (pool.held_tokens, pool.remembered_tokens) == (0, 2 * BLOCK)


def test_texts_that_differ_in_one_token_or_in_what_stands_before_are_different():
    pool = BlockPool(1)
    (first, second) = pool.take(2)
    entry = pool.add(first, 0, [1] * BLOCK)
    pool.add(second, entry.number, [2] * BLOCK)
    assert pool.known([1] * BLOCK + [2] * BLOCK) == 2 * BLOCK
    assert pool.known([2] * BLOCK) == 0
    assert pool.known([1] * (BLOCK - 1)) == pool.known([1] * (BLOCK - 1) + [3]) == 0


def test_without_a_limit_memory_grows_for_what_is_held_alone(model):
    pool = model.base.new_pool()
    for seed in range(6):
        batch = model.batch(pool)
        batch.add(text(random.Random(seed), 120), SamplingParams(max_new_tokens=4, **ENDLESS), Speculation(nodes=1))
        finish(batch)
    assert pool._touched * BLOCK <= 120 + 4 + 2 * BLOCK


def test_requests_wait_for_room_and_what_never_fits_is_refused(model):
    pool = model.base.new_pool(512)
    batch, params = model.batch(pool), SamplingParams(max_new_tokens=20, **ENDLESS)
    prompts = [text(random.Random(seed), 100) for seed in range(5)]
    completions = [batch.add(prompt, params) for prompt in prompts]
    batch.step()
    assert sum(bool(one.output.tokens) for one in completions) == 2, "each may come to 248 rows"
    with pytest.raises(ValueError, match=r"prompt and completion \(\d+ rows .* exceed the KV cache \(512 rows\)"):
        batch.add(prompts[0], params, Speculation(nodes=200))
    finish(batch)
    for prompt, one in zip(prompts, completions, strict=True):
        assert one.output.tokens == model.generate(prompt, sampling=params).tokens


def test_an_error_in_a_step_loses_no_block(model, monkeypatch):
    pool = model.base.new_pool(1024)
    batch = model.batch(pool)
    completion = batch.add(list(range(3, 80)), SamplingParams(max_new_tokens=50, **ENDLESS))
    batch.step()
    assert pool.held_tokens > 0
    monkeypatch.setattr("medusa.engine.steps.decode_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.step()
    gone = weakref.ref(batch)
    del batch, completion
    assert gone() is None
    assert (pool.held_tokens, pool.claimed_tokens) == (0, 0)


def test_memory_is_that_of_the_tokens_held(model):
    """64 requests of 100 to 2,000 rows; lengths alone matter, so they are set and not computed."""
    base, chance = model.base, random.Random(0)
    pool, cache = base.new_pool(), None
    for _ in range(64):
        other = base.new_cache(1, pool=pool)
        length = chance.randrange(100, 2000)
        other.cut([length - 16])
        other.begin(16)
        other.layers[0].lazy_initialization(*2 * [torch.zeros(1, 2, 1, 8)])
        cache = other if cache is None else cache
        if cache is not other:
            cache.join(other)
    held = sum(length + 16 for length in cache.host_lengths)
    row = pool.arenas[0].block_bytes / BLOCK
    assert held * row <= pool.bytes <= 1.15 * held * row


def test_a_pool_of_another_base_is_refused(model, base):
    with pytest.raises(ValueError, match="holds rows of another base"):
        model.base.new_cache(1, pool=BlockPool(2, owner=object()))
    assert base.new_pool() is None, "float64 is not for the exact attention"


def test_trees_of_a_step_may_cross_blocks(model):
    """A step whose accepted rows move over the border of a block."""
    base, prompt = model.base, list(range(3, 3 + BLOCK - 3))
    texts = []
    for each in (base, side_by_side(base)):
        cache, drafter = each.new_cache(1, 8), HeadsDrafter(model.heads, base, 9, Tree.full([2, 2, 1]))
        state, tokens = prefill(each, cache, [prompt]), []
        for _ in range(30):
            result = decode_step(each, cache, drafter, greedy, state)
            state, tokens = result.state, tokens + result.tokens[0]
        texts.append(tokens)
    assert texts[0] == texts[1]
