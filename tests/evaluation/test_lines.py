import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from clusterprof.errors import DataError
from clusterprof.evaluation.generation import score_lines
from clusterprof.evaluation.lines import generated_lines, lines_of_files, load_longeval
from clusterprof.evaluation.tasks import TaskMaker
from tests.data.tokenizers import byte_level
from tests.tiny import tiny_llama

TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(max_position_embeddings=4096)


@pytest.fixture
def maker(model: PreTrainedModel) -> TaskMaker:
    return TaskMaker(model, TOKENIZER)


def test_generated_prompts_have_the_lengths_asked_for(maker: TaskMaker) -> None:
    made = generated_lines(maker, tokens=[400, 900], samples=3, seed=0)
    assert [task.labels for task in made] == [{"tokens": 400}] * 3 + [{"tokens": 900}] * 3
    for task in made:
        wanted = task.labels["tokens"]
        assert isinstance(wanted, int)
        assert 0.97 * wanted <= len(task.prompt.input_ids) <= wanted
        asked = re.search(r"in line ([a-z-]+)\?", task.row.question)
        assert asked is not None
        (number,) = re.findall(rf"line {asked[1]}: REGISTER_CONTENT is <(\d+)>", task.row.context)
        assert score_lines(task, f"The number is <{number}>.") == {"accuracy": 1}
    assert len({task.prompt.input_ids for task in made}) == 6


def test_the_seed_decides(maker: TaskMaker) -> None:
    first, again, other = (
        {task.prompt.input_ids for task in generated_lines(maker, tokens=[400], samples=2, seed=seed)}
        for seed in (0, 0, 1)
    )
    assert first == again
    assert not first & other


def test_there_are_forty_at_most(maker: TaskMaker) -> None:
    assert len(generated_lines(maker, tokens=[400], samples=1000, seed=0)) == 40


def test_a_length_out_of_range_is_refused(maker: TaskMaker) -> None:
    with pytest.raises(DataError, match="--tokens is 200000"):
        generated_lines(maker, tokens=[200_000], samples=1, seed=0)


def longeval(number: int, lines: int = 4) -> dict[str, Any]:
    """A row as LongEval writes it, with a file's other fields."""
    names = [f"brave-lake{number}-{line}" for line in range(lines)]
    record = "\n".join(f"line {name}: REGISTER_CONTENT is <{number + at}>" for at, name in enumerate(names))
    return {
        "random_idx": [names[1], 1],
        "expected_number": number + 1,
        "num_lines": lines,
        "token_size": 4803,
        "correct_line": f"line {names[1]}: REGISTER_CONTENT is <{number + 1}>\n",
        "prompt": f"Below is a record of lines.\n\n{record}\n\nWhat is in line {names[1]}? I need the number. ",
        "prompt_length": -1,
    }


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_longevals_own_files(maker: TaskMaker, tmp_path: Path) -> None:
    few = load_longeval(write(tmp_path / "4_lines.jsonl", longeval(100), longeval(200)))
    many = load_longeval(write(tmp_path / "9_lines.jsonl", *(longeval(n, 9) for n in (300, 400, 500))))
    made = lines_of_files(maker, [few, many], samples=2, seed=0)
    assert [task.labels for task in made] == [{"lines": 4}] * 2 + [{"lines": 9}] * 2
    assert {task.references for task in made[:2]} == {("101",), ("201",)}
    for task in made:
        assert (task.dataset, task.max_new_tokens) == ("lines", 32)
        assert task.row.messages[0].content in TOKENIZER.decode(list(task.prompt.input_ids))
        assert score_lines(task, f"It is <{task.references[0]}>.") == {"accuracy": 1}
        assert score_lines(task, "It is <7>.") == {"accuracy": 0}
    assert len({task.prompt.id for task in made}) == 4
    # A larger draw contains the smaller.
    fewer = lines_of_files(maker, [many], samples=1, seed=0)
    assert fewer[0] in made
    assert len(lines_of_files(maker, [few, many], samples=50, seed=0)) == 5


def test_lines_that_are_too_long_can_be_left_out(tmp_path: Path) -> None:
    maker = TaskMaker(tiny_llama(max_position_embeddings=512), TOKENIZER, whole=True)
    found = load_longeval(write(tmp_path / "l.jsonl", longeval(100), longeval(200, 60)))
    assert [task.labels for task in lines_of_files(maker, [found], samples=9, seed=0)] == [{"lines": 4}]
    assert maker.left_out.total() == 1


def test_a_file_may_have_a_mark_blank_lines_and_repeated_rows(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    line = json.dumps(longeval(100))
    path.write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    dataset, lines = load_longeval(path)
    assert [row.answers for row in dataset.rows] == [("101",)]
    assert dataset.duplicates == 1
    assert list(lines.values()) == [4]


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in longeval(100).items() if name != field}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (without("prompt"), "field 'prompt' is missing"),
        (longeval(1) | {"prompt": 7}, "field 'prompt' is the number 7"),
        (
            without("expected_number"),
            "field 'expected_number' must be a whole number from 0 to 1,000,000,000",
        ),
        *(
            (longeval(1) | {field: value}, f"field '{field}' must be a whole number from 0 to")
            for field in ("expected_number", "num_lines")
            for value in ("5", 1.5, True, None, [1], -1, 10**30)
        ),
    ],
)
def test_a_bad_field_is_named_with_its_line(bad: dict[str, Any] | str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", longeval(100), bad, longeval(200))
    with pytest.raises(DataError) as caught:
        load_longeval(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        load_longeval(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="holds no rows"):
        load_longeval(write(tmp_path / "empty.jsonl"))
