"""Tool calls of models that write them in another way than between ``<tool_call>`` tags."""

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from medusa.serve.api.tools import UNREADABLE, Calls, as_json, named_call
from medusa.serve.reading.events import Argued, Event, Reader, Said, held

Call = tuple[str, str]
"""Name and JSON arguments."""
QUOTE = '<|"|>'
MARK = "_of_python"
RESERVED = re.compile(rf"(?<=[(,\s])(?:{'|'.join(keyword.kwlist)})(?==)")
"""Names of arguments that Python has other uses for; they get a ``MARK``."""


class CallForm(NamedTuple):
    """How a family writes calls; tags are special tokens, which the text has to contain.

    Attributes:
        shown: A part of chat templates that shows it.
        begin: The tag before a block of calls; "" = an answer that begins as a JSON object is one block.
        end: The tag behind it; "" = the next block, or the end of the answer.
        read: Reads what is between; raises an error of ``UNREADABLE`` if it is no call.
    """

    shown: str
    begin: str
    end: str
    read: Callable[[str], list[Call]]


def _mistral(text: str) -> list[Call]:
    """``[{"name": .., "arguments": {..}}]``, or ``NAME[ARGS]{..}``, with an id before the arguments."""
    name, tag, arguments = text.partition("[ARGS]")
    if not tag:
        return [named_call(call) for call in json.loads(text)]
    return [(name.partition("[")[0].strip(), as_json(json.loads(arguments)))]


def _llama(text: str) -> list[Call]:
    """JSON objects, one after the other; Llama calls arguments parameters."""
    found, decoder = list[Call](), json.JSONDecoder()
    rest = text.strip().removeprefix(PYTHON).strip()
    while rest:
        call, size = decoder.raw_decode(rest)
        found.append(named_call(call))
        rest = rest[size:].lstrip("; \n")
    return found


def _pythonic(text: str) -> list[Call]:
    """``[f(a=1), g(b='x')]``; older models write a list of JSON objects."""
    found, text = list[Call](), RESERVED.sub(rf"\g<0>{MARK}", text.strip())
    for call in _JsonNames().visit(ast.parse(text, mode="eval")).body.elts:
        if not isinstance(call, ast.Call):
            found.append(named_call(json.loads(ast.get_source_segment(text, call) or "")))
        elif call.args or not all(one.arg for one in call.keywords):
            raise ValueError(f"an argument has no name: {text}")
        else:
            arguments = {str(one.arg).removesuffix(MARK): ast.literal_eval(one.value) for one in call.keywords}
            found.append((ast.unparse(call.func), as_json(arguments)))
    return found


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null as JSON does."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _gemma(text: str) -> list[Call]:
    """``call:NAME{key:value}``: JSON but for keys without quotes and texts in quotes of their own."""
    found = re.fullmatch(r"call:([\w.-]+)(\{.*\})", text.strip(), re.DOTALL)
    if found is None:
        raise ValueError(text)
    parts = found[2].split(QUOTE)  # every second one is a text
    parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[::2] = [re.sub(r"([:,\[]\s*)None\b", r"\1null", part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [(found[1], as_json(json.loads("".join(parts))))]


MISTRAL = CallForm("[TOOL_CALLS]", "[TOOL_CALLS]", "", _mistral)
FORMS = (
    CallForm('{"name": function name, "parameters"', "", "", _llama),
    MISTRAL,
    CallForm("<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>", _pythonic),
    CallForm("<|tool_call>", "<|tool_call>", "<tool_call|>", _gemma),
)
"""Those of Llama 3, Mistral, LFM2 and Gemma 4."""


PYTHON = "<|python_tag|>"
"""May stand before an answer of Llama that is a call."""


def form_of(template: str) -> CallForm | None:
    """The form that a chat template shows; None = calls stand between ``<tool_call>`` tags."""
    return next((form for form in FORMS if form.shown in template), None)


class BlockReader(Reader):
    """Reads text and blocks of calls; a block is read when it is complete.

    Args:
        calls: The rules for tool calls of the request.
        form: How calls are written.
    """

    def __init__(self, calls: Calls, form: CallForm) -> None:
        super().__init__()
        self._calls, self._form = calls, form

    def _begin(self, last: bool) -> Iterator[Event]:
        begun = self._rest.lstrip()
        if self._form.begin or (begun and not begun.startswith(("{", PYTHON)) and not PYTHON.startswith(begun)):
            self._state = self._text
        elif last or begun.startswith(("{", PYTHON)):
            self._state = self._block
        yield from ()

    def _text(self, last: bool) -> Iterator[Event]:
        """Text up to the next block; white space right before one is dropped."""
        begin = self._form.begin
        said, tag, rest = self._rest.partition(begin) if begin else (self._rest, "", "")
        if tag:
            yield Said(said.rstrip())
            self._rest, self._state = rest, self._block
            return
        if not last:
            said = said[: len(said) - held(said, begin)]
        if not last or self.called:
            said = said.rstrip()
        yield Said(self._take(len(said)))

    def _block(self, last: bool) -> Iterator[Event]:
        """Calls; a block that is none stays text."""
        mark = self._form.end or self._form.begin
        if not last and (not mark or mark not in self._rest):
            return
        inside, tag, _ = self._rest.partition(mark) if mark else (self._rest, "", "")
        self._take(len(inside) + (len(tag) if self._form.end else 0))
        self._state = self._text
        found = self._found(inside)
        if not found:
            yield Said(self._form.begin + inside + (tag if self._form.end else ""))
        for name, arguments in found[: 1 if self._calls.single else None]:
            yield self._call(name)
            yield Argued(arguments)
        if self.called and self._calls.single:
            self._state = self._nothing

    def _found(self, text: str) -> Sequence[Call]:
        try:
            found = self._form.read(text)
        except UNREADABLE:
            return ()
        names = {tool.function.name for tool in self._calls.tools}
        return found if self._form.begin or all(name in names for name, _ in found) else ()
