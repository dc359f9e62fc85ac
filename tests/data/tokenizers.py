"""Small tokenizers that behave like real ones: byte-level BPE, with and without a chat template or a BOS."""

from collections.abc import Sequence
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Llama's and Mistral's: writes its own BOS, strips every message, wants turns to alternate.
STRICT = (
    "<s>{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}[{{ message['content'] | trim }}]{% endfor %}"
)
SPECIAL = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>"]


def decode(tokenizer: PreTrainedTokenizerFast, input_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(input_ids))
    assert isinstance(text, str)
    return text


def byte_level(chat_template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A BPE over bytes, trained on Python's own documentation; loses no character of any text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["execmodel"], topics["naming"]], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>" if bos else None,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )
