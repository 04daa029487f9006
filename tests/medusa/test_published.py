"""What leaves the machine holds no places of its disk and no command lines."""

import json

import pytest

from medusa.formats import save_heads
from medusa.io.card import model_card
from medusa.io.export import export
from medusa.io.published import published, published_file

PROVENANCE = {
    "recipe": {"run": "/home/ann/runs/mine", "base": {"name": "meta/base"}, "data": {"train": "~/secret/chats.jsonl"}},
    "base": {"name": "/home/ann/models/base-8b/"},
    "data": {"source": "../../home/ann/chats.jsonl"},
    "command": "medusa train --recipe /home/ann/x.yaml --token hf_abc",
    "device": "AMD EPYC 9J14 / 96 cores",
    "figures": {"heldout_top1": [0.5]},
}
WORDS = ("ann", "hf_abc", "secret", "home")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/ann/chats.jsonl", "chats.jsonl"),
        ("/data", "data"),
        ("~/chats.jsonl", "chats.jsonl"),
        ("~ann/my chats/a.jsonl", "a.jsonl"),
        (r"C:\Users\ann\chats.jsonl", "chats.jsonl"),
        ("../../ann/base", "./base"),
        ("user/heads", "user/heads"),
        ("runs/mine/data.jsonl", "runs/mine/data.jsonl"),
        ("https://huggingface.co/user/heads", "https://huggingface.co/user/heads"),
        ("AMD EPYC 9J14 / 96 cores", "AMD EPYC 9J14 / 96 cores"),
        ("read from /home/ann/x.yaml, then", "read from x.yaml, then"),
        ("1/2 and/or", "1/2 and/or"),
        (3.5, 3.5),
        (None, None),
        (["/a/b", {"c": "/d/e", "command": "x"}], ["b", {"c": "e"}]),
    ],
)
def test_of_a_place_its_last_name_stays(value, expected):
    assert published(value) == expected


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("config.json", {"base": "/models/gpt2", "note": "/a/b"}, {"base": "./gpt2", "note": "b"}),
        ("config.json", {"base_model_name_or_path": "../gpt2"}, {"base_model_name_or_path": "./gpt2"}),
        ("config.json", {"base": "user/gpt2"}, {"base": "user/gpt2"}),
        ("tokenizer_config.json", {"name_or_path": "/m/x", "bos": "/a/b"}, {"name_or_path": "./x", "bos": "/a/b"}),
        ("tokenizer.json", {"merges": ["/usr /bin/sh"]}, {"merges": ["/usr /bin/sh"]}),
    ],
)
def test_a_local_base_is_no_address_of_the_hub_and_tokens_are_no_places(tmp_path, name, values, expected):
    path = tmp_path / name
    path.write_text(json.dumps(values))
    found = published_file(path)
    assert json.loads(found if isinstance(found, bytes) else found.read_bytes()) == expected
    assert isinstance(found, bytes) == (values != expected)


def test_files_that_hold_nothing_private_go_as_they_are(tmp_path):
    for name, text in (("a.json", '{"a":1}'), ("b.json", "{broken /home/ann"), ("c.pt", "/home/ann")):
        (tmp_path / name).write_text(text)
        assert published_file(tmp_path / name) == tmp_path / name


def test_exports_and_cards_say_nothing_private(make_heads, tmp_path):
    heads = make_heads()
    source = save_heads(heads, tmp_path / "heads", PROVENANCE)
    assert json.loads((source / "provenance.json").read_text()) == PROVENANCE, "at home everything stays"
    export(source, "native", tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.suffix in (".json", ".md") and path.name != "config.json":
            assert not [word for word in WORDS if word in path.read_text()], path
    stored = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert stored["data"] == {"source": "./chats.jsonl"}
    assert stored["figures"] == PROVENANCE["figures"]
    assert "ann" not in model_card(heads.config, "native", provenance=PROVENANCE)
