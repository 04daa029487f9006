"""The picture of a chat is drawn from its recording, and both answers of it are one text."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
RECORDING = json.loads((PICTURES / "chat.json").read_text())


def drawing():
    spec = importlib.util.spec_from_file_location("chat_picture", ROOT / "docs/tools/chat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw(RECORDING)


def test_the_picture_is_that_of_the_recording():
    assert drawing() == (PICTURES / "chat.svg").read_text()
    assert len(drawing()) < 100_000


def test_both_answers_are_one_text_and_drafts_save_passes():
    plain, drafted = RECORDING["answers"].values()
    assert "".join(text for _, text, _ in plain["pieces"]) == "".join(text for _, text, _ in drafted["pieces"])
    assert not any(marked for *_, marked in plain["pieces"])
    assert any(marked for *_, marked in drafted["pieces"])
    assert drafted["passes"] < plain["passes"]


def test_pictures_are_whole():
    for path in PICTURES.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("}svg"), path
        assert root.findtext("{http://www.w3.org/2000/svg}title"), path
        numbers = [float(times.rpartition(";")[2]) for times in re.findall(r'keyTimes="([^"]+)"', path.read_text())]
        assert all(0 <= number <= 1 for number in numbers), path
