"""From a row to the tokens a model reads: chat template, length limit, and where the question starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterprof.data.rows import Row
from clusterprof.errors import DataError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """The tokens of one row.

    Attributes
    ----------
    id : str
        The row's id.
    input_ids : tuple of int
        The whole prompt, special tokens and generation prompt included.
    query_length : int or None
        Tokens from the first one of the question to the end; None if there is no known question, or a
        tokenizer without offsets ("slow") cannot tell.
    tokens_cut : int
        Tokens taken out of the middle to meet the limit; 0 if it was met.
    """

    id: str
    input_ids: tuple[int, ...]
    query_length: int | None
    tokens_cut: int


def build_prompt(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> Prompt:
    """Render a row and cut it to the model's limit.

    LongBench's protocol keeps the first and the last half of the tokens of a prompt that is too long. Here
    the halves are those of the finished prompt, so the chat template is inside the limit and no token is
    ever decoded and encoded again.

    Parameters
    ----------
    row : Row
    tokenizer : PreTrainedTokenizerBase
        One without a chat template gets the plain text.
    max_tokens : int
        Most tokens the prompt may have.

    Returns
    -------
    Prompt

    Raises
    ------
    DataError
        If `max_tokens` is below 1, the chat template refuses the messages, or the prompt has no tokens.
    """
    if max_tokens < 1:
        raise DataError(f"The longest prompt allowed is {max_tokens} tokens, and must be at least 1.")
    text, templated = _render(row, tokenizer)
    encoding = _encode(tokenizer, text, templated)
    input_ids = list(encoding["input_ids"])
    if not input_ids:
        raise DataError(f"Row {row.id!r}: the tokenizer makes no tokens of its prompt; drop the row.")
    query_length = _query_length(row, text, encoding)
    tokens_cut = max(0, len(input_ids) - max_tokens)
    if tokens_cut:
        head = max_tokens // 2
        input_ids = input_ids[:head] + input_ids[head + tokens_cut :]
        if query_length is not None:
            query_length = min(query_length, max_tokens - head)
    return Prompt(row.id, tuple(input_ids), query_length, tokens_cut)


def count_tokens(row: Row, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the row's uncut prompt in tokens."""
    return len(_encode(tokenizer, *_render(row, tokenizer))["input_ids"])


def check_rendering(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `DataError` for the first row that the tokenizer's chat template refuses."""
    for row in rows:
        _render(row, tokenizer)


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Return the prompt as text, and whether it is the chat template's (which writes its own BOS)."""
    if not (row.use_chat_template and tokenizer.chat_template):
        return "\n\n".join(message.content for message in row.messages) + row.answer_prefix, False
    import jinja2

    turns = [{"role": message.role, "content": message.content} for message in row.messages]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise DataError(
            f"Row {row.id!r}: the tokenizer's chat template refuses its messages ({error}); "
            "change the roles or their order."
        ) from error
    return str(rendered) + row.answer_prefix, True


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, templated: bool) -> BatchEncoding:
    # verbose=False: prompts over the model's length are cut here, no warning is due.
    encoding: BatchEncoding = tokenizer(text, add_special_tokens=not templated, verbose=False)
    return encoding


def _query_length(row: Row, text: str, encoding: BatchEncoding) -> int | None:
    # Only the fast tokenizers know which characters a token stands for.
    if row.question_start is None or not encoding.is_fast:
        return None
    # Templates may strip a message's outer whitespace, so the stripped text is what can be found again.
    content = row.messages[-1].content
    found = text.rfind(content.strip())
    if found < 0:
        return None
    first = encoding.char_to_token(found + row.question_start - (len(content) - len(content.lstrip())))
    return None if first is None else len(encoding["input_ids"]) - first
