"""Owns which prefix positions each selection method keeps for one head, worked out with plain loops.

Scores are exact fractions, so nothing here rounds. A float32 implementation gives the same positions
when every importance is a multiple of 1/1024 in [0, 1] and the prefix is shorter than 16,384 tokens:
all sums are then exact in float32, two different means over at most 63 tokens are at least
1 / (63 * 62 * 1024) apart, several float32 steps, and equal means over different counts (windows are
cut short at the edges) stay equal. That needs a single rounding, so divide the sum by the count:
multiplying by a reciprocal, or weighting before adding, may break ties or make new ones. A theta that
equals an importance is safe only if it is a multiple of 1/1024 too.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal


def select_clusterattn(
    importance: Sequence[float],
    budget: int,
    num_block: int,
    theta: float,
    gap_pool: int = 15,
    gap_pooling: Literal["avg", "max"] = "avg",
) -> list[int]:
    """Keep clusters of tokens around the important centres, as the paper's Algorithm 1 is read here.

    Parameters
    ----------
    importance
        P of one head over the prefix, `L_pre` values.
    budget
        `L_cp`, the number of prefix positions to keep, at least 1.
    num_block
        Divides the budget into the block length that centres are searched with, at least 1.
    theta
        Centres with a lower importance are dropped, and with a theta of 1 all are.
    gap_pool
        Odd number of tokens that the importance is pooled over to fill what the clusters leave.
    gap_pooling
        `"avg"` or `"max"` of them.

    Returns
    -------
    list[int]
        Exactly `min(budget, L_pre)` positions, ascending.
    """
    prefix_length = len(importance)
    if budget >= prefix_length:
        return list(range(prefix_length))

    centres = []
    block = max(1, budget // num_block)
    for start in range(0, prefix_length, block):
        centre = start
        for position in range(start, min(start + block, prefix_length)):
            if importance[position] > importance[centre]:
                centre = position
        if importance[centre] >= theta and theta < 1:
            centres.append(centre)

    width = max(1, budget // max(1, len(centres)))
    covered: set[int] = set()
    for centre in centres:
        first = centre - (width - 1) // 2
        for position in range(first, first + width):
            if 0 <= position < prefix_length:
                covered.add(position)

    if len(covered) >= budget:
        return sorted(_highest(covered, [Fraction(value) for value in importance], budget))
    pooled = []
    for t in range(prefix_length):
        around = _inside(importance, t - (gap_pool - 1) // 2, t + gap_pool // 2)
        pooled.append(Fraction(max(around)) if gap_pooling == "max" else _mean(around))
    uncovered = [position for position in range(prefix_length) if position not in covered]
    return sorted([*covered, *_highest(uncovered, pooled, budget - len(covered))])


def select_snapkv(
    importance: Sequence[float], budget: int, kernel_size: int, pooling: Literal["avg", "max"]
) -> list[int]:
    """Keep the positions with the highest importance after 1-D pooling with stride 1.

    Parameters
    ----------
    importance
        P of one head over the prefix, `L_pre` values.
    budget
        Number of prefix positions to keep.
    kernel_size
        Odd number of tokens pooled, centred on each position; only tokens that exist are counted.
    pooling
        `"avg"` or `"max"`.

    Returns
    -------
    list[int]
        Exactly `min(budget, L_pre)` positions, ascending.
    """
    half = kernel_size // 2
    scores = []
    for position in range(len(importance)):
        neighbours = _inside(importance, position - half, position + half)
        scores.append(_mean(neighbours) if pooling == "avg" else Fraction(max(neighbours)))
    return sorted(_highest(range(len(scores)), scores, budget))


def select_topk(importance: Sequence[float], budget: int) -> list[int]:
    """Keep the `min(budget, L_pre)` positions with the highest importance, ascending."""
    scores = [Fraction(value) for value in importance]
    return sorted(_highest(range(len(scores)), scores, budget))


def select_streaming_llm(length: int, budget: int, initial_tokens: int) -> list[int]:
    """Keep the first `initial_tokens` (never more than `budget`) of `length` positions and the latest."""
    if budget >= length:
        return list(range(length))
    initial = min(initial_tokens, budget)
    recent = budget - initial
    return [*range(initial), *range(length - recent, length)]


def select_h2o(accumulated: Sequence[float], budget: int, window: int, recent_share: float) -> list[int]:
    """Keep the latest tokens and, of those before them, the ones with the highest accumulated attention.

    Parameters
    ----------
    accumulated
        Attention that each of `L_pre` prefix tokens got from all queries.
    budget
        Number of prefix positions to keep.
    window
        Tokens after the prefix, all of them kept; they count as recent.
    recent_share
        Share of `budget + window` tokens that are to be recent.

    Returns
    -------
    list[int]
        Exactly `min(budget, L_pre)` positions of the prefix, ascending.
    """
    prefix_length = len(accumulated)
    recent = round((budget + window) * recent_share)
    kept: list[int] = []
    for position in reversed(range(prefix_length + window)):
        if recent == 0:
            break
        recent -= 1
        if position < prefix_length and len(kept) < budget:
            kept.append(position)
    older = [position for position in range(prefix_length) if position not in kept]
    scores = [Fraction(value) for value in accumulated]
    return sorted([*kept, *_highest(older, scores, budget - len(kept))])


def select_ngram(importance: Sequence[float], word_starts: Sequence[bool], budget: int, n: int) -> list[int]:
    """Keep the words of the most important tokens together with their neighbours.

    Parameters
    ----------
    importance
        P of one head over the prefix, `L_pre` values.
    word_starts
        Whether a word begins with a token; the first token begins one in any case.
    budget
        Number of prefix positions to keep.
    n
        A word brings along `(n - 1) // 2` words before it and `n // 2` after it.

    Returns
    -------
    list[int]
        Exactly `min(budget, L_pre)` positions, ascending; of the last words maybe only the first tokens.
    """
    words: list[list[int]] = []
    for position, starts in enumerate(word_starts):
        if starts or not words:
            words.append([])
        words[-1].append(position)
    priority = [Fraction(0) for _ in importance]
    for index, word in enumerate(words):
        score = max(Fraction(importance[position]) for position in word)
        for together in words[max(0, index - (n - 1) // 2) : index + n // 2 + 1]:
            for position in together:
                priority[position] = max(priority[position], score)
    return sorted(_highest(range(len(priority)), priority, budget))


def select_clusters(importance: Sequence[float], budget: int, labels: Sequence[int]) -> list[int]:
    """Keep whole clusters, by mean importance, until one does not fit; then the most important other tokens.

    Parameters
    ----------
    importance
        P of one head over the prefix, `L_pre` values.
    budget
        Number of prefix positions to keep.
    labels
        The cluster of each token; below zero it is in none.

    Returns
    -------
    list[int]
        Exactly `min(budget, L_pre)` positions, ascending. Of clusters with equal means the earlier comes first.
    """
    clusters: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        if label >= 0:
            clusters.setdefault(label, []).append(position)
    kept: list[int] = []
    # The dictionary is in the order of first tokens, and the sort is stable.
    for cluster in sorted(clusters.values(), key=lambda tokens: -_mean([importance[t] for t in tokens])):
        if len(kept) + len(cluster) > budget:
            break
        kept += cluster
    others = [position for position in range(len(importance)) if position not in kept]
    return sorted([*kept, *_highest(others, [Fraction(value) for value in importance], budget - len(kept))])


def _highest(positions: Iterable[int], scores: Sequence[Fraction], count: int) -> list[int]:
    return sorted(positions, key=lambda position: (-scores[position], position))[:count]


def _inside(values: Sequence[float], first: int, last: int) -> list[float]:
    return [values[position] for position in range(first, last + 1) if 0 <= position < len(values)]


def _mean(values: Sequence[float]) -> Fraction:
    total = Fraction(0)
    for value in values:
        total += Fraction(value)
    return total / len(values)
