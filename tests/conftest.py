"""Fixtures that are shared by all tests."""

import signal

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.models import load_model

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The built-in model, from the user's cache; built there if it is not."""
    return load_model("builtin")
