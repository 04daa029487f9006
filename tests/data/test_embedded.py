"""The base that ships with the repository."""

import json
from pathlib import Path

import pytest

from medusa import MedusaModel
from medusa.base.names import EMBEDDED, full_name
from medusa.data.chat import render


@pytest.fixture(scope="module")
def embedded():
    return MedusaModel.from_pretrained(None, base=full_name(EMBEDDED))


def test_it_is_small_and_tells_how_it_was_trained():
    directory = Path(full_name(EMBEDDED))
    sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
    assert sum(sizes) <= 20e6
    assert max(sizes) <= 15e6
    figures = json.loads((directory / "training.json").read_text())
    assert "unfinished" not in figures
    assert figures["steps"] > 0
    assert figures["heldout_bits_per_byte"] > 0


def test_its_chat_template_marks_what_the_assistant_says(embedded):
    tokenizer = embedded.base.tokenizer
    turns = [
        {"role": "user", "content": "Write f."},
        {"role": "assistant", "content": "def f(): pass"},
        {"role": "user", "content": "And g."},
        {"role": "assistant", "content": "def g(): pass"},
    ]
    ids, mask = render(tokenizer, turns)
    said = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert said == "def f(): pass<|end|>def g(): pass<|end|>"
    assert ids[: len(embedded.chat_prompt(turns[:1]))] == embedded.chat_prompt(turns[:1])


def test_it_answers_in_chat_form_with_a_python_function(embedded):
    prompts = [
        embedded.chat_prompt([{"role": "user", "content": request}])
        for request in (
            "Write a Python function `read_lines(path)`: Return the lines of a file.",
            "Write a Python function to return True if the path is a directory.",
            "Write a Python function `close(self)` to close the connection.",
        )
    ]
    outputs = embedded.generate(prompts, max_new_tokens=160)
    assert all(output.text.startswith("```python\ndef ") for output in outputs)
    ended = [output for output in outputs if output.finish_reason == "eos"]
    assert len(ended) >= 2
    for output in ended:
        compile(output.text.removeprefix("```python\n").removesuffix("```"), "answer", "exec")
