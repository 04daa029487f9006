"""The chat loop: through pipes with a fake model, and with a small real one, whose turns go on from known rows."""

import json
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

from medusa import Prefix
from medusa.cache import BLOCK
from medusa.sampling import RULES
from medusa.serve.chat.commands import ALIASES, LISTED
from medusa.serve.chat.conversation import GenerationOptions, Turn
from tests.serve.fake_model import Chat, FakeModel, Person


def test_one_message_per_line():
    chat = Chat("hello\r\n\n  \nagain\n")
    assert chat.out == "re: hello\nre: again\n"
    assert chat.turns == [Turn("hello", "re: hello"), Turn("again", "re: again")]
    assert chat.said(1) == ["hello", "re: hello", "again"]


def test_pipes_carry_no_codes_and_status_goes_to_stderr():
    chat = Chat("hello")
    assert "\x1b" not in chat.out + chat.err
    assert "[3 tokens, 10.0 tokens/s, 2.00 tokens/step, eos]" in chat.err


@pytest.mark.parametrize(
    ("template", "words", "options"),
    [
        ("</think>", ["<th", "ink>\nHm", ".\n</think>\n\n", "Yes."], {}),
        (
            "<|channel|><|message|>",
            ["<|channel|>analysis<|message|>Hm.", "<|end|><|start|>assistant", "<|channel|>final<|message|>Yes."],
            {"skip_special_tokens": False},
        ),
    ],
)
def test_reasoning_is_no_part_of_the_answer(template, words, options):
    tokenizer = SimpleNamespace(get_chat_template=lambda: template, decode=lambda tokens: "")
    chat = Chat("hello\nagain", model=FakeModel(answers=[words, ["No."]], tokenizer=tokenizer))
    assert chat.out == "Yes.\nNo.\n"
    assert "\nHm.\n\n[" in chat.err
    assert chat.turns == [Turn("hello", "Yes."), Turn("again", "No.")]
    assert chat.model.options[0].items() >= options.items()


def test_block_is_one_message_and_no_command():
    chat = Chat('"""/one\n  two"""\n"""three"""\n"""\nopen')
    assert [turn.user for turn in chat.turns] == ["/one\n  two", "three", "open"]


def test_settings_reach_the_model():
    chat = Chat("/temp 0.5\n/penalty 1.5\n/nodes 1\n/max 2\nhello\n/nodes auto\nhello\n", top_p=0.9, seed=3)
    assert chat.model.options[0] == {
        "max_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.5,
        "seed": 3, "acceptance": None, "nodes": 1, "drafter": None,
    }  # fmt: skip
    assert chat.model.options[1]["nodes"] is None
    assert chat.turns[0].answer == "re: "
    assert "length (/max)" in chat.err
    (options,) = Chat("/drafter prompt-lookup\n/temp 1\n/acceptance typical\nhello\n").model.options
    assert (options["drafter"], options["acceptance"]) == ("prompt-lookup", "typical")
    assert Chat("/acceptance auto\nhello\n").model.options[0]["acceptance"] is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/temp hot", "temp ('hot') must be an int or a float between 0"),
        ("/temp -1", "temp (-1.0) must be"),
        ("/temp nan", "temp (nan) must be"),
        ("/nodes 0", "nodes (0) must be"),
        ("/max 1.5", "max ('1.5') must be"),
        ("/set top_k -1", "top_k (-1) must be"),
        ("/set heat 1", "unknown setting (heat); choose one of: temperature, top_p"),
        ("/colour red", "colour (red) must be on or off"),
        ("/acceptance typical", "acceptance (typical) cannot be combined with temperature 0.0"),
        ("/acceptance bold", "acceptance ('bold') is not known; choose one of: greedy"),
        ("/drafter eagle", "drafter ('eagle') is not known; choose one of: hybrid"),
        ("/drafter heads-sampled", "cannot be combined with temperature 0.0"),
        ("/penalty 0", "penalty (0.0) must be"),
        ("/bogus", "unknown command (/bogus)"),
        ("/reset all", "/reset takes no argument (all)"),
        ("/regen", "there is no answer yet"),
        ("/save", "no file was named"),
        ("/load nowhere.json", "nowhere.json"),
        ("/save nowhere/chat.json", "file (nowhere/chat.json) cannot be written: No such file"),
    ],
)
def test_wrong_command_is_one_error_and_the_chat_goes_on(line, complaint):
    chat = Chat(f"{line}\nhello\n")
    (error,) = [text for text in chat.err.splitlines() if text.startswith("error: ")]
    assert complaint in error
    assert chat.out == "re: hello\n"


@pytest.mark.parametrize("command", ["/set {}", "/set parameter {}", "/{}"])
def test_settings_are_set_as_in_ollama_or_for_short(command):
    lines = ["temperature 0.7", "top_p 0.9", "top_k 40", "min_p 0.1", "seed 5", "num_predict 9", "repeat_penalty 1.1"]
    (options,) = Chat("".join(command.format(line) + "\n" for line in lines) + "hello\n").model.options
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 5, "max_new_tokens": 9}
    assert options.items() >= (expected | {"repetition_penalty": 1.1}).items()


def test_set_alone_lists_what_can_be_set():
    listed = Chat("/set seed 5\n/set\n", system="be brief").err
    assert re.search(r"seed +5 ", listed)
    assert all(re.search(rf"^  {field.name} ", listed, re.MULTILINE) for field in fields(GenerationOptions))
    assert "system = be brief" in listed
    assert all(rule in Chat("/set acceptance\n").err for rule in RULES)


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_help_names_every_command_and_bye_leaves_at_once(leave):
    chat = Chat(f"/?\n/help\n{leave}\nhello\n")
    assert all(chat.err.count(f"  /{name} ") == 2 for name in LISTED)
    assert all(f"/{name}" in chat.err for name in ALIASES)
    assert chat.out == ""


def test_reset_keeps_the_system_prompt():
    assert Chat("/system be brief\nhello\n/clear\nagain\n").said(1) == ["be brief", "again"]
    assert Chat("/system off\nhello\n", system="x").said(0) == ["hello"]


def test_without_a_seed_each_answer_has_another_one_and_tells_it():
    model = FakeModel(answers=[["one"], ["two"]])
    chat = Chat("hello\n/regen\n", model, temperature=1.0)
    first, second = (options["seed"] for options in model.options)
    assert first != second
    assert f"eos, seed {first}]" in chat.err and f"eos, seed {second}]" in chat.err
    assert "seed" not in Chat("hello\n").err


def test_regenerate_replaces_the_answer_and_changes_the_seed():
    model = FakeModel(answers=[["one"], ["two"], ["three"], ["four"]])
    chat = Chat("hello\n/regen\n/regen\nnext\n", model, temperature=1.0, seed=7)
    assert chat.turns == [Turn("hello", "three"), Turn("next", "four")]
    assert [options["seed"] for options in model.options] == [7, 8, 9, 7]
    assert [len(prompt) for prompt in model.prompts] == [1, 1, 1, 3]
    assert "gives the same answer" not in chat.err
    assert "gives the same answer" in Chat("hello\n/regen\n").err


def test_failed_answer_keeps_the_conversation():
    model = FakeModel(answers=[["one"], ["half ", RuntimeError("out of memory")], [ValueError("no")]])
    chat = Chat("hello\n/regen\nnext\nlast\n", model)
    assert chat.turns == [Turn("hello", "one"), Turn("last", "re: last")]
    assert "error: out of memory" in chat.err


def test_save_and_load(tmp_path):
    path = tmp_path / "my chat.json"
    first = Chat(f"/system be brief\nhello\n/temp 0.5\n/save {path}\n")
    assert json.loads(path.read_text())["messages"][-1] == {"role": "assistant", "content": "re: hello"}
    second = Chat(f"/load {path}\nagain\n")
    assert second.repl.settings == first.repl.settings
    assert second.said(0) == ["be brief", "hello", "re: hello", "again"]


def test_oldest_turns_leave_a_full_context():
    lines = "".join(letter * 20 + "\n" for letter in "abc")
    chat = Chat(lines, FakeModel(context=130), system="sys")
    assert chat.said(2) == ["sys", "b" * 20, "re: " + "b" * 20, "c" * 20]
    assert chat.err.count("left it") == 1
    assert "the oldest 1 of 2 turns" in chat.err
    assert len(chat.turns) == 3
    assert len(chat.model.chat_prompt(chat.model.prompts[2])) + 130 // 4 <= 130
    again = Chat(lines.replace("c", "/max 1\nc", 1) + "d\n", FakeModel(context=130))
    assert again.err.count("left it") == 1, "each loss of turns is told once"


def test_status_tells_why_an_answer_is_cut():
    words = ["x"] * 100
    chat = Chat("hello\n/reset\n/max 5\nhello\n", FakeModel(context=50, answers=[words, words]))
    assert re.findall(r"length \(.*?\)", chat.err) == ["length (context full)", "length (/max)"]


def test_too_long_message_is_refused_and_changes_nothing():
    chat = Chat("hello\n" + "x" * 80 + "\nagain\n", FakeModel(context=100))
    assert "error: message (83 tokens with the system prompt) is too long" in chat.err
    assert [turn.user for turn in chat.turns] == ["hello", "again"]
    assert len(chat.model.prompts[1]) == 3


def test_interrupt_stops_the_answer_and_keeps_its_part():
    chat = Chat("hello\nagain\n", FakeModel(answers=[["half", KeyboardInterrupt()]]), Person)
    assert chat.turns == [Turn("hello", "half"), Turn("again", "re: again")]
    assert "[1 token," in chat.out
    assert "interrupted" in chat.out
    chat = Chat(
        "hello\nagain\n/regen\n", FakeModel(answers=[[KeyboardInterrupt()], ["one"], [KeyboardInterrupt()]]), Person
    )
    assert chat.turns == [Turn("again", "one")], "before the first piece there is nothing to keep"


def test_interrupt_ends_a_pipe():
    with pytest.raises(KeyboardInterrupt):
        Chat("hello\nagain\n", FakeModel(answers=[["half", KeyboardInterrupt()]]))


def test_stats_are_sums_over_whole_answers():
    chat = Chat("hello\nagain\n/stats\n")
    assert "2 answers, 6 tokens in 4 steps and 1.0 s: 6.0 tokens/s, 1.50 tokens/step" in chat.err
    assert "2 turns" in chat.err
    assert "the context holds 1,000" in chat.err


def test_typical_acceptance_is_announced():
    chat = Chat("hello\n", acceptance="typical", temperature=0.7)
    assert chat.err.startswith("Typical acceptance is on: LOSSY")
    assert "eos, typical (lossy), seed " in chat.err
    assert "lossy" not in Chat("hello\n", acceptance="sampling", temperature=0.7).err.lower()


def test_every_answer_ends_its_line_once():
    assert Chat("a\nb\nc\n", FakeModel(answers=[["one\n"], [], ["three"]])).out == "one\n\nthree\n"


REAL = {"terminal": Person, "max_new_tokens": 24, "temperature": 0.7, "seed": 0, "nodes": 8}


def answers(chat):
    """What was written, less the speeds."""
    return re.sub(r"[\d.]+ tokens/(s|step)", "", chat.out)


def cached(chat):
    return sum(output.cached_tokens for output in chat.repl.outputs)


def test_a_chat_says_the_same_and_computes_less(model):
    lines = f"hello{' there' * 6}\nand you?\n/regen\n/reset\nhello again\n"
    chat, plain = (Chat(lines, model, prefix=prefix, **REAL) for prefix in (Prefix(), None))
    assert answers(chat) == answers(plain)
    assert cached(plain) == 0
    # Bytes are tokens here, and odd ones do not survive as text: turns agree up to the first of them at least.
    assert cached(chat) >= BLOCK


def test_known_tokens_are_told_and_a_reset_forgets_them(model):
    chat = Chat(f"hello{' there' * 6}\nhello\n/stats\n/reset\nhello\n", model, prefix=Prefix(), **REAL)
    read = sum(output.prompt_tokens for output in chat.repl.outputs[:2])
    assert f"{cached(chat)} of {read} prompt tokens were known from the answer before" in chat.out
    assert chat.repl.outputs[1].cached_tokens > chat.repl.outputs[2].cached_tokens == 0
