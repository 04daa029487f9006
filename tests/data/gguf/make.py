"""Makes the files of this folder: small models of many families, converted by llama.cpp's own converter.

Run it in the repository root with the folder of llama.cpp's sources, which the source package of llama-cpp-python holds
(``vendor/llama.cpp``; here that of 0.3.36): ``python -m tests.data.gguf.make LLAMA_CPP [FAMILY ...]``.
"""

import json
import lzma
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.medusa.gguf_families import FAMILIES, SIZES, small

RAW: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "layers_block_type": ..., "num_experts_per_tok": ...,
        "n_routed_experts": ...,
    },
    "nemotron_h-experts": {"num_nextn_predict_layers": 1},
    "cohere2": {"rotary_pct": 1.0}, "gemma3_text-whole": {"sliding_window_pattern": 1},
    "deepseek_v2": {"scoring_func": "softmax"}, "deepseek_v3": {"scoring_func": "sigmoid"},
    "deepseek_v3-lite": {"scoring_func": "sigmoid"},
    "gpt2": {"n_ctx": 128}, "qwen3_next": {"mtp_num_hidden_layers": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitemoehybrid-dense": {"layer_types": ["mamba", "attention", "mamba"]},
}  # fmt: skip
"""What the converter wants to find in a config, and transformers no longer writes; ... is what it must not find."""
TEXT = "the cat sat on the mat and the dog ran away into a very deep forest and then came back home again with things"


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and some words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, letters = ["<|endoftext|>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], special_tokens=special, initial_alphabet=letters)
    made.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def changed(config: dict[str, Any], family: str) -> dict[str, Any]:
    """A config as the converter wants it."""
    return {name: value for name, value in (config | RAW.get(family, {})).items() if value is not ...}


def convert(directory: Path, file: Path, llama_cpp: Path, family: str) -> None:
    """Run the converter in this process, with its own ``gguf``; all vocabularies are taken as SmolLM's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion
    import conversion.base

    find, read = conversion.get_model_class, conversion.base.ModelBase.load_hparams

    def settings(*args, **options):
        return changed(read(*args, **options), family)

    def plain_vocabulary(*args, **options):
        found = find(*args, **options)
        found.set_vocab = lambda self: self._set_vocab_gpt2()
        return found

    conversion.get_model_class, conversion.base.ModelBase.load_hparams = plain_vocabulary, staticmethod(settings)
    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    sys.argv = ["convert", str(directory), "--outfile", str(file), "--outtype", "q8_0"]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


def make(family: str, llama_cpp: Path) -> None:
    """Make one file."""
    with tempfile.TemporaryDirectory() as beside:
        directory, file = Path(beside) / family, Path(beside) / "small.gguf"
        model = small(family)
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(directory)
        tokenizer().save_pretrained(directory)
        config = directory / "config.json"  # which some of the converter's classes read, and others do not
        config.write_text(json.dumps(changed(json.loads(config.read_text()), family)))
        if (child := os.fork()) == 0:
            convert(directory, file, llama_cpp, family)
            os._exit(0)
        os.waitpid(child, 0)
        packed = Path(__file__).with_name(f"{family}.gguf.xz")
        packed.write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    for one in sys.argv[2:] or FAMILIES:
        make(one, Path(sys.argv[1]))
