"""Fixtures that are shared by all tests."""

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.models import load_model


@pytest.fixture(scope="session")
def real_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The built-in model, from the user's cache; built there if it is not."""
    return load_model("builtin")
