"""Metrics: how near a generated text is to an expected one, each a number from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

# A number with thousands separators, which is not a part of anything like one.
_GROUPED = re.compile(r"(?<!\d)(?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the words the two have in common, normalised as for SQuAD (Rajpurkar et al., 2016).

    Lower case, without ASCII punctuation and without the articles a, an and the; a word counts as often as
    it is in both.
    """
    predicted, expected = _words(prediction), _words(reference)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def rouge_l(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L F of the package ``rouge``, whose values LongBench publishes.

    It compares sets of words, split at blanks, sentence by sentence, and adds 1e-8 to a denominator: equal
    texts score just under 1. What it cannot compare scores 0, as in LongBench: texts without a sentence, and
    sentences of together about a thousand words, where it exceeds Python's recursion limit.
    """
    from rouge import Rouge

    try:
        scores = Rouge(metrics=["rouge-l"], stats=["f"]).get_scores(prediction, reference)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


def rouge_1(prediction: str, reference: str) -> float:
    """ROUGE-1 F of stemmed words by Google's ``rouge_score``, as Needle in a Haystack is scored."""
    return float(_rouge_1_scorer().score(reference, prediction)["rouge1"].fmeasure)


@cache
def _rouge_1_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=True)


def class_match(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """LongBench's score of a classification: 1 / (classes named in the prediction) if the answer is one.

    A class that is part of the answer's name is named along with it, and does not count. LongBench's own loop
    can miss the second such class; among trec's classes none is part of another, so it comes to the same.
    """
    named = [name for name in all_classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def number_share(prediction: str, number: str) -> float:
    """Share of the numbers in the prediction that are this one, digit by digit; 0 without any."""
    found = re.findall(r"\d+", prediction)
    return found.count(number) / len(found) if found else 0.0


def edit_similarity(prediction: str, reference: str) -> float:
    """Similarity of the first line of code to the expected line, in hundredths, as LongBench scores code.

    The line is the first after leading line breaks that holds no backquote, ``#`` or ``//``, which a fence or
    a comment would. The similarity is that of the edit distance with insertions and deletions only.
    """
    from rapidfuzz.fuzz import ratio

    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(ratio(code, reference)) / 100


def last_number(text: str) -> str | None:
    """The digits of the last whole number in a text; None without any."""
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


def lines_accuracy(prediction: str, number: str) -> float:
    """1 if the last number of the prediction is the expected one, LongEval's rule for lines; else 0."""
    return float(last_number(prediction) == number)


def contains(prediction: str, answers: Sequence[str]) -> float:
    """1 if one of the answers is in the prediction; else 0.

    Case, the kind of white space and thousands separators do not matter. Where an answer begins or ends with a
    digit, the number may not go on in the prediction: 24 is not in 1241, and 213 is not in 48,213.
    """
    text = _folded(prediction)
    return float(any(_is_in(_folded(answer), text) for answer in answers))


def _folded(text: str) -> str:
    return _GROUPED.sub(lambda number: number[0].replace(",", ""), " ".join(text.split()).casefold())


def _is_in(answer: str, text: str) -> bool:
    if not answer:
        return False
    before = r"(?<!\d)" if answer[0].isdecimal() else ""
    after = r"(?!\d)" if answer[-1].isdecimal() else ""
    return re.search(f"{before}{re.escape(answer)}{after}", text) is not None
