"""Text in, text out: streamers and pipelines inside the context."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer, TextStreamer, pipeline

from clusterprof import compress
from tests.runtime.subjects import TINY, generate, greedy_answer
from tests.tiny import tiny_gemma3, tiny_llama, tiny_tokenizer

TEXT = "The cache of this prompt is far larger than what is kept of it."
Build = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_streamers(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = build(eos_token_id=None), tiny_tokenizer()
    prompt = tokenizer(TEXT, return_tensors="pt").input_ids
    expected = tokenizer.decode(greedy_answer(model, prompt, 15)[0], skip_special_tokens=True)
    options: dict[str, Any] = {"skip_prompt": True, "skip_special_tokens": True}
    with compress(model, TINY):
        printing = TextStreamer(tokenizer, **options)
        generate(model, prompt, 15, streamer=printing)
        assert capsys.readouterr().out == f"{expected}\n"

        iterating = TextIteratorStreamer(tokenizer, timeout=60, **options)
        thread = threading.Thread(target=generate, args=(model, prompt, 15), kwargs={"streamer": iterating})
        thread.start()
        assert "".join(iterating) == expected
        thread.join()


def text_generator(model: PreTrainedModel) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_pipeline(build: Build, batch_size: int, kept_sets: list[Tensor]) -> None:
    model = build(eos_token_id=None)
    writer = text_generator(model)
    prompts = [TEXT, TEXT[20:50], TEXT[:9], TEXT[::-1]]
    with compress(model, TINY):
        answers = writer(
            prompts, batch_size=batch_size, do_sample=False, max_new_tokens=10, return_full_text=False
        )
    assert kept_sets
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = greedy_answer(model, writer.tokenizer(prompt, return_tensors="pt").input_ids, 10)[0]
        assert answer[0]["generated_text"] == writer.tokenizer.decode(tokens, skip_special_tokens=True)


@torch.no_grad()
def test_pipeline_with_a_chat_template() -> None:
    model = tiny_llama(eos_token_id=None)
    writer = text_generator(model)
    messages = [{"role": "user", "content": TEXT}]
    with compress(model, TINY):
        answer = writer(messages, do_sample=False, max_new_tokens=10)[0]["generated_text"][-1]
    prompt = writer.tokenizer(f"user: {TEXT}\nassistant:", return_tensors="pt").input_ids
    expected = writer.tokenizer.decode(greedy_answer(model, prompt, 10)[0], skip_special_tokens=True)
    assert answer == {"role": "assistant", "content": expected}
