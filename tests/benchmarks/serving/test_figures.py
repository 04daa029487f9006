"""Figures of answers whose times are known."""

import pytest

from medusa.benchmarks.serving.client import Answer
from medusa.benchmarks.serving.compare import part, read_prompts
from medusa.benchmarks.serving.figures import summarize
from medusa.benchmarks.serving.load import Level


def answer(asked, times, tokens, told=(), error=None):
    return Answer(asked, list(times), list(told), tokens, times[-1], True, error)


def test_only_what_happens_in_the_window_counts():
    level = Level(2, opened=10.0, closed=20.0)
    level.answers = [
        answer(8, [9, 11, 12], 6, [2, 4, 6]),  # its first token came before
        answer(13, [15, 16, 19], 4, [1, 3, 4]),  # whole
        answer(18, [19.5, 21], 5, [1, 5]),  # ends after it
        answer(21, [22], 1, [1]),  # the server completes it, nobody counts it
    ]
    figures = summarize(level)
    assert (figures["tokens"], figures["tokens_per_second"]) == (4 + 4 + 1, 0.9)
    assert figures["first_token"] == {"count": 2, "p50": 1.75, "p90": pytest.approx(1.95), "p99": pytest.approx(1.995)}
    assert (figures["requests"], figures["tokens_per_request"]) == (2, 5)
    assert figures["end_to_end"]["p50"] == 5
    gaps = [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 3.0]  # of a token each
    assert figures["inter_token"]["count"] == len(gaps)
    assert figures["inter_token"]["p50"] == 0.5


def test_gaps_are_of_chunks_where_the_server_does_not_count_them():
    level = Level(1, [answer(0, [1, 2, 4], 9)], 0.0, 10.0)
    figures = summarize(level)
    assert (figures["inter_token_of"], figures["inter_token"]["count"], figures["inter_token"]["p50"]) == (
        "chunk", 2, 1.5,
    )  # fmt: skip
    assert (figures["tokens"], figures["tokens_per_chunk"], figures["tokens_from"]) == (9, 3, "usage")
    level.answers.append(answer(4, [5, 6], None))
    assert (summarize(level)["tokens"], summarize(level)["tokens_from"]) == (11, "chunks")


def test_nothing_but_errors_is_no_number():
    figures = summarize(Level(1, [answer(0, [1], None, error="broken")], 0.0, 10.0))
    assert (figures["tokens_per_second"], figures["errors"], figures["error_messages"]) == (0, 1, {"broken": 1})
    assert figures["first_token"] == {"count": 0, "p50": None, "p90": None, "p99": None}
    assert figures["tokens_per_chunk"] is None


def test_prompts_are_heldout_ones_or_those_of_a_file(tmp_path):
    assert len(set(read_prompts(None, 30))) == 30
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"category": "qa", "turns": ["b", "c"]}\n{"prompt": "d"}\n')
    assert read_prompts(str(file), 9) == ["a", "b", "d"]
    assert read_prompts(str(file), 2) == ["a", "b"]
    listed = tmp_path / "prompts.json"
    listed.write_text('[{"prompt": "a"}, {"turns": ["b"]}]')
    assert read_prompts(str(listed), 9) == ["a", "b"]
    assert part(["a", "b", "d"], 1, 3) == ["b", "d", "a"]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 2 is not a prompt; give lines of"):
        read_prompts(str(file), 9)
    file.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(str(file), 9)
