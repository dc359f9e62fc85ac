"""A method that selects other positions than before must say so: by its version, studies tell old trials apart."""

import hashlib

import pytest
import torch

from clusterprof.methods import METHODS, Observation, default_method

# By method and version. The clusterings of scikit-learn are left out: theirs is another library's rounding.
SELECTIONS = {
    "clusterattn": (2, "ac972696b234"),
    "snapkv": (1, "22c2ab0e6a65"),
    "topk": (1, "ec9d454aa6d2"),
    "streaming_llm": (1, "9a6090f1dc85"),
    "h2o": (1, "9fd7ec380ac8"),
    "ngram": (1, "57c691587b43"),
}


def observation() -> Observation:
    """Few peaks among many zeros, in whole numbers, so that every sum is exact wherever it is computed."""
    state, numbers = 12345, []
    for _ in range(2 * 2 * 2 * 150):
        state = (1103515245 * state + 12345) % 2**31
        height = (state >> 16) % 97
        numbers.append(height**3 if (state >> 24) % 5 == 0 else 0)
    importance, accumulated = torch.tensor(numbers, dtype=torch.float32).view(2, 2, 2, 150)
    return Observation(
        importance / 2**26,
        window=10,
        accumulated=accumulated,
        word_starts=(torch.arange(150) % 4 < 2).expand(2, -1),
    )


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"kmeans", "dbscan"}))
def test_a_selection_changes_only_with_the_version(name: str) -> None:
    positions = default_method(name, 60).select(observation(), 50)
    digest = hashlib.sha256(str(positions.tolist()).encode()).hexdigest()[:12]
    assert (METHODS[name].version, digest) == SELECTIONS[name]


@pytest.mark.parametrize("name", METHODS)
def test_versions_are_whole_numbers(name: str) -> None:
    assert isinstance(METHODS[name].version, int)
    assert "version" not in METHODS[name].model_fields
