"""Records a chat with SmolLM2 and draws it as a moving picture: what was drafted is coloured.

    python docs/tools/chat.py             # records docs/pictures/chat.json, then draws docs/pictures/chat.svg
    python docs/tools/chat.py --redraw    # draws the recording that is there

Two ways of decoding answer the same question, in turns, each on one thread. Its processor time is recorded,
which other work on the machine does not change; the round with the median time of each is kept.
"""

import argparse
import json
import time
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PICTURES = Path(__file__).parents[1] / "pictures"
QUESTION = "List five fruits and one sentence about each."
TOKENS, ROUNDS = 128, 3
WAYS = {"plain decoding": {"nodes": 1}, "heads + prompt lookup": {"drafter": "hybrid", "nodes": 8}}
SHOWN, PAUSE = 11.0, 3.0
"""Seconds that the slower answer takes on the picture, and that both stand still before they begin anew."""
COLUMNS, CHAR, LINE, MARGIN, TOP, GAP = 46, 7.8, 19, 20, 92, 28
"""Characters of a line; the rest in pixels: a character, a line, the borders, the first line, between two answers."""
STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d5dae1;white-space:pre}"
    ".d{fill:#5ee08a}.h{fill:#8b95a3}.b{fill:#fff;font-weight:600}"
)


class Answer(NamedTuple):
    """What one way of decoding said, and when."""

    pieces: list[tuple[float, str, bool]]
    """Seconds of the processor since the question, text, whether it was drafted."""
    passes: int


def record() -> dict[str, object]:
    """Both answers, as they come on this machine."""
    import torch

    from medusa import MedusaModel
    from medusa.train.provenance import device_name

    torch.set_num_threads(1)
    model = MedusaModel.from_pretrained("smollm2")
    prompt = model.chat_prompt([{"role": "user", "content": QUESTION}])
    rounds: dict[str, list[Answer]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS + 1):
        for name, options in WAYS.items():
            stream, begin = model.stream(prompt, max_new_tokens=TOKENS, **options), time.process_time()
            pieces = [(round(time.process_time() - begin, 4), str(piece), piece.drafted) for piece in stream]
            rounds[name].append(Answer(pieces, stream.output.steps))
    answers = {}
    for name, (_, *measured) in rounds.items():  # the first round warms the caches
        answers[name] = sorted(measured, key=lambda answer: answer.pieces[-1][0])[ROUNDS // 2]._asdict()
    machine = f"{device_name(torch.device('cpu'))}, one thread"
    return {"question": QUESTION, "machine": machine, "answers": answers}


def draw(recording: dict) -> str:
    """The recording as an SVG file that repeats for ever; a viewer that does not move pictures shows the end."""
    answers = {name: Answer(**answer) for name, answer in recording["answers"].items()}
    slower = SHOWN / max(answer.pieces[-1][0] for answer in answers.values())
    total = SHOWN + PAUSE
    drawn, bottom = [], 0
    for index, (name, answer) in enumerate(answers.items()):
        left = MARGIN + index * (COLUMNS * CHAR + GAP)
        seconds = answer.pieces[-1][0]
        drawn.append(f'<text class="b" x="{left:g}" y="68">{name}</text>')
        told = f"{answer.passes} passes, {seconds:.2f} s"
        drawn.append(_text(left + len(name) * CHAR + 14, 68, told, "h", seconds * slower / total))
        row, spans = _spans(answer.pieces)
        for line, column, text, drafted, at in spans:
            place = left + column * CHAR, TOP + line * LINE
            drawn.append(_text(*place, text, "d" if drafted else "", at * slower / total))
        bottom = max(bottom, TOP + row * LINE)
    drawn = [one.replace("DUR", f"{total:g}s") for one in drawn]
    width, height = 2 * (MARGIN + COLUMNS * CHAR) + GAP, bottom + 44
    note = f"Green text was drafted and then verified. {recording['machine']}; shown {slower:.0f} times slower."
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
        "<title>SmolLM2 answers a question plainly and with drafts: the same text, in fewer passes</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#12161d"/>',
        f'<text x="{MARGIN}" y="34"><tspan class="h">you: </tspan>{escape(recording["question"])}</text>',
        *drawn,
        f'<text class="h" x="{MARGIN}" y="{height - 16:g}">{note}</text>',
        "</svg>\n",
    ])  # fmt: skip


def _spans(pieces: list[tuple[float, str, bool]]) -> tuple[int, list[tuple[int, int, str, bool, float]]]:
    """Number of the last line, and runs of equal time and colour with their line and column; lines break at spaces."""
    letters = [(letter, drafted, at) for at, text, drafted in pieces for letter in text]
    text = "".join(letter for letter, *_ in letters)
    row, column, placed = 0, 0, []
    for index, (letter, drafted, at) in enumerate(letters):
        word = len(text[index:].split(" ")[0].split("\n")[0])
        if letter == "\n" or (column and (index == 0 or text[index - 1] == " ") and column + word > COLUMNS):
            row, column = row + 1, 0
        if letter != "\n":
            placed.append((row, column, letter, drafted, at))
            column += 1
    starts = [i for i, one in enumerate(placed) if i == 0 or not _joins(placed[i - 1], one)]
    runs = [placed[a:b] for a, b in pairwise([*starts, len(placed)])]
    spans = [(run[0][0], run[0][1], "".join(one[2] for one in run), run[0][3], run[0][4]) for run in runs]
    return row, [span for span in spans if span[2].strip()]


def _joins(before: tuple, one: tuple) -> bool:
    """Whether a letter stands in one run with the letter before: same line and colour, and at most 1 ms later."""
    return before[0] == one[0] and before[3] == one[3] and one[4] - before[4] < 0.001


def _text(x: float, y: float, text: str, kind: str, at: float) -> str:
    """Text that appears at this share of the picture's time."""
    look = f' class="{kind}"' if kind else ""
    return (
        f'<text{look} x="{x:.5g}" y="{y}" textLength="{len(text) * CHAR:.5g}">{escape(text)}<animate'
        f' attributeName="opacity" values="0;1" keyTimes="0;{at:.4f}" calcMode="discrete" dur="DUR"'
        ' repeatCount="indefinite"/></text>'
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="draw the recording that is there")
    recorded = PICTURES / "chat.json"
    if not parser.parse_args().redraw:
        recorded.write_text(json.dumps(record(), indent=None, ensure_ascii=False) + "\n", encoding="utf-8")
    (PICTURES / "chat.svg").write_text(draw(json.loads(recorded.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
