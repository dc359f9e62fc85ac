from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.evaluation.metrics import (
    class_match,
    contains,
    edit_similarity,
    last_number,
    lines_accuracy,
    number_share,
    rouge_1,
    rouge_l,
    token_f1,
)

texts = st.text(max_size=40)
distinct_words = st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1)


def common_subsequence(one: list[str], two: list[str]) -> int:
    """Length of the longest, by the recurrence of the textbooks."""
    lengths = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one, start=1):
        for j, other in enumerate(two, start=1):
            lengths[i][j] = (
                lengths[i - 1][j - 1] + 1 if word == other else max(lengths[i - 1][j], lengths[i][j - 1])
            )
    return lengths[-1][-1]


@given(texts, texts)
@settings(deadline=None)  # the first use of a metric imports its library
def test_every_metric_is_a_number_from_0_to_1(prediction: str, reference: str) -> None:
    values = [
        token_f1(prediction, reference),
        rouge_l(prediction, reference),
        rouge_1(prediction, reference),
        class_match(prediction, reference, (reference, prediction)),
        number_share(prediction, reference),
        edit_similarity(prediction, reference),
        lines_accuracy(prediction, reference),
        contains(prediction, [reference]),
    ]
    assert all(isinstance(value, float) and 0 <= value <= 1 for value in values)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # cat, sat, on, mat against cat, mat: precision 2/4, recall 2/2.
        ("The cat sat on the mat.", "a cat, THE mat", Fraction(2, 3)),
        ("an apple", "apple", 1),
        # A word counts as often as it is in both: precision 2/3, recall 2/2.
        ("no no no", "No; no!", Fraction(4, 5)),
        # Punctuation goes without leaving a blank, and before the articles.
        ("U.S.", "us", 1),
        ("a.n", "b", 0),
        ("The", "the", 0),
        ("", "yes", 0),
        ("theatre", "the atre", 0),
        ("5 percent points", "5 percent points.", 1),
    ],
)
def test_token_f1(prediction: str, reference: str, expected: Fraction) -> None:
    assert token_f1(prediction, reference) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # The example of the paper, Lin (2004), section 3.1: 3 of 4 words either way.
        ("police kill the gunman", "police killed the gunman", Fraction(3, 4)),
        ("the gunman kill police", "police killed the gunman", Fraction(1, 2)),
        # Of section 3.2: the union over the prediction's sentences is w1 w2 w3 w5, 4 of 5 expected words;
        # the prediction has 8 different ones.
        ("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", Fraction(8, 13)),
        # Different words count once: 2 of 2 either way.
        ("to be to be", "to be", 1),
        ("Police", "police", 0),
    ],
)
def test_rouge_l(prediction: str, reference: str, expected: Fraction) -> None:
    assert rouge_l(prediction, reference) == pytest.approx(float(expected), abs=1e-7)


@given(distinct_words, distinct_words)
def test_rouge_l_of_one_sentence_is_its_longest_common_subsequence(
    predicted: list[str], expected: list[str]
) -> None:
    common = common_subsequence(predicted, expected)
    value = rouge_l(" ".join(predicted), " ".join(expected))
    assert value == pytest.approx(2 * common / (len(predicted) + len(expected)), abs=1e-7)


@pytest.mark.parametrize("text", ["", " ", ".", "...", "\n"])
def test_rouge_l_without_a_sentence_is_0(text: str) -> None:
    assert rouge_l(text, "something") == 0
    assert rouge_l("something", text) == 0


def test_rouge_l_of_summaries_as_long_as_they_get() -> None:
    words = [f"w{i}" for i in range(600)]
    report = ". ".join(" ".join(words[i : i + 30]) for i in range(0, 600, 30))
    # 512 words without a full stop, 300 of them of the report, in its order.
    summary = " ".join(words[:300] + [f"other{i}" for i in range(212)])
    assert rouge_l(summary, report) == pytest.approx(2 * 300 / (512 + 600), abs=1e-7)


def test_rouge_l_of_sentences_past_the_recursion_limit_is_0() -> None:
    sentence = " ".join(f"w{i}" for i in range(1200))
    assert rouge_l(sentence, sentence) == 0


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # Stems: eat, sandwich, in, park against eat, a, sandwich, and, sit, in, dolor, park.
        ("Eating sandwiches in parks", "eat a sandwich and sit in Dolores Park", Fraction(2 * 4, 4 + 8)),
        ("the the the", "the", Fraction(1, 2)),
        ("", "the", 0),
    ],
)
def test_rouge_1(prediction: str, reference: str, expected: Fraction) -> None:
    assert rouge_1(prediction, reference) == pytest.approx(float(expected))


CLASSES = ("Number", "Other number", "Animal", "Number of something")


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Animal", "Animal", 1.0),
        (" Type: Animal, I think", "Animal", 1.0),
        ("Animal or Other number", "Animal", 0.5),
        ("animal", "Animal", 0.0),
        # "Number" is named by naming the answer, and is not held against it.
        ("Number of something", "Number of something", 1.0),
        # The other way round, a longer class was named as well.
        ("Number of something", "Number", 0.5),
        ("Animal Number of something Other number", "Number of something", 1 / 3),
        ("Mineral", "Mineral", 0.0),
        ("", "Animal", 0.0),
    ],
)
def test_class_match(prediction: str, answer: str, expected: float) -> None:
    assert class_match(prediction, answer, CLASSES) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("19", 1.0),
        ("There are 19 of 30 paragraphs.", 0.5),
        ("19, 19 and 7", 2 / 3),
        ("Paragraph 191", 0.0),
        ("019", 0.0),
        ("nineteen", 0.0),
        ("", 0.0),
    ],
)
def test_number_share(prediction: str, expected: float) -> None:
    assert number_share(prediction, "19") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("return a", 1.0),
        ("\n\nreturn a\nreturn b", 1.0),
        ("```python\n# first\nx = 1  # here\n// and\nreturn a", 1.0),
        # Four characters are others, four out and four in of 8 + 8: 1 - 8/16.
        ("retuwxyz", 0.5),
        # One character is another: 1 - 2/16 = 0.875, and a half goes to the even hundredth.
        ("return b", 0.88),
        # One character is missing: 1 - 1/15 = 0.9333.
        ("return ", 0.93),
        # An empty line after a comment is the first line.
        ("# first\n\nreturn a", 0.0),
        ("# nothing else", 0.0),
        ("", 0.0),
    ],
)
def test_edit_similarity(prediction: str, expected: float) -> None:
    assert edit_similarity(prediction, "return a") == expected


@given(st.text("ab", max_size=9), st.text("ab", min_size=1, max_size=9))
def test_edit_similarity_by_the_longest_common_subsequence(code: str, reference: str) -> None:
    # What is in neither text's common subsequence has to be taken out or put in.
    kept = common_subsequence(list(code), list(reference))
    percent = Fraction(200 * kept, len(code) + len(reference))
    assert edit_similarity(code, reference) == pytest.approx(round(percent) / 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The content is <2416>.", "2416"),
        ("line 3: 41, no: 2416", "2416"),
        ("2,416", "416"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("<2416>", 1),
        ("not 17 but 2416", 1),
        ("2416, and line 17", 0),
        ("12416", 0),
        ("24161", 0),
        ("9" * 5000, 0),
        ("", 0),
    ],
)
def test_lines_accuracy(prediction: str, expected: int) -> None:
    assert lines_accuracy(prediction, "2416") == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("It is 2416.", ["2416"], 1),
        ("It is 12416.", ["2416"], 0),
        ("It is 24161.", ["2416"], 0),
        ("12416, or 2416", ["2416"], 1),
        ("No2416b", ["2416"], 1),
        ("It is 48,213.", ["48213"], 1),
        ("It is 48213.", ["48,213"], 1),
        ("4,821,333, of course", ["4821333"], 1),
        ("148213", ["48213"], 0),
        ("148,213", ["48213"], 0),
        ("1,48,213", ["48213"], 0),
        ("48,2134", ["48213"], 0),
        ("48,213,000", ["48213"], 0),
        ("482,13", ["48213"], 0),
        ("48,213", ["213"], 0),
        ("12345,678", ["12345"], 1),
        ("Room 125", ["room 12"], 0),
        ("Room 12.", ["room 12"], 1),
        ("Eat a SANDWICH\n  in Dolores park", ["eat a sandwich in\tDolores Park"], 1),
        ("in der Straße", ["STRASSE"], 1),
        ("a sandwich", ["an apple", "a sandwich"], 1),
        ("3.5", ["3+5"], 0),
        ("anything", ["", " "], 0),
        ("anything", [], 0),
        ("", ["a"], 0),
    ],
)
def test_contains(prediction: str, answers: list[str], expected: int) -> None:
    assert contains(prediction, answers) == expected
