from pathlib import Path

import pytest

from clusterprof.data import Message, Row
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.data.prompts import Prompt
from clusterprof.evaluation.generation import (
    GenerationBenchmark,
    score_lines,
    score_longbench,
    score_needle,
    score_sample,
    scorer_of,
)
from clusterprof.evaluation.tasks import Task
from tests.evaluation.engine import VOCAB_SIZE, make_entrants, make_tasks, open_session, row
from tests.tiny import tiny_llama


def task(
    *answers: str,
    dataset: str = "needle",
    references: tuple[str, ...] = (),
    all_classes: tuple[str, ...] = (),
) -> Task:
    asked = Row("one", (Message("user", "?"),), answers=answers, all_classes=all_classes)
    return Task(dataset, asked, Prompt("one", (5,), None, 0), {}, references, 8)


def test_every_entrant_answers_and_is_scored(tmp_path: Path) -> None:
    session = open_session(tiny_llama(vocab_size=VOCAB_SIZE), tmp_path)
    (made,) = make_tasks(session, [row(60)])
    entering = make_entrants(["topk", "h2o+decode"], [24, 40])
    bench = GenerationBenchmark("lengths", lambda task, text: {"length": float(len(text))})
    assert all(bench.measures(made, entrant) for entrant in entering)
    measured = dict(bench.measure(session, made, entering))
    answers = dict(session.answers(made, entering))
    assert {it: result.text for it, result in measured.items()} == answers
    assert all(result.scores == {"length": len(result.text or "")} for result in measured.values())
    assert (bench.settings, measured[entering[0]].curves) == ({}, {})


STATEMENT = "The night train to Oslo leaves from platform 7 at 19:30."


@pytest.mark.parametrize(
    ("text", "accuracy", "rouge1"),
    [
        (STATEMENT, 1, 1),
        ("At 19:30.", 1, 2 * 3 / (12 + 3)),
        ("At 19:305.", 0, 2 * 2 / (12 + 3)),
        ("It does not leave.", 0, 2 * 1 / (12 + 4)),
        ("", 0, 0),
    ],
)
def test_a_needle_counts_if_the_answer_is_there(text: str, accuracy: float, rouge1: float) -> None:
    found = score_needle(task("19:30", references=(STATEMENT,)), text)
    assert found == {"accuracy": accuracy, "rouge1": pytest.approx(rouge1)}


def test_the_closest_hidden_sentence_counts() -> None:
    assert score_needle(task("x", references=("far off", "near it")), "near it")["rouge1"] == 1


@pytest.mark.parametrize(("text", "accuracy"), [("It is <241>.", 1), ("241, or 242", 0), ("none", 0)])
def test_a_line_counts_if_the_last_number_is_its_own(text: str, accuracy: float) -> None:
    assert score_lines(task("241"), text) == {"accuracy": accuracy}


def test_longbench_is_scored_by_its_task() -> None:
    assert score_longbench(task("a cat sat", "dogs", dataset="qasper"), "the dogs") == {"score": 100}
    assert score_longbench(task("a cat", dataset="qasper"), "cat food") == {
        "score": pytest.approx(100 * 2 / 3)
    }
    classes = ("date", "place")
    assert score_longbench(task("date", dataset="trec", all_classes=classes), "date or place") == {
        "score": 50
    }
    assert score_longbench(task("3", dataset="passage_count"), "3 or 4") == {"score": 50}
    # Of a few-shot task, the first line alone.
    assert score_longbench(task("a cat", dataset="triviaqa"), "cat\nQuestion: why?") == {"score": 100}


def test_a_sample_is_held_against_the_closest_reference() -> None:
    found = score_sample(task(references=("nothing alike", "a cat sat here")), "a cat sat here")
    assert found == {"rouge_l": pytest.approx(1, abs=1e-6)}
    assert score_sample(task(references=()), "text") == {}


def test_which_datasets_can_be_scored() -> None:
    assert all(scorer_of(name) is score_longbench for name in LONGBENCH_TASKS)
    assert scorer_of("lines") is score_lines
    needle, code = scorer_of("needle"), scorer_of("code")
    assert needle is not None
    assert code is not None
    # No sentence is known to hold the answer against.
    assert needle(task("731"), "It is 731.") == {"accuracy": 1}
    assert needle(task("731"), "It is 7312.") == {"accuracy": 0}
    assert code(task("x = 1", "y = 1"), "x = 1\nz = 2") == {"score": 100}
    # Two edits (insert and delete) over eight characters.
    assert code(task("return x"), "return y") == {"score": pytest.approx(88, abs=1)}
    assert scorer_of("docs") is None
    assert scorer_of("mine.jsonl") is None
