"""Train the embedded base, a small Llama-architecture model, on the standard library (``python -m data.train_base``).

The result under ``data/embedded/base`` ships with the repository, so nobody needs to run this; it stays here because a
model without its recipe is a mystery. The learning-rate schedule follows the clock: constant, then a linear decay over
the last ``DECAY`` of ``--minutes``, so that a slow machine ends with a finished (if weaker) model too.
"""

import argparse
import json
import logging
import math
import os
import platform
import shutil
import time
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.stdlib import chat_pairs, documents
from medusa.files import sweep

logger = logging.getLogger(__name__)

VOCABULARY = 4096
CONTEXT = 1024
WARM_UP_STEPS = 40
DECAY = 0.5
SHORT_WINDOWS = 0.7
"""The first part of the time trains on windows of half the context: attention on a CPU is a quarter of a long step."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a beginning-of-text token and the chat template above."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = SPECIAL_TOKENS[0]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token="<|end|>",
        pad_token=bos,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )


def base_config(hidden_size: int = 384, layers: int = 5) -> LlamaConfig:
    """The shape: 9.4 million parameters, 18.9 MB in bfloat16, where nothing else is wanted."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=-(-8 * hidden_size // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=min(2, hidden_size // 64),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[1, 0],
        pad_token_id=0,
    )


def encode_corpus(tokenizer: PreTrainedTokenizerFast) -> list[Tensor]:
    """Every training document and chat pair as int32 ids that begin with the beginning-of-text token."""
    texts = [document.text for document in documents("train")]
    texts += [_chat_text(tokenizer, pair.messages) for pair in chat_pairs("train")]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    return [torch.tensor([bos, *e.ids] if e.ids[0] != bos else e.ids, dtype=torch.int32) for e in encoded]


def batches(samples: list[Tensor], tokens: int, seed: int) -> Generator[tuple[int, Tensor], int, None]:
    """Endless ``(epoch, [rows, length + 1])`` batches of ``tokens`` tokens; send the length of the next one.

    In every epoch the samples are joined in a new order and cut into windows, which are shuffled again: the windows of
    one long file would otherwise fill a whole batch.
    """
    generator = torch.Generator().manual_seed(seed)
    epoch, length = 0, CONTEXT
    while True:
        stream = torch.cat([samples[i] for i in torch.randperm(len(samples), generator=generator).tolist()])
        windows = stream[: len(stream) // CONTEXT * CONTEXT - CONTEXT + 1]
        order = torch.randperm(len(windows) // CONTEXT, generator=generator)
        for chosen in order.split(tokens // CONTEXT):
            starts = chosen[:, None] * CONTEXT + torch.arange(0, CONTEXT, length)
            rows = starts.flatten()[:, None] + torch.arange(length + 1)
            length = yield epoch, stream[rows].long()
        epoch += 1


def optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def schedule(progress: float, step: int) -> float:
    """The factor on the learning rate when ``progress`` of the time (0..1) is over."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.02, (1.0 - progress) / DECAY))


@torch.no_grad()
def held_out_figures(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, most: int = 120_000
) -> dict[str, float]:
    """Loss on the held-out modules in windows of the context length: nats per token, bits per byte, top-1."""
    nats = correct = tokens = 0.0
    size = 0
    for document in documents("heldout"):
        ids = torch.tensor(tokenizer(document.text)["input_ids"], device=model.device)
        for start in range(0, len(ids) - 1, CONTEXT):
            window = ids[start : start + CONTEXT + 1]
            with torch.autocast(model.device.type, torch.bfloat16):
                logits = model(window[None, :-1]).logits[0].float()
            nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            correct += (logits.argmax(-1) == window[1:]).sum().item()
            tokens += len(window) - 1
        size += len(document.text.encode())
        if tokens > most:
            break
    return {
        "heldout_nats_per_token": round(nats / tokens, 4),
        "heldout_bits_per_byte": round(nats / math.log(2) / size, 4),
        "heldout_top1": round(correct / tokens, 4),
        "heldout_tokens": int(tokens),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train within ``args.minutes`` of wall-clock time and write the model, its tokenizer and its figures."""
    torch.manual_seed(args.seed)
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer([d.text for d in documents("train")] + [p.answer for p in chat_pairs("train")])
    samples = encode_corpus(tokenizer)
    corpus_tokens = sum(map(len, samples))
    model = LlamaForCausalLM(base_config(args.hidden_size, args.layers)).to(args.device)
    model.train()
    step_model = torch.compile(model) if args.compile else model
    opts = optimizers(model, args.lr)
    logger.info("%d samples, %d tokens, %d parameters", len(samples), corpus_tokens, model.num_parameters())
    begin = saved = time.monotonic()
    total = 0.0
    source = batches(samples, args.rows * CONTEXT, args.seed)
    epoch, ids = next(source)
    for step in count():
        progress = (time.monotonic() - begin) / (60 * args.minutes)
        if progress >= 1 or (args.steps and step == args.steps):
            break
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * schedule(progress, step)
        total = 0.0
        for part in ids.to(args.device).split(args.micro_rows * CONTEXT // (ids.shape[1] - 1)):
            with torch.autocast(args.device, torch.bfloat16):
                logits = step_model(part[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
            (loss * len(part) / len(ids)).backward()
            total += loss.item() * len(part) / len(ids)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if step % 20 == 0:
            spent = time.monotonic() - begin
            rate = (step + 1) * args.rows * CONTEXT / spent
            logger.info("step %d epoch %d loss %.4f %.0f tokens/s %.1f min", step, epoch, total, rate, spent / 60)
        epoch, ids = source.send(CONTEXT // 2 if progress < SHORT_WINDOWS else CONTEXT)
        if time.monotonic() - saved > 60 * args.save_minutes:
            save(model, tokenizer, Path(args.out), {"unfinished": True, "steps": step + 1})
            saved = time.monotonic()
    figures = {
        "corpus": f"standard library of Python {platform.python_version()}, training side of data/stdlib.py",
        "corpus_tokens": corpus_tokens,
        "steps": step,
        "tokens": step * args.rows * CONTEXT,
        "epochs": round(step * args.rows * CONTEXT / corpus_tokens, 2),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "last_train_loss": round(total, 4),
        **held_out_figures(model.eval(), tokenizer),
        "parameters": model.num_parameters(),
        "hardware": f"{args.device}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "arguments": vars(args),
    }
    save(model, tokenizer, Path(args.out), figures)
    return figures


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, figures: dict[str, Any]) -> None:
    """Write the model in bfloat16 shards of at most 12 MB beside ``training.json``; the whole folder is replaced."""
    sweep(out.parent, f"{out.name}.tmp*")
    temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    export = LlamaForCausalLM(model.config).to(torch.bfloat16)
    export.load_state_dict(state)
    export.save_pretrained(temporary, max_shard_size="12MB")
    tokenizer.save_pretrained(temporary)
    (temporary / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


def _chat_text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "embedded" / "base"), help="output directory")
    parser.add_argument("--hidden-size", type=int, default=384, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=5, help="transformer layers")
    parser.add_argument("--tokenizer", metavar="DIR", help="take this one; without it, one is trained on the corpus")
    parser.add_argument("--minutes", type=float, default=90.0, help="time limit; the schedule follows it")
    parser.add_argument("--steps", type=int, default=0, help="step limit (0: none)")
    parser.add_argument("--rows", type=int, default=8, help=f"sequences of {CONTEXT} tokens per step")
    parser.add_argument("--micro-rows", type=int, default=4, help="sequences per forward pass")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--save-minutes", type=float, default=10.0, help="minutes between intermediate saves")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logger.info("%s", json.dumps(train(args), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
