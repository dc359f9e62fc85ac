import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import BatchEncoding, PreTrainedTokenizerFast

from clusterprof.data import Message, Row, build_prompt
from clusterprof.data.prompts import check_rendering, count_tokens
from clusterprof.errors import DataError
from tests.data.tokenizers import STRICT, byte_level, decode

TOKENIZER = byte_level()
PLAIN = byte_level(chat_template=None, bos=True)
LLAMA_LIKE = byte_level(chat_template=STRICT, bos=True)
EVERYTHING = 10**9


def ask(context: str, question: str, **fields: object) -> Row:
    content = f"{context}\n\n{question}"
    row = Row("r", (Message("user", content),), context, question, question_start=len(context) + 2)
    return dataclasses.replace(row, **fields)  # type: ignore[arg-type]


def whole_template(row: Row, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    turns = [{"role": message.role, "content": message.content} for message in row.messages]
    encoding = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    assert isinstance(encoding, BatchEncoding)
    return list(encoding["input_ids"])


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LLAMA_LIKE], ids=["chatml", "llama-like"])
def test_a_prompt_is_what_the_tokenizer_makes_of_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    row = ask("Some context, été.", "A question?")
    prompt = build_prompt(row, tokenizer, max_tokens=EVERYTHING)
    assert list(prompt.input_ids) == whole_template(row, tokenizer)
    assert (prompt.id, prompt.tokens_cut) == ("r", 0)


def test_the_template_and_the_tokenizer_do_not_both_add_a_bos() -> None:
    ids = build_prompt(ask("a", "b"), LLAMA_LIKE, max_tokens=EVERYTHING).input_ids
    assert ids.count(LLAMA_LIKE.bos_token_id) == 1
    assert ids[0] == LLAMA_LIKE.bos_token_id


def test_without_a_template_the_text_is_plain_with_the_tokenizers_own_bos() -> None:
    row = ask("a", "b")
    ids = build_prompt(row, PLAIN, max_tokens=EVERYTHING).input_ids
    assert list(ids) == PLAIN("a\n\nb")["input_ids"]
    assert ids.count(PLAIN.bos_token_id) == 1
    raw = dataclasses.replace(row, use_chat_template=False)
    assert build_prompt(raw, LLAMA_LIKE, max_tokens=EVERYTHING).input_ids == ids


def test_without_a_template_turns_are_set_apart_by_blank_lines() -> None:
    row = Row("r", (Message("system", "Be brief."), Message("user", "Hello.")))
    ids = build_prompt(row, PLAIN, max_tokens=EVERYTHING).input_ids
    assert decode(PLAIN, ids[1:]) == "Be brief.\n\nHello."


def test_an_answer_prefix_follows_the_generation_prompt() -> None:
    plain = build_prompt(ask("a", "b"), TOKENIZER, max_tokens=EVERYTHING)
    prefixed = build_prompt(ask("a", "b", answer_prefix="Answer:"), TOKENIZER, max_tokens=EVERYTHING)
    assert decode(TOKENIZER, prefixed.input_ids) == decode(TOKENIZER, plain.input_ids) + "Answer:"


@pytest.mark.parametrize(
    ("tokenizer", "end"),
    [(TOKENIZER, "<|im_end|>\n<|im_start|>assistant\n"), (LLAMA_LIKE, "]"), (PLAIN, "")],
    ids=["chatml", "llama-like", "plain"],
)
@pytest.mark.parametrize("question", ["Why?", "a", "What is it, été or 冬?"])
def test_the_query_is_the_question_to_the_end(
    tokenizer: PreTrainedTokenizerFast, end: str, question: str
) -> None:
    # The context holds the question too, so only its position can tell.
    prompt = build_prompt(ask(f"x {question} y ", question), tokenizer, max_tokens=EVERYTHING)
    assert prompt.query_length is not None
    assert decode(tokenizer, prompt.input_ids[-prompt.query_length :]) == question + end


def test_a_token_that_straddles_the_start_belongs_to_the_query() -> None:
    content = "Look at this. The end"
    row = Row("r", (Message("user", content),), question="The end", question_start=content.index("The"))
    prompt = build_prompt(row, PLAIN, max_tokens=EVERYTHING)
    assert prompt.query_length is not None
    assert decode(PLAIN, prompt.input_ids[-prompt.query_length :]) == " The end"


def test_a_message_that_the_template_strips_keeps_its_question_in_place() -> None:
    content = "  \n context. Why?  \n"
    row = Row("r", (Message("user", content),), question="Why?", question_start=content.index("Why"))
    prompt = build_prompt(row, LLAMA_LIKE, max_tokens=EVERYTHING)
    assert prompt.query_length is not None
    assert decode(LLAMA_LIKE, prompt.input_ids[-prompt.query_length :]).strip() == "Why?]"


def test_a_row_without_a_question_has_no_query_length() -> None:
    row = Row("r", (Message("user", "Tell me a story."),))
    assert build_prompt(row, TOKENIZER, max_tokens=EVERYTHING).query_length is None


def test_a_template_that_rewrites_the_text_leaves_the_query_unknown() -> None:
    shouting = byte_level("{% for message in messages %}{{ message['content'] | upper }}{% endfor %}")
    assert build_prompt(ask("a", "b"), shouting, max_tokens=EVERYTHING).query_length is None


@settings(deadline=None)
@given(
    context=st.text(st.characters(exclude_categories=["Cs"]), max_size=120),
    question=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map(
        lambda s: f"Q{s}"
    ),
    max_tokens=st.integers(1, 150),
    tokenizer=st.sampled_from([TOKENIZER, PLAIN, LLAMA_LIKE]),
)
def test_a_cut_prompt_keeps_both_ends_and_the_limit(
    context: str, question: str, max_tokens: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = ask(context, question)
    whole = build_prompt(row, tokenizer, max_tokens=EVERYTHING)
    cut = build_prompt(row, tokenizer, max_tokens=max_tokens)
    assert len(cut.input_ids) == min(max_tokens, len(whole.input_ids))
    assert cut.tokens_cut == len(whole.input_ids) - len(cut.input_ids)
    assert count_tokens(row, tokenizer) == len(whole.input_ids)
    if cut.tokens_cut:
        head, tail = max_tokens // 2, max_tokens - max_tokens // 2
        assert cut.input_ids == whole.input_ids[:head] + whole.input_ids[-tail:]
        assert whole.query_length is not None
        assert cut.query_length == min(whole.query_length, tail)
    else:
        assert cut == whole


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_a_limit_below_one_token_is_refused(max_tokens: int) -> None:
    with pytest.raises(DataError, match="at least 1"):
        build_prompt(ask("a", "b"), TOKENIZER, max_tokens=max_tokens)


def test_what_a_template_refuses_is_named() -> None:
    rows = [ask("a", "b"), Row("no 2", (Message("system", "s"), Message("user", "u")))]
    with pytest.raises(DataError, match=r"Row 'no 2': .*turns must alternate"):
        check_rendering(rows, LLAMA_LIKE)
    check_rendering(rows, TOKENIZER)


def test_a_prompt_that_vanishes_in_the_tokenizer_is_refused() -> None:
    deaf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
    with pytest.raises(DataError, match="no tokens"):
        build_prompt(ask("b", "c"), deaf, max_tokens=EVERYTHING)


def test_long_prompts_cause_no_warning_from_the_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    short_sighted = byte_level()
    short_sighted.model_max_length = 8
    build_prompt(ask("many words " * 20, "Why?"), short_sighted, max_tokens=16)
    assert not caplog.records
