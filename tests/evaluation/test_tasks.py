from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from clusterprof.data import Message, Row, sample_rows
from clusterprof.data.rows import make_dataset
from clusterprof.errors import DataError
from clusterprof.evaluation.contestants import Contestant, contestants
from clusterprof.evaluation.tasks import Entrant, TaskMaker, check_questions, entrants
from clusterprof.methods import H2O, TopK
from clusterprof.models import describe_model
from clusterprof.profile import Compression
from tests.evaluation.engine import make_entrants, row
from tests.evaluation.test_contestants import saved
from tests.tiny import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its context has 100 tokens."""
    return tiny_llama(max_position_embeddings=100)


def names(found: list[Entrant]) -> list[tuple[str, int | None]]:
    return [(it.contestant.label, it.size) for it in found]


def test_everyone_enters_at_every_size_the_full_cache_once() -> None:
    found = entrants(contestants(["topk", "h2o"]), [64, 32, 64], 8)
    assert names(found) == [("full", None), ("topk", 32), ("h2o", 32), ("topk", 64), ("h2o", 64)]
    assert found[0].compression is None
    assert found[1].compression == Compression(size=32, window=8, method=TopK())


def test_a_profile_enters_at_its_size_alone_and_the_others_with_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.json", compression={"size": 48, "window": 16})
    found = entrants(contestants(["topk", str(path)]), [32], 8)
    assert names(found) == [
        ("full", None), ("topk", 32), ("topk", 48), ("clusterattn (mine)", 48),
    ]  # fmt: skip
    windows = [it.compression.window for it in found if it.compression is not None]
    assert windows == [8, 8, 16]


@pytest.mark.parametrize("size", [8, 7, 2])
def test_a_size_without_room_beside_the_window_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"Size {size} is not above the observation window of 8 tokens"):
        entrants(contestants(["topk"]), [64, size], 8)
    assert entrants(contestants([]), [size], 8)
    assert entrants(contestants(["topk"]), [size], "query")


def test_what_an_entrant_evicts(model: PreTrainedModel) -> None:
    (task,) = TaskMaker(model, tiny_tokenizer()).make("places", [row(64)])
    full, at_63, at_64 = entrants(contestants(["h2o+decode"]), [63, 64], 8)
    assert [it.evicts(task.prompt) for it in (full, at_63, at_64)] == [False, True, False]
    assert [it.evicts_decoded for it in (full, at_63, at_64)] == [False, True, True]
    # The answer has up to 8 tokens.
    entering = make_entrants(["h2o", "h2o+decode"], [40, 71, 72, 96])
    assert [it.size for it in entering if it.evicts_answer(task)] == [40, 71]
    assert [it.needs for it in (full, at_63)] == [frozenset(), {"accumulated"}]
    prompts_only = Entrant(Contestant("h2o", "", None), 63, Compression(size=63, window=8, method=H2O()))
    assert not prompts_only.evicts_decoded


def test_a_task_has_all_that_belongs_to_its_prompt(model: PreTrainedModel) -> None:
    maker = TaskMaker(model, tiny_tokenizer())
    (task,) = maker.make("places", [row(64, answers=("a", "b"))], labels={"tokens": 64})
    assert (task.dataset, task.row.id, task.prompt.id) == ("places", "row-64-0", "row-64-0")
    assert (len(task.prompt.input_ids), task.prompt.query_length) == (64, len("where?"))
    assert (task.labels, task.references, task.max_new_tokens) == ({"tokens": 64}, ("a", "b"), 8)
    (task,) = maker.make("places", [row(64)], max_new_tokens=3, references=())
    assert (task.references, task.max_new_tokens) == ((), 3)
    plain = Row("plain", (Message("user", "where is it?"),))
    (task,) = maker.make("places", [plain], max_new_tokens=None)
    assert task.max_new_tokens == 64
    assert maker.left_out == {}


def test_prompts_leave_room_for_their_answers(model: PreTrainedModel) -> None:
    maker = TaskMaker(model, tiny_tokenizer())
    rows = [row(92), row(93), row(300)]
    made = maker.make("places", rows)
    assert [len(task.prompt.input_ids) for task in made] == [92, 92, 92]
    assert [task.prompt.tokens_cut > 0 for task in made] == [False, True, True]
    whole = tiny_tokenizer()(rows[2].messages[0].content)["input_ids"]
    assert list(made[2].prompt.input_ids) == whole[:46] + whole[-46:]


def test_a_limit_of_ones_own(model: PreTrainedModel) -> None:
    maker = TaskMaker(model, tiny_tokenizer(), longest=50)
    assert [len(it.prompt.input_ids) for it in maker.make("places", [row(92), row(50), row(40)])] == [
        50,
        50,
        40,
    ]
    # The model's limit holds all the same.
    maker = TaskMaker(model, tiny_tokenizer(), longest=5000)
    assert [len(it.prompt.input_ids) for it in maker.make("places", [row(92), row(300)])] == [92, 92]


def test_prompts_that_would_be_cut_can_be_left_out(model: PreTrainedModel) -> None:
    maker = TaskMaker(model, tiny_tokenizer(), whole=True)
    assert [task.prompt.id for task in maker.make("places", [row(93), row(92)])] == ["row-92-0"]
    assert maker.make("places", [row(300)]) == []
    assert maker.left_out == {"they would have to be cut": 2}


def test_rows_that_would_be_cut_make_room_for_others(model: PreTrainedModel) -> None:
    # Every other row is too long.
    rows = [row(300 if n % 2 else 60, seed=n) for n in range(20)]
    data = make_dataset("places", "made up", "", rows)
    place = {row.id: n for n, row in enumerate(data.rows)}
    maker = TaskMaker(model, tiny_tokenizer(), whole=True)
    drawn = {
        samples: [place[task.row.id] for task in maker.draw(data, samples=samples, seed=3)]
        for samples in (1, 4, 9, 10, 15, None)
    }
    assert [len(found) for found in drawn.values()] == [1, 4, 9, 10, 10, 10]
    assert all(found == sorted(found) for found in drawn.values())
    for fewer, more in pairwise(drawn.values()):
        assert set(fewer) <= set(more)
    assert drawn[None] == list(range(0, 20, 2))
    # Where nothing is left out, the draw is that of every other command.
    everything = TaskMaker(model, tiny_tokenizer())
    for samples in (1, 7, 20):
        made = everything.draw(data, samples=samples, seed=3, labels={"n": 1}, max_new_tokens=5)
        assert tuple(task.row for task in made) == sample_rows(data, samples=samples, seed=3)
    assert (made[0].labels, made[0].max_new_tokens, made[0].dataset) == ({"n": 1}, 5, "places")
    assert made[0].content_hash == data.content_hash
    assert {place[row.id] for row in sample_rows(data, samples=4, seed=3)} - set(drawn[4])


def test_an_answer_as_long_as_the_context_is_refused(model: PreTrainedModel) -> None:
    maker = TaskMaker(model, tiny_tokenizer())
    assert maker.make("places", [row(64)], max_new_tokens=99)[0].prompt.tokens_cut == 63
    with pytest.raises(DataError, match=r"answer of 100 tokens .* context of 100; lower --decode-tokens"):
        maker.make("places", [row(64)], max_new_tokens=100)
    long = Row("plain", (Message("user", "where is it?"),), max_new_tokens=512)
    with pytest.raises(DataError, match=r"answer of 512 tokens .* use a model with a longer one"):
        maker.make("places", [long])


def test_a_model_that_names_no_context_has_no_limit(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = replace(describe_model(model), max_position_embeddings=None)
    monkeypatch.setattr("clusterprof.models.describe_model", lambda model: info)
    (task,) = TaskMaker(model, tiny_tokenizer()).make("places", [row(2000)])
    assert len(task.prompt.input_ids) == 2000


def test_an_unknown_question_is_found_before_anything_is_measured(model: PreTrainedModel) -> None:
    known, unknown = TaskMaker(model, tiny_tokenizer()).make("places", [row(64), row(60)])
    unknown = replace(unknown, prompt=replace(unknown.prompt, query_length=None))
    check_questions([known, unknown], make_entrants(["topk"], [24]))
    asking = make_entrants(["topk"], [62], window="query")
    # The one whose question is not known fits.
    check_questions([known, unknown], asking)
    asking = make_entrants(["topk"], [59], window="query")
    check_questions([known], asking)
    with pytest.raises(DataError, match="tokens of prompt 'row-60-0' are its question is not known"):
        check_questions([known, unknown], asking)
