"""Tokenizers as Llama 2's: a token alone loses the space in front of its word."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa import BaseModel, MedusaModel
from tests.serve.live import serving

WORDS = ("the", "dog", "runs", "Paris")
PROMPT = "the dog 😀 runs"


@pytest.fixture(scope="module")
def base():
    places = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(f"▁{word}" for word in WORDS)]
    vocabulary = [(name, -8.0 if name.startswith("<") else -1.0) for name in [*places, *WORDS]]
    raw = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return BaseModel(LlamaForCausalLM(config).eval(), tokenizer, "spaced")


@pytest.fixture(scope="module")
def complete(base):
    def ask(**options):
        return client.completions.create(model="small", temperature=0, **options).choices[0]

    with serving(MedusaModel(base)) as live, live.client() as client:
        yield ask


def only(base, word):
    return {"logit_bias": {str(base.tokenizer.convert_tokens_to_ids(word)): 100}}


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["decoded at the end", "decoded step by step"])
def test_a_completion_goes_on_from_text_and_an_answer_is_a_text_of_its_own(base, stop):
    model, ids = MedusaModel(base), base.tokenizer(PROMPT).input_ids
    bias = {base.tokenizer.convert_tokens_to_ids("▁dog"): 100.0}
    options = {"max_new_tokens": 2, "logit_bias": bias, "stop": stop}
    assert model.generate(PROMPT, **options).text == " dog dog"
    assert model.generate(ids, **options).text == "dog dog"
    cut = ids[: 1 + ids.index(base.tokenizer.convert_tokens_to_ids("<0xF0>"))]  # inside a character
    after = model.batch()
    request = after.add(cut, continues=True)
    assert request.completion._decoded == []
    after.remove(request)


def test_the_prompt_is_echoed_as_it_was_sent(base, complete):
    told = complete(prompt=PROMPT, echo=True, max_tokens=2, logprobs=1, **only(base, "▁Paris"))
    assert told.text == f"{PROMPT} Paris Paris"
    names, offsets = told.logprobs.tokens, told.logprobs.text_offset
    assert names[:3] == ["<s>", " the", " dog"] and names[-2:] == [" Paris", " Paris"]
    assert offsets[:3] == [0, 0, 3]
    for name, offset in zip(names[2:], offsets[2:], strict=True):
        assert name.startswith("bytes:") or told.text.startswith(name, offset)


def test_a_prompt_without_special_tokens(base, complete):
    for special in (None, True, False):
        told = complete(prompt="the dog", extra_body={"add_special_tokens": special, "return_token_ids": True})
        ids = base.tokenizer("the dog", add_special_tokens=special is not False).input_ids
        assert told.prompt_token_ids == ids and (ids[0] == 1) == (special is not False)


def test_tokens_that_differ_in_a_space_are_two(base, complete):
    spaced, alone = (base.tokenizer.convert_tokens_to_ids(name) for name in ("▁the", "the"))
    ids = [*base.tokenizer(PROMPT).input_ids, alone]
    with torch.inference_mode():
        base.model.lm_head.weight[spaced] = base.hidden_states(torch.tensor([ids]))[0, -2]
        expected = base.model(torch.tensor([ids])).logits[0, -2].log_softmax(-1)
    assert expected.argmax() == spaced
    told = complete(prompt=ids, echo=True, max_tokens=0, logprobs=1).logprobs
    assert told.tokens[-1] == "the"
    found = {" the": float(expected[spaced]), "the": float(expected[alone])}
    assert told.top_logprobs[-1] == pytest.approx(found, abs=1e-4)
