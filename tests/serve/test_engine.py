"""Requests that share the engine: text, order, limits, and what is left behind."""

import asyncio

import pytest

from medusa import BaseModel, MedusaModel, SamplingParams, Speculation
from medusa.serve import engine as serving
from medusa.serve.engine import Engine, cache_tokens
from medusa.serve.metrics import Metrics
from medusa.serve.request import Asked, EngineError, LateError, StoppingError
from medusa.serve.settings import EngineSettings

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def run(speaker, scenario, settings=None):
    """A scenario with an engine that is empty at its end."""

    async def whole():
        engine = Engine(speaker, settings or EngineSettings(cache_tokens=16_384), Metrics("small"))
        engine.start()
        try:
            result = await asyncio.wait_for(scenario(engine), 60)
            await engine.call(lambda: None)
            assert not engine._jobs and not engine._of and len(engine._batch) == 0
            assert engine._pool.held_tokens == 0
            engine._pool.check_integrity()
            return result
        finally:
            await engine.stop()
            assert not engine.healthy()

    return asyncio.run(whole())


async def taken(engine, *arguments, **options):
    ticket = engine.submit(Asked(*arguments, **options))
    await ticket.taken()
    return ticket


async def complete(ticket):
    async for _ in ticket.deltas():
        pass
    return ticket.output


@pytest.mark.parametrize("message", ["a step has failed", "the engine has failed"])
def test_an_error_in_a_step_or_outside_ends_requests_and_not_the_engine(speaker, monkeypatch, message):
    async def scenario(engine):
        first = await taken(engine, [5, 6], LONG)
        with monkeypatch.context() as patch:
            place = (engine._batch, "step") if "step" in message else (engine, "_expire")
            patch.setattr(*place, lambda: 1 / 0)
            with pytest.raises(EngineError, match=f"{message}: division by zero"):
                await complete(first)
        after = await taken(engine, [5, 6], SamplingParams(max_new_tokens=3, ignore_eos=True))
        return (await complete(after)).tokens

    assert len(run(speaker, scenario)) == 3


def test_places_that_are_free_are_not_a_queue(speaker):
    async def scenario(engine):
        tickets = await asyncio.gather(*(taken(engine, [5, number], LONG) for number in range(1, 9)))
        for ticket in tickets:
            ticket.cancel()

    run(speaker, scenario, EngineSettings(max_batch=8, max_waiting=0))


def test_texts_are_those_of_generate_whatever_stands_beside_them(speaker):
    cases = [
        ([5, 6, 7], SamplingParams(max_new_tokens=20), Speculation()),
        ([9, 8], SamplingParams(max_new_tokens=9, temperature=0.9, seed=4), Speculation("hybrid", nodes=6)),
        (list(range(3, 40)), SamplingParams(max_new_tokens=15, temperature=0.5, seed=1), Speculation("prompt-lookup")),
        ([5, 6, 7], SamplingParams(max_new_tokens=12, logprobs=2), Speculation(nodes=1)),
    ]
    alone = [speaker.generate(ids, sampling=params, speculation=how) for ids, params, how in cases] * 2

    async def scenario(engine):
        async def ask(case):
            ticket = await taken(engine, *case)
            tokens, text = [], ""
            async for delta in ticket.deltas():
                tokens += delta.tokens
                text += "".join(delta.pieces)
            return tokens, text, ticket.output

        return await asyncio.gather(*map(ask, cases * 2))

    for (tokens, text, output), expected in zip(run(speaker, scenario), alone, strict=True):
        assert (tokens, text, output.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
        assert (output.logprobs is None) == (expected.logprobs is None)
        assert sum(output.accepted) == output.steps


def test_what_cannot_be_served_is_refused_before_it_waits(speaker):
    async def scenario(engine):
        for prompt, how, message in (
            ([], Speculation(), "is empty"),
            ([5], Speculation(heads="nobody"), "heads .'nobody'. are not loaded"),
            ([5, 10**6], Speculation(), "token id"),
            ([5] * 300, Speculation(), "leaves no room"),
        ):
            with pytest.raises(ValueError, match=message):
                await taken(engine, prompt, SamplingParams(), how)
        with pytest.raises(
            ValueError, match=r"completion \(228 positions with their drafts\) exceed the KV cache \(192 positions\)"
        ):
            await taken(engine, [5] * 40, LONG)

    run(speaker, scenario, EngineSettings(cache_tokens=200))


def test_little_room_is_enough_for_all(speaker):
    """Requests wait, lose their room, and go on later with the same text."""
    asked = [([5, 6, number] * 30, LONG) for number in range(3, 7)]

    async def scenario(engine):
        tickets = [await taken(engine, *one) for one in asked]
        outputs = [await complete(ticket) for ticket in tickets]
        assert engine._batch.preemptions > 0
        return outputs

    outputs = run(speaker, scenario, EngineSettings(cache_tokens=288))
    for (prompt, params), output in zip(asked, outputs, strict=True):
        assert output.tokens == speaker.generate(prompt, sampling=params).tokens


def test_a_client_that_goes_away_frees_its_rows(speaker):
    async def scenario(engine):
        gone, stays = [await taken(engine, [5, n], LONG) for n in (6, 7)]
        async for _ in gone.deltas():
            break
        waiting = await taken(engine, [5, 8], LONG)
        waiting.cancel()
        output = await complete(stays)
        assert len(output.tokens) == 60
        assert gone.output.finish_reason == "abort"
        assert b'request_success_total{finished_reason="abort",model_name="small"} 2.0' in engine.metrics.render()

    run(speaker, scenario, EngineSettings(max_batch=2))


def test_other_heads_while_requests_run(speaker, base, make_heads):
    """New ones read other layers of the base than those that run."""
    deep = make_heads(feature_layers=(1,))

    async def scenario(engine):
        before = await taken(engine, [5, 6], LONG)
        await engine.call(lambda: None)
        more = speaker.with_heads({"deep": deep})
        await engine.call(lambda: engine.use(more))
        after = await taken(engine, [5, 6], LONG, Speculation("heads", nodes=4, heads="deep"))
        own = await taken(engine, [5, 6], LONG, Speculation("heads", nodes=4))
        outputs = [await complete(ticket) for ticket in (before, after, own)]
        await engine.call(lambda: engine.use(speaker))
        with pytest.raises(ValueError, match="not loaded"):
            await taken(engine, [5, 6], LONG, Speculation(heads="deep"))
        return outputs

    expected = speaker.generate([5, 6], sampling=LONG)
    outputs = run(speaker, scenario)
    assert [output.tokens for output in outputs] == [expected.tokens] * 3
    alone = MedusaModel(base, deep).generate([5, 6], sampling=LONG, drafter="heads", nodes=4)
    assert outputs[1].accepted == alone.accepted, "they read their own layers"


def test_a_server_that_goes_down_lets_requests_end(speaker):
    async def scenario():
        engine = Engine(speaker, EngineSettings(cache_tokens=16_384), Metrics("small"))
        engine.start()
        running = await taken(engine, [5, 6], LONG)
        stopping = asyncio.create_task(engine.stop(drain=30))
        await asyncio.sleep(0)
        with pytest.raises(StoppingError):
            await taken(engine, [5, 6], LONG)
        output = await complete(running)
        await asyncio.wait_for(stopping, 10)  # not the whole drain
        for late in (lambda: taken(engine, [5, 6], LONG), lambda: engine.call(lambda: None)):
            with pytest.raises(StoppingError):  # whose encoding took until now
                await asyncio.wait_for(late(), 5)
        return output

    assert len(asyncio.run(scenario()).tokens) == 60


def test_requests_that_wait_keep_heads_that_are_removed(speaker, make_heads):
    async def scenario(engine):
        more = speaker.with_heads({"other": make_heads()})
        await engine.call(lambda: engine.use(more))
        running = await taken(engine, [5, 6], LONG)
        waiting = await taken(engine, [5, 6], LONG, Speculation("heads", nodes=4, heads="other"))
        await engine.call(lambda: engine.use(speaker))
        return [(await complete(ticket)).tokens for ticket in (running, waiting)]

    one, other = run(speaker, scenario, EngineSettings(cache_tokens=16_384, max_batch=1))
    assert one == other and len(one) == 60


@pytest.mark.parametrize(
    "waiting", [[("many", 0), ("many", -1)], [("many", 0), ("few", 0)]], ids=["priority", "client"]
)
def test_priority_and_client_reach_the_batch(speaker, waiting):
    async def scenario(engine):
        ends = await taken(engine, [5, 6], SamplingParams(max_new_tokens=20, ignore_eos=True), client="many")
        stays = await taken(engine, [5, 7], LONG, client="many")
        short = SamplingParams(max_new_tokens=5, ignore_eos=True)
        others = [
            await taken(engine, [5, 8 + n], short, client=client, priority=priority)
            for n, (client, priority) in enumerate(waiting)
        ]
        order = []

        async def end(name, ticket):
            await complete(ticket)
            order.append(name)

        await asyncio.gather(end("ends", ends), end("stays", stays), *(end(n, one) for n, one in enumerate(others)))
        return [name for name in order if isinstance(name, int)]

    assert run(speaker, scenario, EngineSettings(max_batch=2, cache_tokens=16_384))[0] == 1


def test_time_passes_for_requests_that_wait(speaker):
    async def scenario(engine):
        running = await taken(engine, [5, 6], SamplingParams(max_new_tokens=240, ignore_eos=True))
        waiting = await taken(engine, [5, 7], LONG, timeout=1e-6)
        with pytest.raises(LateError):
            await complete(waiting)
        assert running.output.finish_reason is None
        running.cancel()

    run(speaker, scenario, EngineSettings(max_batch=1, cache_tokens=16_384))


def test_batches_of_earlier_heads_go_with_their_last_request(speaker, make_heads):
    async def scenario(engine):
        before = await taken(engine, [5, 6], LONG)
        await engine.call(lambda: engine.use(speaker.with_heads({"other": make_heads()})))
        await complete(before)
        await engine.call(lambda: None)
        return len(engine._old)

    assert run(speaker, scenario) == 0


def test_the_cache_shares_its_memory_with_layers_and_models_that_draft(base, make_heads, monkeypatch):
    monkeypatch.setattr(serving, "machine_memory", lambda: 1 << 30)
    small = BaseModel(base.model, base.tokenizer, base.name)
    alone = cache_tokens(MedusaModel(base))
    assert cache_tokens(MedusaModel(base, draft_model=small)) == alone // 2
    with_layer = cache_tokens(MedusaModel(base, make_heads(architecture="attention")))
    assert with_layer == pytest.approx(alone * 2 / 3, abs=1), "the base has two layers"
