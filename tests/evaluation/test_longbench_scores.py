import pytest

from clusterprof.data import Message, Row
from clusterprof.data.longbench_tasks import LONGBENCH_TASKS
from clusterprof.errors import DataError
from clusterprof.evaluation.longbench_scores import GROUP_OF_TASK, GROUPS, check_rows, score

# The published protocol: which metric a task takes, and which read the first line only.
QA = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"]
SUMMARIES = ["gov_report", "qmsum", "multi_news", "samsum"]
CODE = ["lcc", "repobench-p"]
NUMBERS = {"passage_count": "7", "passage_retrieval_en": "Paragraph 7"}
FIRST_LINE = {"trec", "triviaqa", "samsum"}


def test_every_task_has_a_group() -> None:
    assert set(GROUP_OF_TASK) == set(LONGBENCH_TASKS)
    assert [len(tasks) for tasks in GROUPS.values()] == [3, 3, 3, 3, 2, 2]
    assert GROUP_OF_TASK["musique"] == "Multi-Document QA"
    assert GROUP_OF_TASK["samsum"] == "Few-shot Learning"
    assert GROUP_OF_TASK["lcc"] == "Code"


@pytest.mark.parametrize("task", QA)
def test_answers_to_questions_are_scored_by_token_f1(task: str) -> None:
    # Order, case, articles and punctuation do not matter: 2 words of 3 and 2.
    assert score(task, "the Bob Dylan, singer", ["dylan bob"]) == pytest.approx(80)


@pytest.mark.parametrize("task", SUMMARIES)
def test_summaries_are_scored_by_rouge_l(task: str) -> None:
    # Order and case matter: of these two and three words one is in order.
    assert score(task, "Dylan bob singer", ["bob Dylan"]) == pytest.approx(40, abs=1e-5)
    assert score(task, "", ["bob Dylan"]) == 0


@pytest.mark.parametrize("task", CODE)
def test_code_is_scored_by_the_similarity_of_its_first_line(task: str) -> None:
    assert score(task, "```\nab\ncd", ["ac"]) == 50


@pytest.mark.parametrize(("task", "answer"), NUMBERS.items())
def test_numbers_are_scored_by_their_share(task: str, answer: str) -> None:
    assert score(task, "Paragraph 7 of 30", [answer]) == 50
    assert score(task, "seven", [answer]) == 0


def test_trec_is_scored_by_the_classes_it_names() -> None:
    classes = ["Individual", "Reason", "City"]
    assert score("trec", " Individual", ["Individual"], classes) == 100
    assert score("trec", "Individual, Reason", ["Individual"], classes) == 50
    assert score("trec", "Date", ["Individual"], classes) == 0


@pytest.mark.parametrize("task", LONGBENCH_TASKS)
def test_the_best_answer_counts_and_only_few_shot_answers_end_with_their_line(task: str) -> None:
    answer = NUMBERS.get(task, "Reason")
    wrong = NUMBERS.get(task, "City").replace("7", "8")
    classes = ("Reason", "City") if task == "trec" else ()
    best = score(task, answer, [wrong, answer], classes)
    assert best == pytest.approx(100, abs=1e-5)
    assert score(task, answer, [wrong], classes) < 100
    # Leading line breaks go; a second line is read unless the task or, for code, the metric stops there.
    continued = score(task, f"\n{answer}\n{wrong}", [answer], classes)
    if task in FIRST_LINE or task in CODE:
        assert continued == pytest.approx(100, abs=1e-5)
    else:
        assert 0 < continued < 90


def row_of(answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> Row:
    return Row("r7", (Message("user", "where?"),), answers=answers, all_classes=classes)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("qasper", row_of(()), "Row 'r7' of qasper has no answers to score against; leave it out."),
        ("trec", row_of(("Reason",)), "Row 'r7' of trec has no 'all_classes'; take LongBench's own rows"),
        (
            "passage_retrieval_en",
            row_of(("Paragraph 7", "Section 7")),
            "Row 'r7' .* has the answer 'Section 7'; it has to be like 'Paragraph 7'",
        ),
    ],
)
def test_rows_that_cannot_be_scored(task: str, row: Row, message: str) -> None:
    fine = row_of((NUMBERS.get(task, "Reason"),), ("Reason", "City"))
    check_rows(task, [fine])
    with pytest.raises(DataError, match=message):
        check_rows(task, [fine, row])
