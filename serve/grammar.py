"""Completions that follow a JSON schema or a grammar, by XGrammar, at every node of a tree."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from medusa import BaseModel
from medusa.serve.schema import MOST_OPTIONAL, check_schema, optional

if TYPE_CHECKING:
    import xgrammar

KEPT_BYTES = 16 << 20
"""Most compiled grammars that are kept, as XGrammar counts them; really they take about 16 times as much."""
MOST_SPACES = 16
"""Most white space between two parts of JSON; a weak model could write it forever."""
MOST_TEXT = 32_768
"""Most characters of a schema or grammar, because compiling takes the server's time."""
SLOW, WAIT = 1.0, 5.0
"""Most seconds of a processor that a grammar may take at one step, because all requests wait for it, and most seconds
on a busy machine."""
CHECKED = re.compile(r"^Check failed: .*? is false: ")
"""XGrammar's own code, before some of its reasons."""
IN_PLACE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that XGrammar can mask itself."""


class Grammars:
    """Compiles grammars for completions of one base; thread-safe.

    Args:
        base: The base, for its tokens.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def json_schema(self, schema: dict[str, Any]) -> Callable[[], "Following"]:
        """JSON that follows a schema.

        Raises:
            ValueError: It is not a schema, or has unsupported keywords.
        """
        text = json.dumps(schema)
        _check_size("schema", text)
        check_schema(schema, "schema")
        compiled = self._compiled(lambda it: it.compile_json_schema(text, max_whitespace_cnt=MOST_SPACES))
        printable = self._printable
        return lambda: Following(compiled, printable)

    def grammar(self, ebnf: str) -> Callable[[], "Following"]:
        """Text that a grammar derives from its rule "root".

        Raises:
            ValueError: The grammar is invalid.
        """
        check_grammar(ebnf)
        compiled = self._compiled(lambda it: it.compile_grammar(ebnf))
        return lambda: Following(compiled)

    def structure(
        self, structure: dict[str, Any], schemas: Sequence[dict[str, Any]], free: bool
    ) -> Callable[[], "Following"]:
        """Text with parts in JSON, described by XGrammar's structural tags.

        Args:
            structure: The format.
            schemas: The schemas in it.
            free: Whether there is other text too, which may have control characters, as tabs.

        Raises:
            ValueError: A schema has unsupported keywords.
        """
        text = json.dumps({"type": "structural_tag", "format": structure})
        _check_size("schemas of all tools", text)
        for schema in schemas:
            check_schema(schema, "schema")
        compiled = self._compiled(lambda it: it.compile_structural_tag(text))
        printable = None if free else self._printable
        return lambda: Following(compiled, printable)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which may be parts of characters."""
        return self._bytes[token]

    def _compiled(
        self, compile_with: "Callable[[xgrammar.GrammarCompiler], xgrammar.CompiledGrammar]"
    ) -> "xgrammar.CompiledGrammar":
        compiler = self._compiler
        try:
            compiled = compile_with(compiler)
        except RuntimeError as error:  # "[time] file.cc:line: what is wrong"
            reason = str(error).rpartition(".cc:")[2].partition(":")[2].strip() or str(error) or "it is not valid"
            reason = CHECKED.sub("", " ".join(reason.split()))
            raise ValueError(f"grammar cannot be used: {reason}; correct it") from error
        if not Following(compiled).begins():
            raise ValueError("grammar cannot be used: no text follows it; correct it")
        return compiled

    @cached_property
    def _compiler(self) -> "xgrammar.GrammarCompiler":
        import xgrammar

        return xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_limit_bytes=KEPT_BYTES)

    @cached_property
    def _tokens(self) -> "xgrammar.TokenizerInfo":
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"formats need XGrammar ({error}); install it with: pip install 'medusa-decoding[serve]'"
            ) from error
        base = self._base
        return xgrammar.TokenizerInfo.from_huggingface(
            base.tokenizer, vocab_size=base.vocab_size, stop_token_ids=sorted(base.eos_ids)
        )

    @cached_property
    def _bytes(self) -> Sequence[bytes]:
        return self._tokens.decoded_vocab

    @cached_property
    def _printable(self) -> Tensor:
        """Mask of the tokens that JSON may contain."""
        return _printable(self._bytes, self._base.vocab_size)


class Following:
    """A ``Constraint``: the state of one completion in a grammar.

    Args:
        grammar: The grammar.
        tokens: int32 [W], bit mask of allowed tokens; None = all.

    Attributes:
        slow: Whether it took longer than ``SLOW``; from then on all tokens are allowed.
    """

    def __init__(self, grammar: "xgrammar.CompiledGrammar", tokens: Tensor | None = None) -> None:
        import xgrammar

        self._xgrammar, self._matcher = xgrammar, xgrammar.GrammarMatcher(grammar)
        self._tokens, self._dead, self.slow = tokens, False, False
        self._width = xgrammar.get_bitmask_shape(1, grammar.tokenizer_info.vocab_size)[1]

    def forbid(self, tokens: Sequence[int], parents: Sequence[int], logits_NV: Tensor) -> None:
        """See ``Constraint``; after the end of the grammar all tokens are allowed."""
        if self._dead:
            return
        allowed_NW = torch.zeros(len(tokens), self._width, dtype=torch.int32)
        children, siblings = _links(parents)
        with self._watched():
            whole = self._matcher.traverse_draft_tree(children, siblings, torch.tensor(tokens), allowed_NW, WAIT)
            self.slow = not whole
        if self.slow:
            return
        allowed_NW[~allowed_NW.any(1)] = -1  # forbidden nodes, or the grammar has ended
        if self._tokens is not None:
            allowed_NW &= self._tokens
        _mask(self._xgrammar, logits_NV, allowed_NW)

    def begins(self) -> bool:
        """Whether any token can be the first one."""
        allowed_1W = torch.zeros(1, self._width, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(allowed_1W)
        return bool(allowed_1W.any())

    def advance(self, tokens: Sequence[int]) -> None:
        """See ``Constraint``."""
        with self._watched():
            for token in tokens:
                if not self._dead and not self._matcher.is_terminated():
                    self._dead = not self._matcher.accept_token(token)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Give up a grammar that takes too long."""
        began = time.thread_time()
        yield
        self.slow = self.slow or time.thread_time() - began > SLOW
        self._dead = self._dead or self.slow


def _links(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """First child and next sibling of every node, -1 = none."""
    children, siblings, latest = [-1] * len(parents), [-1] * len(parents), [-1] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        if latest[parent] < 0:
            children[parent] = node
        else:
            siblings[latest[parent]] = node
        latest[parent] = node
    return torch.tensor(children), torch.tensor(siblings)


def _mask(xgrammar: Any, logits_NV: Tensor, allowed_NW: Tensor) -> None:
    """Set logits to -inf where a bit is 0."""
    allowed_NW = allowed_NW.to(logits_NV.device)
    if logits_NV.dtype in IN_PLACE and logits_NV.is_contiguous():
        xgrammar.apply_token_bitmask_inplace(logits_NV, allowed_NW)
        return
    mask_NV = torch.zeros_like(logits_NV, dtype=torch.float32, memory_format=torch.contiguous_format)
    xgrammar.apply_token_bitmask_inplace(mask_NV, allowed_NW)
    logits_NV += mask_NV


def _printable(texts: Sequence[bytes], vocab_size: int) -> Tensor:
    """int32 [W], bit mask of tokens without control characters, which XGrammar allows in strings of limited length."""
    kept = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    kept[: len(texts)] = [all(byte >= 32 or byte in b"\r\n" for byte in text) for text in texts]
    return torch.from_numpy(np.packbits(kept, bitorder="little").view(np.int32))


def check_grammar(ebnf: str) -> None:
    """Check that a grammar does not take minutes to compile.

    Raises:
        ValueError: It might.
    """
    _check_size("grammar", ebnf)
    if any(optional(rule) > MOST_OPTIONAL for rule in ebnf.split("::=")):
        raise ValueError(f"grammar has a rule with more than {MOST_OPTIONAL} optional or repeated parts; divide it")


def _check_size(what: str, text: str) -> None:
    if len(text) > MOST_TEXT:
        raise ValueError(f"{what} ({len(text)} characters) exceeds the limit ({MOST_TEXT}); make it shorter")
