"""Decode a causal language model with the heads of this repository, several tokens per forward pass.

    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True, max_new_tokens=200)

In each pass the heads draft a tree of likely continuations, and the model verifies the whole tree. Tokens are chosen as
by the model alone: greedy text and the distribution of sampled text do not change. This code needs only torch and
transformers.

Legend: B sequences, T tokens, N tree nodes with the root, A nodes of the longest accepted path, D hidden size,
F = D * (1 + feature layers), V vocabulary. The root is the newest token of a text.
"""

import inspect
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import cached_file

from .base import Base, Rows, Tree
from .heads import Heads
from .layer_check import LayerCheck
from .spans import Span

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
ONE_BY_ONE = "transformers.generation.logits_process"  # its processors treat all rows of a batch alike, except these
OF_BATCHES = ("Encoder", "PrefixConstrained", "RepetitionPenalty")
OWN_ROWS = 4096  # most rows of the cache in tests of layers with their own attention code

_loaded: weakref.WeakKeyDictionary[Any, tuple[Any, Heads, dict[int | None, Span]]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def generate(
    model: Any, heads: str | None = None, nodes: int | None = None, streamer: Any = None, **kwargs: Any
) -> Any:
    """The same result as ``model.generate``, in fewer forward passes.

    Args:
        model: A causal language model of transformers: the one that the heads were trained on.
        heads: Directory or Hub id of the heads; None = the value of ``custom_generate``.
        nodes: Tree nodes per pass with the root; None = 16 on a CPU and 64 elsewhere, 1 = plain decoding.
        streamer: As in ``model.generate``.
        kwargs: All other arguments of ``model.generate``.

    Raises:
        OSError: There are no heads.
        ValueError: The heads are damaged or belong to another model, the model cannot verify trees, or decoding with
            heads does not support an argument.
    """
    nodes = (16 if model.device.type == "cpu" else 64) if nodes is None else nodes
    if nodes < 1:
        raise ValueError(f"nodes ({nodes}) must be at least 1; 1 is plain decoding")
    for name in ("assistant_model", "inputs_embeds", "past_key_values", "synced_gpus"):
        if kwargs.get(name) not in (None, False):
            raise ValueError(f"{name} cannot be combined with heads; leave it or custom_generate out")
    if kwargs.get("tokenizer") and (strings := _stop_strings(model, kwargs)):  # transformers loses the tokenizer
        stop = StopStringCriteria(kwargs.pop("tokenizer"), strings)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), stop])
        kwargs["stop_strings"] = None  # overrides those of a configuration
    hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
    base, loaded = _load(model, heads or _custom_generate(), hub)

    def decode(_: Any, input_ids: Tensor, **prepared: Any) -> Any:
        return _decode(base, loaded, nodes, streamer, input_ids, **prepared)

    return GenerationMixin.generate(model, custom_generate=decode, streamer=streamer, **kwargs)


def _stop_strings(model: Any, options: dict[str, Any]) -> Any:
    """The stop strings, from where transformers reads them: argument, given configuration, model's configuration."""
    if "stop_strings" in options:
        return options["stop_strings"]
    configs = options.get("generation_config"), model.generation_config
    return next((config.stop_strings for config in configs if config is not None and config.stop_strings), None)


def _custom_generate() -> str:
    """The caller's value of ``custom_generate``; transformers runs a copy of this file and does not pass it on."""
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe()
    while frame.f_code is not code:
        if frame.f_back is None:
            raise ValueError("heads (None) must be named where this function is called by itself; pass heads=DIRECTORY")
        frame = frame.f_back
    return str(frame.f_locals["custom_generate"])


def _load(model: Any, source: str, hub: dict[str, Any]) -> tuple[Base, Heads]:
    """The heads of a directory or Hub repository; they stay loaded as long as the model and their files exist."""
    recurrent = model._is_stateful or any(isinstance(part, nn.Conv1d) for part in model.modules())
    if model.config.is_encoder_decoder or recurrent:
        kind = "has recurrent layers" if recurrent else "is not a decoder"
        raise ValueError(
            f"model ({type(model).__name__}) {kind}, and drafts cannot be verified; leave custom_generate out"
        )
    if (attention := model.config.get_text_config()._attn_implementation) not in ("eager", "sdpa"):
        raise ValueError(f"attention ({attention}) takes no tree masks; load the model with attn_implementation='sdpa'")
    config, weights = (_find(source, name, hub) for name in ("config.json", "heads.safetensors"))
    base = Base(model)
    key = (config, weights, weights.stat().st_mtime_ns, base.dtype, base.device)
    if model not in _loaded or _loaded[model][0] != key:
        heads = Heads.load(base, config, weights)
        base.find_spans()
        _self_test(base, heads)
        _loaded[model] = key, heads, base.spans
    _, heads, base.spans = _loaded[model]
    return base, heads


def _find(source: str, name: str, hub: dict[str, Any]) -> Path:
    file: str | None = cached_file(source, name, **hub)
    if file is None:  # a missing config.json is no error to transformers
        raise OSError(f"heads ({source}) have no {name}; download or export them again")
    return Path(file)


def _self_test(base: Base, heads: Heads) -> None:
    """Raise an error if the model's results over tree nodes differ from those over their paths as plain text."""
    unable = f"model ({base.config.model_type}) cannot verify trees"
    size = 40 if (context := getattr(base.config, "max_position_embeddings", None)) is None else min(40, context - 3)
    tokens_1T = torch.tensor([[(7 * i + 3) % base.config.vocab_size for i in range(size + 4)]], device=base.device)
    positions_1T = torch.arange(size + 4, device=base.device)[None]
    paths_2T = [[*range(size + 1), size + 2], [*range(size), size + 1, size + 3]]
    parents_1N = torch.tensor([[0, 0, 0, 1, 2]], device=base.device)
    tree = Tree.of(tokens_1T[:, size - 1 :], parents_1N, depth=2)
    layers = LayerCheck(base.decoder, base.config.num_hidden_layers, base.dtype)
    try:
        rows = Rows(base, heads.feature_layers)
        with layers.recording():
            theirs_2TV = base.model(input_ids=tokens_1T[0, paths_2T], use_cache=False).logits.to(base.device).float()
        with layers.rounding():
            base.model(input_ids=tokens_1T[0, paths_2T], use_cache=False)
        with layers.replaying(0, compared=False):
            rows.prefill(tokens_1T[:, : size - 1], positions_1T[:, : size - 1], None)
        rows.keep([[0]])
        if len(base.spans) < base.config.num_hidden_layers:
            rows.leave_hole(min(getattr(base.config, "max_position_embeddings", None) or 0, OWN_ROWS) - size - 4)
        with layers.replaying([0, 0, 1, 0, 1], compared=True):
            hidden_ND = rows.verify(tree, positions_1T[:, -1:])[0, :, : base.hidden_size]
        ours_1NV = base.logits(hidden_ND)[None].float()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{unable}: {error!r}; leave custom_generate out") from error
    theirs_1NV = theirs_2TV[[0, 0, 1, 0, 1], [size - 1, size, size, size + 1, size + 1]][None]
    if (objection := layers.objection(ours_1NV, theirs_1NV)) is not None:
        raise ValueError(f"{unable}: {objection}; leave custom_generate out")


def _decode(
    base: Base, heads: Heads, nodes: int, streamer: Any, input_ids: Tensor, generation_config: Any,
    position_ids: Tensor, logits_processor: Any, stopping_criteria: Any, attention_mask: Tensor | None = None,
    **inputs: Any,
) -> Any:  # fmt: skip
    """The decoding loop that transformers calls instead of its own, with the same prepared arguments."""
    config, (batch, length) = generation_config, input_ids.shape
    _check(config, batch, inputs)
    texts = [Text(input_ids, row, config, logits_processor, stopping_criteria, streamer) for row in range(batch)]
    rows, index_B1 = Rows(base, heads.feature_layers), torch.arange(batch, device=base.device)[:, None]
    last_B1 = (position_ids[:, -1:] + config.max_length - length).to(base.device)
    tree = Tree.of(input_ids[:, -1:].to(base.device), torch.zeros_like(last_B1), depth=0)
    hidden_BNF = rows.prefill(input_ids, position_ids, attention_mask)  # of all tokens of the prompts
    memory = heads.remember(base, None, hidden_BNF[:, :-1], input_ids[:, 1:], rows.kept)
    hidden_BNF = hidden_BNF[:, -1:]
    while True:
        logits_BNV = base.logits(hidden_BNF[..., : base.hidden_size])
        paths = [text.follow(*drafted) for text, *drafted in zip(texts, tree.children(), logits_BNV, strict=True)]
        path_BA = rows.keep(paths)
        if all(text.done for text in texts):
            break
        hidden_BAF, longest = hidden_BNF[index_B1, path_BA], path_BA.shape[1]
        tokens_BA = torch.cat([pad(text.ids, (longest, 0))[:, -longest:] for text in texts]).to(base.device)
        memory = heads.remember(base, memory, hidden_BAF, tokens_BA, rows.kept[:, -longest:])
        tree = heads.draft(base, tokens_BA[:, -1], hidden_BAF[:, -1], nodes, memory)
        hidden_BNF = rows.verify(tree, last_B1)
    if streamer is not None:
        streamer.end()
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sequences = pad_sequence([text.ids[0] for text in texts], batch_first=True, padding_value=padding)
    if not config.return_dict_in_generate:
        return sequences
    scores = tuple(texts[0].scores) if config.output_scores else None
    logits = tuple(texts[0].logits) if config.output_logits else None
    cache = rows.cache if batch == 1 else None  # others cannot use a cache with holes
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)


def _check(config: Any, batch: int, inputs: dict[str, Any]) -> None:
    """Raise an error for options that would be ignored."""
    unheeded = [*(inputs.keys() - {"past_key_values", "use_cache", "logits_to_keep"})]
    unheeded += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    if (mode := config.get_generation_mode().value) not in ("greedy_search", "sample"):
        unheeded.append(mode)
    if batch > 1:
        unheeded += [name for name in ("output_scores", "output_logits") if getattr(config, name)]
        # Their processors keep state about each row between calls.
        unheeded += [
            name for name in ("guidance_scale", "watermarking_config") if getattr(config, name) not in (None, 1)
        ]
    if unheeded:
        raise ValueError(f"{', '.join(unheeded)} (batch {batch}) is not supported; leave it or custom_generate out")


class Text:
    """One sequence; tokens are chosen one by one and with the same random numbers as in transformers."""

    def __init__(self, ids_BT: Tensor, row: int, config: Any, processors: Any, criteria: Any, streamer: Any) -> None:
        self.ids, self.done = ids_BT[row, None], False
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._row, self._batch, self._config = row, len(ids_BT), config
        self._processors, self._criteria, self._streamer = processors, criteria, streamer

    def follow(self, children: dict[tuple[int, int], int], logits_NV: Tensor) -> list[int]:
        """Choose a token, and further tokens as long as each chosen one was drafted.

        Args:
            children: Node by its parent and its token.
            logits_NV: The model's logits after each node.

        Returns:
            The nodes after which a token was chosen, from the root on; empty if the text had already ended.
        """
        path: list[int] = []
        node = None if self.done else 0
        while node is not None:
            path.append(node)
            token = self._choose(logits_NV[node, None])
            node = None if self.done else children.get((node, token))
        return path

    def _choose(self, logits_1V: Tensor) -> int:
        config, logits_1V = self._config, logits_1V.to(self.ids.device, torch.float32, copy=True)
        scores_1V = logits_1V
        for processor in self._processors:
            scores_1V = self._process(processor, scores_1V)
        if config.return_dict_in_generate:
            self.scores += [scores_1V] if config.output_scores else []
            self.logits += [logits_1V] if config.output_logits else []
        token_1 = torch.multinomial(scores_1V.softmax(-1), 1)[0] if config.do_sample else scores_1V.argmax(-1)
        self.ids = torch.cat([self.ids, token_1[None]], dim=1)
        self.done = bool(self._criteria(self.ids.expand(self._batch, -1), tuple(self.scores) or None)[self._row])
        if self._streamer is not None:
            self._streamer.put(token_1.cpu())
        return int(token_1)

    def _process(self, processor: Any, scores_1V: Tensor) -> Tensor:
        """Apply a processor. If it may depend on the number of rows, it gets this text in all rows of the batch."""
        kind = type(processor)
        if self._batch == 1 or (kind.__module__ == ONE_BY_ONE and not kind.__name__.startswith(OF_BATCHES)):
            one: Tensor = processor(self.ids, scores_1V)
            return one
        every: Tensor = processor(self.ids.expand(self._batch, -1), scores_1V.repeat(self._batch, 1))
        return every[self._row, None]
