"""Who begins, who waits and who gives way, and what that does to times."""

import pytest

from medusa import EngineConfig
from medusa.cache import BLOCK
from medusa.engine import output as outputs
from medusa.sampling import SamplingParams, Speculation
from tests.medusa.passes import finish

PLAIN = Speculation(nodes=1)


def tokens(count):
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def test_after_a_preemption_nobody_begins_until_a_request_has_ended(model):
    pool = model.base.new_pool(12 * BLOCK)
    batch = model.batch(pool, EngineConfig(tree_reserve=1))
    prompts = [list(range(3, 31)), list(range(40, 70)), list(range(80, 110))]
    ends, stays, last = (
        batch.add(prompt, tokens(count), PLAIN) for prompt, count in zip(prompts, (14, 60, 60), strict=True)
    )
    batch.step()
    others = pool.take(int(pool.available) - 1)
    while not batch.preemptions:
        batch.step()
    pool.release(others)
    assert batch.waiting == 1
    while ends.active:
        batch.step()
        assert batch.waiting == 1 or not ends.active
    batch.step()
    assert batch.waiting == 0 and stays.active and last.sequence is not None
    finish(batch)


def test_seconds_of_a_request_that_waited_again_begin_with_its_first_token(model, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(outputs.time, "perf_counter", lambda: clock[0])
    pool = model.base.new_pool(12 * BLOCK)
    batch = model.batch(pool, EngineConfig(tree_reserve=1))
    requests = [batch.add(list(range(n, n + 30)), tokens(40), PLAIN) for n in (3, 43)]
    first, last = {}, {}
    others = None
    while len(batch):
        clock[0] += 1
        if others is None and len(requests[1].output.tokens) == 1:
            others = pool.take(int(pool.available) - 1)
        for request in batch.step():
            first.setdefault(request, clock[0])
            last[request] = clock[0]
        if batch.preemptions and others:
            pool.release(others)
            others = []
    assert batch.preemptions
    for request in requests:
        assert request.output.seconds == last[request] - first[request]
        assert request.output.tokens_per_second == pytest.approx(39 / request.output.seconds)


def test_who_begins_leaves_a_block_for_each_that_grows(model):
    """Otherwise the last would lose its room at once, and its prompt would be computed twice."""
    pool = model.base.new_pool(5 * BLOCK)
    batch = model.batch(pool, EngineConfig(tree_reserve=1))
    for start in (3, 43, 83, 123):
        batch.add(list(range(start, start + BLOCK - 1)), tokens(8), PLAIN)
    finish(batch)
    assert batch.preemptions == 0


def test_priority_comes_before_the_order_of_clients(model):
    batch = model.batch(config=EngineConfig(max_requests=2))
    batch.add([5, 6], tokens(3), PLAIN, client="many")
    batch.add([5, 7], tokens(30), PLAIN, client="many")
    batch.step()
    few = batch.add([5, 8], tokens(30), PLAIN, client="few", priority=1)
    many = batch.add([5, 9], tokens(30), PLAIN, client="many")
    while not (few.sequence or many.sequence):
        batch.step()
    assert many.sequence is not None and few.sequence is None


def test_long_prompts_take_turns(model):
    batch = model.batch(config=EngineConfig(chunk=8, pass_tokens=8))
    both = [batch.add(list(range(start, start + 64)), tokens(1), PLAIN) for start in (3, 83)]
    for _ in range(6):
        batch.step()
    assert [request.sequence.length for request in both] == [24, 24]
