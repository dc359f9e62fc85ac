"""Words: where in a prompt they begin, read from its tokens."""

import unicodedata
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.models import WordPiece
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def starts_of_words(tokenizer: "PreTrainedTokenizerBase", input_ids: Tensor) -> Tensor:
    """Whether a word begins with each token of a text.

    It does where the token's first character is no letter or digit, as a space or a punctuation mark, or follows
    one that is none. A special token stands alone, and a token that begins in the middle of a character begins
    nothing.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Whose ids they are; byte-level, sentencepiece and WordPiece vocabularies are understood.
    input_ids : Tensor
        int64 ``(tokens,)``.

    Returns
    -------
    Tensor
        Bool ``(tokens,)``, on the same device; True for the first.
    """
    ids = input_ids.tolist()
    spelled = spelling(tokenizer, sorted(set(ids)))
    pieces = [spelled[token] for token in ids]
    # A byte that is no part of a character becomes one by itself.
    text = b"".join(pieces).decode(errors="surrogateescape")
    breaks = {0}
    position, inside = 0, False
    for character in text:
        continues = _in_word(character)
        if not (inside and continues):
            breaks.add(position)
        inside = continues
        position += len(character.encode(errors="surrogateescape"))
    starts, position = [], 0
    for piece in pieces:
        starts.append(position in breaks)
        position += len(piece)
    return torch.tensor(starts, dtype=torch.bool, device=input_ids.device)


def _in_word(character: str) -> bool:
    # Vowel signs and accents that combine with a letter are no letters by themselves.
    return character.isalnum() or unicodedata.category(character).startswith("M")


def spelling(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> dict[int, bytes]:
    """What each token adds to the text, in UTF-8; a special one, or one that the vocabulary lacks, is a space."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in f"{getattr(backend, 'pre_tokenizer', '')}{getattr(backend, 'decoder', '')}"
    model = getattr(backend, "model", None)
    continuing = model.continuing_subword_prefix if isinstance(model, WordPiece) else None
    # These are spelled as they are, whatever the vocabulary's own tokens are spelled in.
    added, special = set(tokenizer.added_tokens_decoder), set(tokenizer.all_special_ids)
    tokens: Any = tokenizer.convert_ids_to_tokens(ids)
    spelled = {}
    for token_id, token in zip(ids, tokens, strict=True):
        if token is None or token_id in special:
            spelled[token_id] = b" "
        elif token_id in added:
            spelled[token_id] = token.encode()
        elif byte_level:
            spelled[token_id] = b"".join(_BYTES.get(character, character.encode()) for character in token)
        elif continuing is not None:
            whole = not token.startswith(continuing)
            spelled[token_id] = (f" {token}" if whole else token.removeprefix(continuing)).encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            spelled[token_id] = bytes.fromhex(token[3:5])
        else:
            spelled[token_id] = token.replace("▁", " ").encode()
    return spelled


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that byte-level vocabularies are spelled in, as GPT-2 chose them."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): bytes([byte]) for byte in printable}
    return spelled | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
