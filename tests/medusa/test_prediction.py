"""Drafting from a text that somebody expects."""

import pytest

from medusa.drafters.prediction import PredictionDrafter

OPTIONS = {"max_new_tokens": 60, "ignore_eos": True}
PROMPT = list(b"write it again: ")


def test_a_right_prediction_takes_few_steps_and_changes_nothing(model):
    plain = model.generate(PROMPT, **OPTIONS, nodes=1)
    helped = model.generate(PROMPT, **OPTIONS, drafter=PredictionDrafter(plain.tokens))
    assert helped.tokens == plain.tokens
    assert helped.steps <= 2 + len(plain.tokens) // 10


@pytest.mark.parametrize("place", [0, 20])
def test_after_a_token_that_was_not_predicted_it_goes_on(model, place):
    plain = model.generate(PROMPT, **OPTIONS, nodes=1)
    wrong = [*plain.tokens[:place], 250, 251, *plain.tokens[place + 2 :]]
    helped = model.generate(PROMPT, **OPTIONS, drafter=PredictionDrafter(wrong))
    alone = model.generate(PROMPT, **OPTIONS, drafter="prompt-lookup", nodes=16)
    assert helped.tokens == plain.tokens and helped.steps < alone.steps


def test_prompts_of_any_length_and_predictions_of_one_token(model):
    for prompt in (PROMPT[:1], PROMPT * 3):
        plain = model.generate(prompt, **OPTIONS, nodes=1)
        assert model.generate(prompt, **OPTIONS, drafter=PredictionDrafter(plain.tokens[:1])).tokens == plain.tokens


def test_it_shares_a_batch(model):
    plain = [model.generate(PROMPT, **OPTIONS, nodes=1, temperature=0.7, seed=seed) for seed in range(3)]
    drafter = PredictionDrafter(plain[1].tokens)
    together = model.generate([PROMPT] * 3, **OPTIONS, temperature=0.7, seed=[0, 1, 2], drafter=drafter)
    assert [output.tokens for output in together] == [output.tokens for output in plain]
    assert together[1].steps < together[0].steps
