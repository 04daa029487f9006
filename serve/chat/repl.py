"""The chat loop: reads a message, streams the answer, and stores the conversation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa.serve.chat.conversation import Conversation, GenerationOptions, Message, Turn
from medusa.serve.chat.terminal import Terminal, count
from medusa.serve.reading import ENDING, needs_special_tokens, reader_of, template_of
from medusa.serve.reading.events import Event, Reader, Reasoned, Said

if TYPE_CHECKING:
    from medusa import MedusaModel, Output, Prefix, Tree
    from medusa.serve.chat.remote import RemoteModel

BLOCK = '"""'
"""Opens and closes a message of several lines."""


class Command(NamedTuple):
    """One line of ``/help``."""

    argument: str
    """Its argument for the help; empty = none."""
    help: str
    """One sentence; empty for other names of a listed command."""
    run: "Callable[[Repl, str], None]"
    """Runs it; raises ValueError or OSError with a message for the user, or EOFError to leave the chat."""


@dataclass
class Repl:
    """A chat between one user and one model."""

    model: "MedusaModel | RemoteModel"
    terminal: Terminal
    commands: Mapping[str, Command]
    """Commands by name, for lines that begin with a slash."""
    conversation: Conversation
    settings: GenerationOptions
    title: str = ""
    """Lines of the banner about the model."""
    prefix: "Prefix | None" = None
    """Keeps the KV cache of the conversation between answers; None = it is computed for each answer."""
    tree: "Tree | None" = None
    """A static tree for all steps; None = a dynamic tree in each step."""
    outputs: "list[Output]" = field(default_factory=list)
    """The answers of this session."""
    failed: bool = False
    """Whether a message was not answered, or a command refused."""
    _attempt: int = 0
    _reasoned: bool = False
    _forgotten: int = 0

    def run(self) -> None:
        """Chat until the end of the input.

        Raises:
            KeyboardInterrupt: At Ctrl-C without a terminal; in a terminal, Ctrl-C only stops the answer.
        """
        taking = [name for name, command in self.commands.items() if command.argument]
        self.terminal.enable_line_editing([f"/{name}" for name in self.commands], taking)
        self._greet()
        while True:
            try:
                self.handle(self.terminal.read(">>> "))
            except EOFError:
                return
            except BrokenPipeError:
                raise
            except KeyboardInterrupt:
                if not self.terminal.interactive:
                    raise
                self.terminal.note("To leave: /bye or Ctrl-D.")
            except (ValueError, OSError, RuntimeError) as error:
                self.failed = True
                self.terminal.error(str(error))

    def handle(self, line: str) -> None:
        """Process one line of input: run a command, or answer a message."""
        if line.startswith(BLOCK):
            self.ask(self._read_block(line.removeprefix(BLOCK)))
        elif line.startswith("/") and "\n" not in line:
            self._command(line)
        else:
            self.ask(line)

    def ask(self, message: str) -> None:
        """Answer a message and store both; a blank message is skipped."""
        if not message.strip():
            return
        self._attempt = 0
        if turn := self._answer(message.strip()):
            self.conversation.turns.append(turn)

    def regenerate(self) -> None:
        """Answer the last message again, with another seed; without a new answer, the old one is kept."""
        if not self.conversation.turns:
            raise ValueError("there is no answer yet; write a message first")
        if self.settings.temperature == 0:
            self.terminal.note("Temperature 0 gives the same answer again; /set temperature 0.8 varies it.")
        self._attempt += 1
        last = self.conversation.turns.pop()
        turn = None
        try:
            turn = self._answer(last.user)
        finally:
            self.conversation.turns.append(turn or last)

    def switch(self, conversation: Conversation) -> None:
        """Continue with another conversation."""
        self.conversation = conversation
        self._forgotten = 0
        if self.prefix is not None:
            self.prefix.clear()

    def _greet(self) -> None:
        if self.title:
            self.terminal.note(self.title)
        if self.settings.lossy:
            self.terminal.note("Typical acceptance is on: LOSSY, answers can differ from what the base alone writes.")
        if self.terminal.colour and not self.terminal.ansi:
            self.terminal.note("Colours are off: no terminal, or NO_COLOR is set.")
        if self.terminal.interactive:
            self.terminal.note("/? lists the commands; Ctrl-C stops an answer; Ctrl-D leaves.")

    def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        command = self.commands.get(name)
        if command is None:
            raise ValueError(f"unknown command (/{name}); /? lists them; to send such a message, start with a space")
        if argument.strip() and not command.argument:
            raise ValueError(f"/{name} takes no argument ({argument.strip()})")
        command.run(self, argument.strip())

    def _read_block(self, line: str) -> str:
        """Read lines up to the one that ends with the closing quotes, or to the end of the input."""
        lines = [line]
        while not lines[-1].endswith(BLOCK):
            try:
                lines.append(self.terminal.read("... "))
            except EOFError:
                break
        return "\n".join(lines).removesuffix(BLOCK)

    def _answer(self, message: str) -> Turn | None:
        """Stream an answer; None if it was stopped before its first piece."""
        prompt = self._prompt(message)
        settings = replace(self.settings, seed=self._seed())
        reader, tagged = self._reader(prompt)
        stream = self.model.stream(prompt, prefix=self.prefix, tree=self.tree, **asdict(settings), **tagged)
        text, interrupted = "", False
        try:
            with self.terminal.unechoed():
                for piece in stream:
                    text += self._tell(reader.read(piece), piece.drafted, text)
                text += self._tell(reader.read("", last=True), False, text)
        except KeyboardInterrupt:
            if not self.terminal.interactive:
                raise
            interrupted = True
        finally:
            if self._reasoned and not text:
                self.terminal.thought("\n")
            elif not text.endswith("\n"):
                self.terminal.answer("\n")
        self.outputs.append(stream.output)
        self._status(stream.output, interrupted, settings.seed)
        return None if not text and (interrupted or self._reasoned) else Turn(message, text)

    def _tell(self, events: Sequence[Event], drafted: bool, before: str) -> str:
        """Show what a piece of the answer says after what was ``before``, and return the part that is no reasoning."""
        said = ""
        for event in events:
            match event:
                case Reasoned(text):
                    self._reasoned = True
                    self.terminal.thought(text)
                case Said(text):
                    if self._reasoned and not before + said:
                        self.terminal.thought("\n\n")
                    said += text
                    self.terminal.answer(text, drafted=drafted)
        return said

    def _reader(self, prompt: Sequence[int]) -> tuple[Reader, dict[str, Any]]:
        """Reads the answer to a prompt, and options of the stream that it needs."""
        self._reasoned = False
        tokenizer: Any = getattr(self.model.base, "tokenizer", None)
        if tokenizer is None:  # it is the server's
            return reader_of("", ""), {}
        template, ending = template_of(tokenizer), tokenizer.decode(prompt[-ENDING:])
        options = {"skip_special_tokens": False} if needs_special_tokens(template) else {}
        return reader_of(template, ending), options

    def _seed(self) -> int | None:
        """The seed of the next answer; drawn here, so that it can be shown for servers too."""
        if self.settings.seed is not None:
            return self.settings.seed + self._attempt
        return random.getrandbits(31) if self.settings.temperature else None

    def _prompt(self, message: str) -> list[int]:
        """Token ids of a message after as much of the conversation as fits with an answer."""
        context = self.model.base.context_length
        room = min(self.settings.max_new_tokens, context // 4)

        def fits(messages: list[Message]) -> bool:
            return len(self.model.chat_prompt(messages)) + room <= context

        turns = len(self.conversation.turns)
        forget = self.conversation.turns_to_forget(message, fits)
        prompt = self.model.chat_prompt(self.conversation.prompt(message, min(forget, turns)))
        if forget > turns:
            raise ValueError(
                f"message ({len(prompt):,} tokens with the system prompt) is too long: the context holds {context:,}"
                f" tokens, {room:,} of them kept for the answer; shorten it, or lower /max"
            )
        if forget > self._forgotten:
            self.terminal.note(
                f"The context ({context:,} tokens) is full: the oldest {forget} of {turns} turns left it."
            )
        self._forgotten = forget
        return prompt

    def _status(self, output: "Output", interrupted: bool, seed: int | None) -> None:
        reason: str | None = "interrupted" if interrupted else output.finish_reason
        if reason == "length":
            full = output.prompt_tokens + len(output.tokens) >= self.model.base.context_length
            reason = "length (context full)" if full else "length (/max)"
        drawn = f", seed {seed}" if self.settings.temperature else ""
        self.terminal.note(
            f"[{count(len(output.tokens), 'token')}, {output.tokens_per_second:.1f} tokens/s,"
            f" {output.tokens_per_step:.2f} tokens/step, {reason}{', typical (lossy)' * self.settings.lossy}{drawn}]"
        )
