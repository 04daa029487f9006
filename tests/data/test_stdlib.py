import ast

import pytest

from medusa.data import stdlib
from medusa.data.stdlib import HELD_OUT, ChatPair, chat_pairs, completion_prompts, documents


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library of our own."""
    body = "".join(f"    value_{i} = compute_something({i})\n" for i in range(20))
    train = f'def shift(x, by=1):\n    """Return x moved by a number. More words."""\n{body}    return x + by\n'
    held = f'def push(heap, item):\n    """Adds item to the heap."""\n{body.replace("value", "other")}    return heap\n'
    files = {
        "shifting.py": train,
        "heapq.py": held,
        "_heapq.py": held,
        "copied.py": held + "extra_line_here = 1\n",
        "test/test_x.py": train,
        "latin.py": "# caf\xe9\n".encode("latin-1"),
        "broken.py": "def (:\n",
        "empty.py": "\n",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    for cached in (documents, chat_pairs):
        cached.cache_clear()
    yield {name: content for name, content in files.items() if isinstance(content, str)}
    for cached in (documents, chat_pairs):
        cached.cache_clear()


def test_the_split_is_by_module_and_near_duplicates_stay_on_one_side(library):
    assert [d.name for d in documents("heldout")] == ["_heapq.py", "heapq.py"]
    assert [d.name for d in documents("train")] == ["shifting.py"], "copied.py is a copy of a held-out file"
    assert documents("train")[0].text == library["shifting.py"]


def test_chat_pairs_ask_for_the_function_that_answers(library):
    (pair,) = chat_pairs("train")
    assert isinstance(pair, ChatPair)
    assert pair.request.startswith("Write a Python function")
    assert "return x moved by a number" in pair.request.lower()
    assert pair.answer.startswith("```python\ndef shift(x, by=1):")
    assert pair.answer.endswith("return x + by\n```")
    ast.parse(pair.answer.removeprefix("```python").removesuffix("```"))
    assert [m["role"] for m in pair.messages] == ["user", "assistant"]
    assert len(chat_pairs("heldout")) == 1, "the same function twice is one pair"


def test_completion_prompts_end_after_the_docstring(library):
    (prompt,) = completion_prompts("train")
    assert prompt == 'def shift(x, by=1):\n    """Return x moved by a number. More words."""'


@pytest.mark.slow
def test_the_real_library_is_large_and_split():
    assert len(documents("heldout")) >= 20
    assert len(documents("train")) > 300
    names = {d.name.split("/")[0].removesuffix(".py").lstrip("_") for d in documents("train")}
    assert not names & HELD_OUT
    assert len(chat_pairs("train")) > 2000
