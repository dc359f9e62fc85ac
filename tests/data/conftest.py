import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.tokenizers import byte_level


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """With a ChatML template and without a BOS, like the built-in model's."""
    return byte_level()
