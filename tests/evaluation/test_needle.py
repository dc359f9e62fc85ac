from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
from transformers import PreTrainedModel

from clusterprof.data.builtin.prose import sentences, split_sentences
from clusterprof.errors import DataError
from clusterprof.evaluation.generation import score_needle
from clusterprof.evaluation.needle import needle_tasks
from clusterprof.evaluation.tasks import Task, TaskMaker
from tests.data.tokenizers import byte_level
from tests.tiny import tiny_llama, tiny_tokenizer

TOKENIZER = byte_level()
LENGTHS, DEPTHS = (600, 2000), 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(max_position_embeddings=4096)


def make(
    model: PreTrainedModel,
    tokens: tuple[int, ...] = LENGTHS,
    depths: int = DEPTHS,
    samples: int = 3,
    seed: int = 0,
    haystack: str | None = None,
) -> list[Task]:
    maker = TaskMaker(model, TOKENIZER)
    return needle_tasks(maker, tokens=tokens, depths=depths, samples=samples, seed=seed, haystack=haystack)


@pytest.fixture(scope="module")
def tasks(model: PreTrainedModel) -> list[Task]:
    return make(model)


def parts(task: Task) -> tuple[str, str]:
    """The haystack before the needle, and behind it."""
    before, _, behind = task.row.context.partition(task.references[0])
    return before.strip(), behind.strip()


def test_every_length_at_every_depth(tasks: list[Task]) -> None:
    cells = [(task.labels["tokens"], task.labels["depth"]) for task in tasks]
    assert cells == [cell for cell in product(LENGTHS, (0.0, 0.25, 0.5, 0.75, 1.0)) for _ in range(3)]
    assert {task.dataset for task in tasks} == {"needle"}
    assert {task.max_new_tokens for task in tasks} == {32}


def test_every_kind_of_needle_in_every_cell(tasks: list[Task]) -> None:
    cells: dict[tuple[object, ...], set[object]] = {}
    for task in tasks:
        cells.setdefault((task.labels["tokens"], task.labels["depth"]), set()).add(task.labels["needle"])
    assert list(cells.values()) == [{"number", "activity", "departure"}] * 10


def test_the_needle_is_there_once_and_its_question_comes_last(tasks: list[Task]) -> None:
    for task in tasks:
        (statement,) = task.references
        (answer,) = task.row.answers
        assert task.row.context.count(statement) == 1
        assert statement.count(answer) == task.row.context.count(answer) == 1
        assert answer not in task.row.question
        assert task.row.messages[0].content == f"{task.row.context}\n\n{task.row.question}"
        text = TOKENIZER.decode(list(task.prompt.input_ids))
        assert task.row.messages[0].content in text
        assert task.prompt.query_length is not None
        question = TOKENIZER.decode(list(task.prompt.input_ids[-task.prompt.query_length :]))
        assert str(question).lstrip().startswith(task.row.question)


def test_the_hidden_sentence_is_the_best_answer(tasks: list[Task]) -> None:
    for task in tasks:
        assert score_needle(task, task.references[0]) == {"accuracy": 1, "rouge1": 1}
        before, behind = parts(task)
        assert score_needle(task, f"{before} {behind}")["accuracy"] == 0


def test_lengths_are_met_but_for_one_sentence(tasks: list[Task]) -> None:
    reference = " ".join(sentences() * 2)
    for task in tasks:
        wanted, length = task.labels["tokens"], len(task.prompt.input_ids)
        assert isinstance(wanted, int)
        assert length <= wanted
        if length < 0.97 * wanted:
            hay = " ".join(filter(None, parts(task)))
            rest = reference[reference.index(hay) + len(hay) :]
            one_more = TOKENIZER(f" {split_sentences(rest)[0]}")["input_ids"]
            assert length + len(one_more) > wanted


def test_the_needle_stands_at_its_depth(tasks: list[Task]) -> None:
    errors = []
    for task in tasks:
        before, behind = (len(split_sentences(part)) if part else 0 for part in parts(task))
        depth = task.labels["depth"]
        assert isinstance(depth, float)
        assert before == round(depth * (before + behind))
        # And counted in tokens, as far as sentences are alike.
        tokens = [len(TOKENIZER(part)["input_ids"]) for part in parts(task)]
        errors.append(abs(tokens[0] / sum(tokens) - depth))
    assert max(errors) < 0.25
    assert fmean(errors) < 0.05


def test_no_two_prompts_are_equal(tasks: list[Task]) -> None:
    assert len({task.prompt.input_ids for task in tasks}) == len(tasks)
    assert len({task.prompt.id for task in tasks}) == len(tasks)
    # Nor are many of their haystacks.
    assert len({parts(task)[0][:40] for task in tasks if parts(task)[0]}) > 0.9 * (len(tasks) - 6)


def test_the_seed_alone_decides(model: PreTrainedModel, tasks: list[Task]) -> None:
    assert make(model) == tasks
    others = {task.prompt.input_ids for task in make(model, seed=1)}
    assert not others & {task.prompt.input_ids for task in tasks}


def test_more_samples_or_lengths_leave_the_others_as_they_are(
    model: PreTrainedModel, tasks: list[Task]
) -> None:
    fewer = make(model, tokens=(600,), samples=1)
    assert len(fewer) == DEPTHS
    by_id = {task.prompt.id: task for task in tasks}
    assert all(by_id[task.prompt.id] == task for task in fewer)


def test_a_single_depth_is_the_middle(model: PreTrainedModel) -> None:
    (task,) = make(model, tokens=(600,), depths=1, samples=1)
    assert task.labels["depth"] == 0.5


TALE = " ".join(f"On day {n} the ship sailed past {n % 7} small islands in the north." for n in range(12))


def test_a_haystack_of_ones_own_begins_anew_where_it_is_too_short(model: PreTrainedModel) -> None:
    (task,) = make(model, tokens=(1500,), depths=1, samples=1, haystack=TALE)
    hay = [sentence for part in parts(task) for sentence in split_sentences(part)]
    told = split_sentences(TALE)
    start = told.index(hay[0])
    assert hay == [told[(start + place) % 12] for place in range(len(hay))]
    assert len(hay) > 24
    assert len(task.prompt.input_ids) > 0.97 * 1500 - 30


@pytest.mark.parametrize(("text", "count"), [("", 1), ("One. Two. Three.", 3), ("no end " * 5000, 1)])
def test_a_haystack_without_sentences_is_refused(text: str, count: int, model: PreTrainedModel) -> None:
    with pytest.raises(DataError, match=f"haystack has {count} sentences, and at least 10 are needed"):
        make(model, haystack=text)


def test_a_length_without_room_for_the_question_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(DataError, match=r"No needle prompt fits in 60 tokens .*; raise --tokens"):
        make(model, tokens=(60,))
    # One token per character; every kind of needle is too long then, whatever text of this Python's it is hidden in.
    with pytest.raises(DataError, match="No needle prompt fits in 200 tokens"):
        needle_tasks(
            TaskMaker(model, tiny_tokenizer()), tokens=[200], depths=3, samples=1, seed=0, haystack=None
        )


def test_lengths_beyond_the_context_are_left_out_rather_than_cut() -> None:
    maker = TaskMaker(tiny_llama(max_position_embeddings=1000), TOKENIZER, whole=True)
    made = needle_tasks(maker, tokens=LENGTHS, depths=2, samples=1, seed=0, haystack=None)
    assert {task.labels["tokens"] for task in made} == {600}
    assert maker.left_out.total() == 2


def test_the_folder_plays_no_part(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(model, tokens=(600,), samples=1)
    assert list(tmp_path.iterdir()) == []
