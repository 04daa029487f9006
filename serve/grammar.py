"""Completions that follow a JSON schema or a grammar, by XGrammar; correct at every node of a tree."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from medusa import BaseModel
from medusa.engine.constraint import Constraint
from medusa.serve.schema import check_schema

if TYPE_CHECKING:
    import xgrammar

KEPT_BYTES = 256 << 20
"""Compiled grammars that are kept."""
MOST_SPACES = 16
"""Spaces and line breaks between two parts of JSON: a weak model would go on with them for ever."""
MOST_TEXT = 32_768
"""Characters of a schema or grammar: compiling takes time that a client does not pay for."""
IN_PLACE = (torch.float32, torch.bfloat16, torch.float16)
"""Logits that XGrammar masks itself."""


class Grammars:
    """Compiles what completions of one base have to follow; from any thread.

    Args:
        base: Its tokens.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def json_object(self) -> Callable[[], Constraint]:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: dict[str, Any]) -> Callable[[], Constraint]:
        """JSON that follows a schema.

        Raises:
            ValueError: It is no schema, or has keywords that are not supported.
        """
        text = json.dumps(schema)
        _check_size("schema", text)
        check_schema(schema, "schema")
        compiled = self._compiled(lambda it: it.compile_json_schema(text, max_whitespace_cnt=MOST_SPACES))
        printable = self._printable
        return lambda: Following(compiled, printable)

    def grammar(self, ebnf: str) -> Callable[[], Constraint]:
        """Text that a grammar derives from its rule "root".

        Raises:
            ValueError: It cannot be read.
        """
        _check_size("grammar", ebnf)
        compiled = self._compiled(lambda it: it.compile_grammar(ebnf))
        return lambda: Following(compiled)

    def structure(self, structure: dict[str, Any], schemas: Sequence[dict[str, Any]]) -> Callable[[], Constraint]:
        """Text of parts, one of which may be JSON; in XGrammar's language of structural tags.

        Args:
            structure: The format.
            schemas: Those that stand in it.

        Raises:
            ValueError: A schema has keywords that are not supported.
        """
        text = json.dumps({"type": "structural_tag", "format": structure})
        _check_size("schemas of all tools", text)
        for schema in schemas:
            check_schema(schema, "schema")
        compiled = self._compiled(lambda it: it.compile_structural_tag(text))
        return lambda: Following(compiled)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters."""
        return self._bytes[token]

    def _compiled(
        self, compile_with: "Callable[[xgrammar.GrammarCompiler], xgrammar.CompiledGrammar]"
    ) -> "xgrammar.CompiledGrammar":
        compiler = self._compiler
        try:
            return compile_with(compiler)
        except RuntimeError as error:  # "[time] file.cc:line: what is wrong"
            reason = str(error).rpartition(".cc:")[2].partition(":")[2].strip() or str(error) or "it is not valid"
            raise ValueError(f"grammar cannot be used: {' '.join(reason.split())}; correct it") from error

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
        """Tokens that JSON may hold."""
        return _printable(self._bytes, self._base.vocab_size)


class Following:
    """``Constraint``: one completion on its way through a grammar.

    Args:
        grammar: To follow.
        tokens: int32 [W] as bits: those that it may use; None = all.
    """

    def __init__(self, grammar: "xgrammar.CompiledGrammar", tokens: Tensor | None = None) -> None:
        import xgrammar

        self._xgrammar, self._matcher = xgrammar, xgrammar.GrammarMatcher(grammar)
        self._tokens, self._dead = tokens, False
        self._width = xgrammar.get_bitmask_shape(1, grammar.tokenizer_info.vocab_size)[1]

    def forbid(self, tokens: Sequence[int], parents: Sequence[int], logits_NV: Tensor) -> None:
        """Mask what may not follow each node; where the grammar leads nowhere, anything may be said."""
        if self._dead:
            return
        allowed_NW = torch.zeros(len(tokens), self._width, dtype=torch.int32)
        children, siblings = _links(parents)
        self._matcher.traverse_draft_tree(children, siblings, torch.tensor(tokens), allowed_NW)
        allowed_NW[~allowed_NW.any(1)] = -1  # nodes that may not be there, or where all is said
        if self._tokens is not None:
            allowed_NW &= self._tokens
        _mask(self._xgrammar, logits_NV, allowed_NW)

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were chosen."""
        for token in tokens:
            if not self._dead and not self._matcher.is_terminated():
                self._dead = not self._matcher.accept_token(token)


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
    """-inf where a bit is 0."""
    allowed_NW = allowed_NW.to(logits_NV.device)
    if logits_NV.dtype in IN_PLACE and logits_NV.is_contiguous():
        xgrammar.apply_token_bitmask_inplace(logits_NV, allowed_NW)
        return
    mask_NV = torch.zeros_like(logits_NV, dtype=torch.float32, memory_format=torch.contiguous_format)
    xgrammar.apply_token_bitmask_inplace(mask_NV, allowed_NW)
    logits_NV += mask_NV


def _printable(texts: Sequence[bytes], vocab_size: int) -> Tensor:
    """int32 [W] as bits: tokens without control characters, which XGrammar lets into strings of limited length."""
    kept = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    kept[: len(texts)] = [all(byte >= 32 or byte in b"\r\n" for byte in text) for text in texts]
    return torch.from_numpy(np.packbits(kept, bitorder="little").view(np.int32))


def _check_size(what: str, text: str) -> None:
    if len(text) > MOST_TEXT:
        raise ValueError(f"{what} ({len(text)} characters) exceeds the limit ({MOST_TEXT}); make it shorter")
