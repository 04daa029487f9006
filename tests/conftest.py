"""Small random bases in real architectures, made on the spot: no download, a byte tokenizer, a second at most."""

import copy
import functools
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from httpx._transports import default as httpx_default  # its clients read all certificates, 30 ms each
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa import BaseModel, DraftHeads, HeadsConfig, MedusaModel, build_heads
from medusa.base import smollm2
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.heads.layer import LayerConfig

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, badly so on a busy machine
# In the background of a script Ctrl-C is ignored, and would be by the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

CLONES_CACHE = Path(__file__).parent.parent / ".cache"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<end>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<end>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept for the next start is kept for this test run only, in processes of tests too.

    Compiled kernels are the clone's: they are built once, and not by every process of every run.
    """
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CLONES_CACHE))
        native.available()
        patch.setattr(httpx_default, "create_ssl_context", functools.cache(httpx_default.create_ssl_context))
        (cache / "medusa").mkdir()
        for library in (CLONES_CACHE / "medusa").glob("kernels-*.so"):
            (cache / "medusa" / library.name).symlink_to(library)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No test changes the environment of the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class CountedPool(BlockPool):
    """Pools that are looked at after each test."""

    alive: ClassVar[weakref.WeakSet[BlockPool]] = weakref.WeakSet()

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.alive.add(self)


@pytest.fixture(autouse=True)
def no_block_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every block of every KV cache is free, held or known."""
    for module in ("medusa.base.model", "medusa.cache.follower"):
        monkeypatch.setattr(f"{module}.BlockPool", CountedPool)
    yield
    for pool in CountedPool.alive:
        pool.check_integrity()


@pytest.fixture(scope="session")
def smollm2_directory() -> str:
    """SmolLM2-135M-Instruct, a real base, kept in the clone's own cache; for slow tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(CLONES_CACHE))
        try:
            return smollm2.locate("smollm2")
        except OSError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; id 0 ends an answer."""
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def base_directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A saved two-layer Llama with grouped heads, so sharp that samples are not uniform and random heads draft."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 1.5
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def base(base_directory: Path) -> BaseModel:
    """That base in float64, so that greedy identity is exact and not a matter of ties."""
    return BaseModel.load(base_directory, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="session")
def make_heads(base: BaseModel) -> Callable[..., DraftHeads]:
    """Heads with random weights: right sometimes, wrong mostly."""

    def make(num_heads: int = 3, **options: object) -> DraftHeads:
        torch.manual_seed(1)
        options = {"base": base.name, "architecture": "recurrent"} | options
        if options["architecture"] in ("attention", "block"):
            options.setdefault("layer", LayerConfig.of(base.config))
        config = HeadsConfig(base.hidden_size, base.vocab_size, num_heads, **options)  # type: ignore[arg-type]
        heads = build_heads(config).to(base.dtype)
        heads.init_from_base(base.lm_head_weight)
        for parameter in heads.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return heads.eval().requires_grad_(False)

    return make


@pytest.fixture
def model(base: BaseModel, make_heads: Callable[..., DraftHeads]) -> MedusaModel:
    """The base with three random heads, which know nothing of other tests' completions."""
    return MedusaModel(base, make_heads())


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 conversations whose answers repeat, so that heads have something to learn."""
    return _conversations(tmp_path_factory.mktemp("samples") / "train.jsonl", range(64))


@pytest.fixture(scope="session")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 others of their kind."""
    return _conversations(tmp_path_factory.mktemp("heldout") / "heldout.jsonl", range(64, 128))


def _conversations(path: Path, numbers: range) -> Path:
    records = [{"prompt": f"say {n}", "response": f"{n} " * (3 + n % 7) + "abcdefgh " * 3} for n in numbers]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def with_template(base: BaseModel) -> Callable[[str | None], MedusaModel]:
    """The base with another chat template, or none; no heads."""

    def make(template: str | None) -> MedusaModel:
        tokenizer = copy.deepcopy(base.tokenizer)
        tokenizer.chat_template = template
        return MedusaModel(BaseModel(base.model, tokenizer, base.name))

    return make


@pytest.fixture(scope="session")
def ending_with(base: BaseModel) -> Callable[..., BaseModel]:
    """The base with other tokens that end a completion."""

    def make(*tokens: int) -> BaseModel:
        model = copy.copy(base.model)
        model.generation_config = GenerationConfig(eos_token_id=list(tokens))
        return BaseModel(model, base.tokenizer, base.name)

    return make
