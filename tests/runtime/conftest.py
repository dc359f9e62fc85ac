import pydoc_data.topics

import pytest
import torch
from torch import Tensor

from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.runtime import CompressedLayer
from tests.runtime.models import MODELS
from tests.runtime.subjects import Subject, tiny_subject


def tiny_subject_of(name: str) -> Subject:
    # Without an end-of-sequence token, so that every run has the length it was asked for.
    return tiny_subject(MODELS[name](eos_token_id=None))


@pytest.fixture(params=MODELS)
def tiny(request: pytest.FixtureRequest) -> Subject:
    """Every model of the matrix."""
    return tiny_subject_of(request.param)


@pytest.fixture(params=[*MODELS, pytest.param("real", marks=pytest.mark.real_model)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every model of the matrix, and the built-in one."""
    if request.param != "real":
        return tiny_subject_of(request.param)
    model, tokenizer = request.getfixturevalue("real_model")
    text = pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["with"]
    stream = torch.tensor(tokenizer(text)["input_ids"])
    compression = Compression(size=64, window=16, method=ClusterAttn(num_block=4, theta=3e-3))
    return Subject(model, stream, compression, new_tokens=6)


@pytest.fixture
def kept_sets(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Kept positions of every layer that is compressed during the test, in order."""
    seen: list[Tensor] = []
    keep = CompressedLayer.keep

    def spy(layer: CompressedLayer, positions: Tensor, end: int | None = None) -> None:
        seen.append(positions.clone())
        keep(layer, positions, end)

    monkeypatch.setattr(CompressedLayer, "keep", spy)
    return seen
