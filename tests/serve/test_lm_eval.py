"""lm-eval measures through the server what it measures by itself."""

import json

import pytest
import torch

from medusa import BaseModel, MedusaModel
from tests.serve.environments import run
from tests.serve.live import serving

pytestmark = pytest.mark.slow

CONTEXT, QUESTIONS = 256, 12
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PERPLEXITY = """
task: perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture
def model(base_directory):
    """In the precision of lm-eval's own."""
    return MedusaModel(BaseModel.load(base_directory, dtype=torch.float32, device="cpu"))


@pytest.fixture
def tasks(model, tmp_path):
    """Questions with three answers each, and texts of which one is longer than the context."""
    questions = []
    for number in range(QUESTIONS):
        question = f"{number} and {number}?"
        likely = model.generate(question, max_new_tokens=1).text
        options = [f" {number}", " many of them", likely if likely.isascii() and likely.isprintable() else " none"]
        questions.append({"question": question, "options": options, "answer": number % 3})
    texts = [{"text": "a few words of text " * count} for count in (1, 5, 20)]
    for name, task, lines in (("choice", CHOICE, questions), ("perplexity", PERPLEXITY, texts)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file), encoding="utf-8")
    return tmp_path


def numbers(value):
    """All numbers in a nest of lists and maps; true counts as 1."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def test_its_figures_are_those_of_its_own_model(base_directory, model, tasks):
    # It takes a token from the context for what is generated, and one more for windows of long texts.
    own = f"pretrained={base_directory},dtype=float32,device=cpu,max_length={CONTEXT - 2}"
    own = run("lm-eval", "lm_eval_check.py", "hf", own, tasks)
    with serving(model) as live:
        there = (
            f"model=small,base_url={live.url}/v1/completions,tokenizer={base_directory},tokenizer_backend=huggingface,"
            f"max_length={CONTEXT},num_concurrent=2,tokenized_requests=True"
        )
        served = run("lm-eval", "lm_eval_check.py", "local-completions", there, tasks)
    said = numbers(own["said"]["choice"])
    assert len(said) == QUESTIONS * 3 * 2 and 1.0 in said and 0.0 in said, "some are what the model itself would say"
    assert numbers(served["said"]) == pytest.approx(numbers(own["said"]), abs=2e-3)
    assert numbers(served["figures"]) == pytest.approx(numbers(own["figures"]), rel=1e-4)
