"""Figures of speculative decoding that an answer brings."""

import httpx

from medusa import Output
from medusa.serve.api.reply import spec_metrics
from medusa.serve.settings import ApiSettings, EngineSettings
from tests.serve.live import serving


def test_figures_of_a_completion():
    output = Output(3, tokens=[1] * 8, steps=4, draft_tokens=10, accepted=[1, 2, 1])
    told = spec_metrics(output)["metrics"]["speculative_decoding"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (2.0, 0.4)


def test_wrong_tokens_of_a_prediction(speaker):
    with serving(speaker, EngineSettings(), ApiSettings()) as live:
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
        body |= {"temperature": 0, "ignore_eos": True, "speculation": {"metrics": True}}

        def ask(**more):
            return httpx.post(f"{live.url}/v1/chat/completions", json=body | more, timeout=60).json()

        text = ask()["choices"][0]["message"]["content"]
        prediction = {"type": "content", "content": text[:8] + "zzzzzz" + text[8:]}
        answer = ask(prediction=prediction)
        told, details = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
        right, drafted = told["num_accepted_draft_tokens"], told["num_draft_tokens"]
        assert 0 < right < drafted
        assert details == {"accepted_prediction_tokens": right, "rejected_prediction_tokens": drafted - right}


def test_figures_are_those_of_one_completion(speaker):
    with serving(speaker, EngineSettings(), ApiSettings(spec_metrics=True)) as live:
        body = {"model": "small", "prompt": [5, 6], "max_tokens": 4}
        answers = [httpx.post(f"{live.url}/v1/completions", json=body | {"n": n}, timeout=60).json() for n in (1, 2)]
        assert ["metrics" in answer for answer in answers] == [True, False]
