"""Capture, replay and search on the built-in model and real text."""

import pydoc_data.topics

import optuna
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.replay import replay
from clusterprof.profiling.search import search
from clusterprof.profiling.spaces import search_space
from clusterprof.runtime.selection import kept_positions
from tests.profiling.subjects import generated
from tests.profiling.test_replay import assert_equal_trials
from tests.reference.naive_trial import naive_trial

pytestmark = pytest.mark.real_model

TOKENS, STEPS = 600, 16
COMPRESSION = Compression(size=128, window=32, method=ClusterAttn.paper_default(128))
RealModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def prompt(real_model: RealModel) -> Tensor:
    text = pydoc_data.topics.topics["with"] + "\n\nIn short, the with statement"
    ids: list[int] = real_model[1](text)["input_ids"]
    assert len(ids) > TOKENS
    return torch.tensor([ids[-TOKENS:]])


@pytest.fixture(scope="module")
def found(real_model: RealModel, prompt: Tensor) -> Capture:
    model, tokenizer = real_model
    return capture_prompt(
        model, prompt, window=32, decode_tokens=STEPS, end_tokens={int(tokenizer.eos_token_id)}
    )


def test_capture_follows_the_models_own_answer(real_model: RealModel, prompt: Tensor, found: Capture) -> None:
    assert found.tokens[:6].tolist() == generated(real_model[0], prompt, 6)


def test_replay_equals_a_naive_trial_on_every_layer_head_and_step(
    real_model: RealModel, prompt: Tensor, found: Capture
) -> None:
    model, _ = real_model
    kept = kept_positions(COMPRESSION.method, found.observation, COMPRESSION.size)
    result = replay(model, found, kept)
    assert result.cosine.shape == (30, 9, STEPS)
    # Compression at this size changes the answer, so there is something to get wrong.
    assert float(result.kl.max()) > 0.01
    assert_equal_trials(result, naive_trial(model, prompt, found.tokens[:-1].tolist(), kept))


def test_keeping_everything_changes_nothing(real_model: RealModel, found: Capture) -> None:
    result = replay(real_model[0], found, torch.arange(TOKENS).expand(30, 3, -1))
    assert float(result.cosine.min()) > 1 - 1e-4
    assert float(result.cosine_padded.min()) > 1 - 1e-4
    assert float(result.attention_output.min()) > 1 - 1e-4
    assert float(result.kl.abs().max()) < 1e-4
    assert bool((result.agreement == 1).all())


def test_search_finds_at_least_the_paper_default(real_model: RealModel, found: Capture) -> None:
    evaluator = Evaluator(real_model[0], [found])
    study = optuna.create_study(direction="maximize")
    space = search_space("clusterattn", [found], 128, 32, "cosine")
    assert space.compression(space.first) == COMPRESSION
    search(
        study,
        evaluator,
        space,
        sampler="tpe",
        objective="cosine",
        trials=5,
        timeout=None,
        seed=0,
        on_round=lambda trials: None,
        on_interrupt=lambda: None,
    )
    assert study.trials[0].params["num_block"] == 8
    (default,) = evaluator.scores(COMPRESSION)
    assert study.best_value >= default.cosine
    assert evaluator.replays <= 5
