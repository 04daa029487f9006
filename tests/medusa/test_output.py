"""Text of a completion as it is handed out: stop strings, and what was drafted."""

import pytest

from medusa.engine.output import Completion
from medusa.sampling import SamplingParams


@pytest.mark.parametrize(
    ("stop", "said", "expected"),
    [
        (["bc", "abc"], "xabc", "x"),
        (["abcd", "bx"], "xabcd", "x"),
        (["bx", "abcd"], "xabcd", "x"),
        (["ab", "b"], "xaab", "xa"),
    ],
)
def test_the_earliest_of_several_stop_strings_cuts(tokenizer, stop, said, expected):
    params = SamplingParams(max_new_tokens=20, stop=stop)
    completion, text = Completion(tokenizer, 1, params, 100, frozenset(), incremental=True), ""
    for token in tokenizer(said).input_ids:
        if completion.active:
            text += "".join(completion.extend([token]))
    assert (text, completion.output.text, completion.output.finish_reason) == (expected, expected, "stop")


def test_a_piece_tells_whether_its_last_token_was_drafted(tokenizer):
    completion = Completion(tokenizer, 1, SamplingParams(max_new_tokens=20), 100, frozenset(), incremental=True)
    pieces = [piece for said in ("a", "bcd") for piece in completion.extend(tokenizer(said).input_ids)]
    assert [piece.drafted for piece in pieces] == [False, True, True, False]


@pytest.mark.parametrize(("most", "accepted"), [(2, [0, 0, 1]), (3, [0, 0, 0, 1]), (9, [0, 0, 0, 1])])
def test_draft_tokens_behind_the_end_do_not_count_as_accepted(tokenizer, most, accepted):
    completion = Completion(tokenizer, 1, SamplingParams(max_new_tokens=most), 100, frozenset())
    completion.extend(tokenizer("abcd").input_ids, draft_tokens=3)
    assert completion.output.accepted == accepted
