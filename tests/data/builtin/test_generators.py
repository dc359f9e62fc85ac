import os
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clusterprof.data import Dataset, build_prompt, load_dataset
from clusterprof.data.builtin import GENERATORS, code, generator, lines, needle
from clusterprof.data.builtin.prose import sentences
from clusterprof.errors import DataError
from tests.data.tokenizers import byte_level, decode

TOKENS = 1000
EVERYTHING = 10**9


@pytest.fixture(scope="module")
def datasets(tokenizer: PreTrainedTokenizerFast) -> dict[str, Dataset]:
    return {name: load_dataset(name, tokenizer=tokenizer, tokens=TOKENS) for name in GENERATORS}


@pytest.mark.parametrize("name", GENERATORS)
def test_sixty_different_prompts_of_the_length_asked_for(
    datasets: dict[str, Dataset], name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = datasets[name].rows
    prompts = {build_prompt(row, tokenizer, max_tokens=EVERYTHING).input_ids for row in rows}
    assert len(prompts) == len(rows) == 40
    assert datasets[name].duplicates == 0
    lengths = [len(prompt) for prompt in prompts]
    assert max(lengths) <= TOKENS
    assert min(lengths) >= 0.97 * TOKENS


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_arguments_give_the_same_rows_and_other_seeds_others(
    datasets: dict[str, Dataset], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "ROWS", 4)
    again = load_dataset(name, tokenizer=byte_level(), tokens=TOKENS).rows
    assert again == datasets[name].rows[:4]
    other = load_dataset(name, tokenizer=byte_level(), tokens=TOKENS, seed=1).rows
    assert not {row.messages for row in other} & {row.messages for row in datasets[name].rows}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_tokenizer_without_a_chat_template_gets_the_length_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "ROWS", 3)
    plain = byte_level(chat_template=None, bos=True)
    for row in load_dataset(name, tokenizer=plain, tokens=TOKENS).rows:
        assert 0.97 * TOKENS <= len(build_prompt(row, plain, max_tokens=EVERYTHING).input_ids) <= TOKENS


@pytest.mark.parametrize("name", GENERATORS)
def test_short_prompts_are_never_over(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "ROWS", 6)
    for row in load_dataset(name, tokenizer=tokenizer, tokens=256).rows:
        # A line or a sentence is coarse beside 256 tokens.
        assert 0.9 * 256 <= len(build_prompt(row, tokenizer, max_tokens=EVERYTHING).input_ids) <= 256


def test_prompts_longer_than_the_text_there_is(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "ROWS", 1)
    row = load_dataset("needle", tokenizer=tokenizer, tokens=60_000).rows[0]
    assert len(row.context) > sum(map(len, sentences()))
    assert 0.97 * 60_000 <= len(build_prompt(row, tokenizer, max_tokens=EVERYTHING).input_ids) <= 60_000


@pytest.mark.parametrize("name", ["needle", "lines", "docs"])
def test_the_query_is_the_question(
    datasets: dict[str, Dataset], name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    for row in datasets[name].rows[:5]:
        prompt = build_prompt(row, tokenizer, max_tokens=EVERYTHING)
        assert prompt.query_length is not None
        query = decode(tokenizer, prompt.input_ids[-prompt.query_length :])
        assert query.strip() == f"{row.question}<|im_end|>\n<|im_start|>assistant"


def test_the_needle_is_at_a_sentence_end_and_at_any_depth(datasets: dict[str, Dataset]) -> None:
    depths = []
    # How the sentence that answers a question begins, and how it ends.
    ends = {
        r"What is the special magic number for (\w+) mentioned": (
            "The special magic number for",
            r"\d{5,7}\.",
        ),
        r"What is the best thing to do in (\w+),": (
            "The best thing to do in",
            r"[A-Z][\w ]+ on a sunny day\.",
        ),
        r"At what time does the night train to (\w+) leave,": ("The night train to", r"\d\d:\d\d\."),
    }
    kinds = set()
    for row in datasets["needle"].rows:
        (answer,) = row.answers
        kind, city = next((kind, found[1]) for kind in ends if (found := re.match(kind, row.question)))
        kinds.add(kind)
        begin, end = ends[kind]
        before, needle_start, rest = row.context.partition(f"{begin} {city} ")
        assert needle_start
        inside, found_answer, after = rest.partition(answer)
        assert found_answer
        assert "." not in inside
        assert re.match(end, answer + after)
        before = before.strip()
        assert before == "" or before[-1] in ".!?"
        assert answer not in before + after
        depths.append(len(before) / len(row.context))
    assert kinds == ends.keys()
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert len({row.question for row in datasets["needle"].rows}) == 40


def test_the_haystack_is_prose(datasets: dict[str, Dataset]) -> None:
    text = sentences()
    assert len(text) > 500
    assert sum(map(len, text)) > 100_000
    assert not [s for s in text if "::=" in s or ">>>" in s or "\n" in s or "**" in s or "``" in s]


def test_lines_have_the_longeval_format_and_one_right_answer(datasets: dict[str, Dataset]) -> None:
    for row in datasets["lines"].rows:
        record = re.findall(r"^line ([a-z]+-[a-z]+): REGISTER_CONTENT is <(\d+)>$", row.context, re.MULTILINE)
        assert len(record) == len(dict(record)) > 10
        asked = re.search(r"in line ([a-z]+-[a-z]+)\?", row.question)
        assert asked is not None
        assert row.answers == (dict(record)[asked[1]],)
        assert 1 <= int(row.answers[0]) <= 50_000


def test_word_lists_repeat_nothing() -> None:
    for words in (lines.ADJECTIVES, lines.NOUNS, needle.CITIES):
        assert len(set(words)) == len(words)


def test_docs_ask_for_open_answers_about_real_documentation(datasets: dict[str, Dataset]) -> None:
    rows = datasets["docs"].rows
    assert len({row.question for row in rows}) > 3
    for row in rows:
        assert row.answers == ()
        assert row.max_new_tokens == 128
        first_line = row.context.splitlines()[0]
        assert any(first_line in topic for topic in topics.values())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A standard library's folder, to be filled by the test."""
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    code._source_files.cache_clear()
    yield tmp_path
    code._source_files.cache_clear()


def test_code_continues_a_file_of_the_library_by_its_next_line(
    library: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(name: str) -> str:
        return "".join(f"    {name}_value_{i} = compute({i})\n    )\n" for i in range(300))

    (library / "site-packages").mkdir()
    for folder in ("json", "json/tests", "site-packages/torch"):
        (library / folder).mkdir(parents=True, exist_ok=True)
    taken, left = (
        ("ast.py", "json/decoder.py"),
        ("json/tests/x.py", "site-packages/torch/y.py", "sitecustomize.py"),
    )
    for path in (*taken, *left):
        (library / path).write_text(source(Path(path).stem))
    (library / "abc.py").write_text("a_short_file = True\n")
    monkeypatch.setattr(generator, "ROWS", 8)
    rows = load_dataset("code", tokenizer=tokenizer, tokens=1000).rows
    origins = set()
    for row in rows:
        assert not row.use_chat_template
        assert row.messages[0].content == row.context
        (answer,) = row.answers
        assert answer.endswith(")")
        origin = answer.split("_")[0].strip()
        origins.add(origin)
        last_lines = "\n".join(row.context.splitlines()[-3:])
        assert f"{last_lines}\n{answer}\n" in source(origin)
    assert origins == {"ast", "decoder"}


@pytest.mark.parametrize("tokens", [0, -1, 255, 131_073])
def test_lengths_out_of_range_are_refused(tokens: int, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"--tokens is .* must be 256 to 131072"):
        load_dataset("needle", tokenizer=tokenizer, tokens=tokens)


def test_a_template_that_leaves_no_room_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    wordy = byte_level("{{ 'blah ' * 500 }}{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="No needle prompt fits in 300 tokens"):
        load_dataset("needle", tokenizer=wordy, tokens=300)


def test_an_installation_without_sources_is_named(library: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=f"own source files, and {library} has none"):
        load_dataset("code", tokenizer=tokenizer, tokens=300)


@pytest.mark.real_model
def test_the_built_in_model_finds_the_needle(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = real_model
    generate: Any = model.generate
    rows = load_dataset("needle", tokenizer=tokenizer, tokens=1000).rows[:3]
    right = 0
    for row in rows:
        prompt = build_prompt(row, tokenizer, max_tokens=1000)
        input_ids = torch.tensor([prompt.input_ids])
        output = generate(input_ids, max_new_tokens=row.max_new_tokens, do_sample=False)
        right += row.answers[0] in tokenizer.decode(output[0, input_ids.shape[1] :])
    assert right >= 2


@pytest.mark.real_model
def test_prompts_of_the_built_in_model_have_the_default_length(
    real_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    tokenizer = real_model[1]
    for name in GENERATORS:
        for row in load_dataset(name, tokenizer=tokenizer).rows:
            assert 1940 <= len(build_prompt(row, tokenizer, max_tokens=EVERYTHING).input_ids) <= 2000
