"""Where words begin, in vocabularies of every kind, made by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clusterprof.runtime.words import starts_of_words
from tests.tiny import tiny_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]


def vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate([*SPECIALS, *tokens])}


def fast(backend: Tokenizer, **options: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def byte_level(tokens: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocabulary(tokens), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return fast(backend)


def sentencepiece(tokens: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocabulary(tokens), merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend)


def wordpiece(tokens: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(vocab=vocabulary(tokens), unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return fast(backend)


def starts(tokenizer: PreTrainedTokenizerFast, text: list[str]) -> list[str]:
    """The tokens at which a word begins, each with its place."""
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(token) for token in text])
    found = starts_of_words(tokenizer, ids)
    assert found.dtype == torch.bool
    return [f"{place}{text[place]}" for place in torch.arange(len(text))[found].tolist()]


def test_byte_level() -> None:
    text = ["<s>", "Ġthe", "Ġcat", "s", "Ċ", "sat", "ting", ",", "down", "Ġ", "x", "1", "2", "_", "y", "'t"]
    tokenizer = byte_level(list(dict.fromkeys(text[1:])))
    expected = ["0<s>", "1Ġthe", "2Ġcat", "4Ċ", "5sat", "7,", "8down", "9Ġ", "10x", "13_", "14y", "15't"]
    assert starts(tokenizer, text) == expected


def test_bytes_of_one_character_are_not_torn_apart() -> None:
    # "é" is Ã ©, the CJK "用" is ç Ķ ¨, the comma "，" is ï ¼ Į, the vowel sign of "हि" is à ¤ ¿.
    text = ["na", "Ã¯", "ve", "Ġç", "Ķ", "¨", "ï¼", "Į", "caf", "Ã", "©", "s", "à¤¹", "à¤", "¿"]
    tokenizer = byte_level(list(dict.fromkeys(text)))
    assert starts(tokenizer, text) == ["0na", "3Ġç", "6ï¼", "8caf"]


def test_a_text_cut_inside_a_character() -> None:
    # Bytes that belong to no whole character; the first is a start in any case.
    tokenizer = byte_level(["©", "ç", "x", "Ġy"])
    assert starts(tokenizer, ["©", "x", "Ġy", "ç"]) == ["0©", "1x", "2Ġy", "3ç"]


def test_sentencepiece() -> None:
    text = ["<s>", "▁The", "▁token", "iz", "er", "▁", "x", "=", "4", "2", ".", "<0x0A>", "End"]
    tokenizer = sentencepiece(list(dict.fromkeys(text[1:])))
    expected = ["0<s>", "1▁The", "2▁token", "5▁", "6x", "7=", "84", "10.", "11<0x0A>", "12End"]
    assert starts(tokenizer, text) == expected


def test_byte_tokens_of_sentencepiece() -> None:
    # "用" letter by letter, and the three bytes of the sign "→" behind it.
    text = ["▁a", "<0xE7>", "<0x94>", "<0xA8>", "b", "<0xE2>", "<0x86>", "<0x92>", "b"]
    tokenizer = sentencepiece(list(dict.fromkeys(text)))
    assert starts(tokenizer, text) == ["0▁a", "5<0xE2>", "8b"]


def test_wordpiece() -> None:
    text = ["<s>", "the", "token", "##ize", "##r", "runs", ",", "##s", "</s>", "##s"]
    tokenizer = wordpiece(list(dict.fromkeys(text[1:])))
    expected = ["0<s>", "1the", "2token", "5runs", "6,", "7##s", "8</s>", "9##s"]
    assert starts(tokenizer, text) == expected


def test_number_signs_are_no_wordpieces_elsewhere() -> None:
    tokenizer = byte_level(["a", "##", "Ġb"])
    assert starts(tokenizer, ["a", "##", "a", "Ġb"]) == ["0a", "1##", "2a", "3Ġb"]


def test_special_and_added_tokens() -> None:
    tokenizer = byte_level(["a", "Ġb"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["turn"]})
    # Spelled as it is, not in the vocabulary's bytes; "é" would be a lone byte there.
    tokenizer.add_tokens(["é"])
    text = ["a", "turn", "a", "</s>", "a", "é", "a"]
    assert starts(tokenizer, text) == ["0a", "1turn", "2a", "3</s>", "4a"]


def test_ids_beyond_the_vocabulary_stand_alone() -> None:
    # Models pad their embeddings; such an id comes up in random prompts.
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([*tokenizer("ab")["input_ids"], 500, *tokenizer("cd")["input_ids"]])
    assert starts_of_words(tokenizer, ids).tolist() == [True, False, True, True, False]


def test_the_character_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    text = "key 41 is\nred, ok"
    ids = torch.tensor(tokenizer(text)["input_ids"])
    found = starts_of_words(tokenizer, ids).tolist()
    assert [text[i] for i in range(len(text)) if found[i]] == list("k 4 i\nr, o")
    assert found[:8] == [True, False, False, True, True, False, True, True]


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40))
def test_characters_by_the_rule(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = torch.tensor(tokenizer(text)["input_ids"])
    expected = [
        i == 0 or not character.isalnum() or not text[i - 1].isalnum() for i, character in enumerate(text)
    ]
    assert starts_of_words(tokenizer, ids).tolist() == expected


@pytest.mark.parametrize("length", [0, 1])
def test_the_shortest_texts(length: int) -> None:
    assert starts_of_words(tiny_tokenizer(), torch.full((length,), 70)).tolist() == [True] * length


@pytest.mark.real_model
def test_the_built_in_tokenizer(real_model: tuple[object, PreTrainedTokenizerFast]) -> None:
    tokenizer = real_model[1]
    ids = tokenizer("Tokenization isn't naïve.\n42 apples")["input_ids"]
    found = starts_of_words(tokenizer, torch.tensor(ids)).tolist()
    words: list[str] = []
    for token, begins in zip(ids, found, strict=True):
        piece = str(tokenizer.decode([token]))
        if begins:
            words.append(piece)
        else:
            words[-1] += piece
    assert words == ["Tokenization", " isn", "'t", " naïve", ".", "\n", "42", " apples"]
