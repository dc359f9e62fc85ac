from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.evaluation.decode import answer_losses, greedy
from clusterprof.runtime.transformers_names import CACHE
from tests.profiling.subjects import generated, random_prompt
from tests.tiny import tiny_gemma3, tiny_llama

PROMPTS = torch.cat([random_prompt(30, seed) for seed in range(4)])
NEW_TOKENS = 10


@torch.no_grad()
def prefilled(model: PreTrainedModel) -> DynamicCache:
    """A stock cache of the prompts."""
    cache = DynamicCache(config=model.config)
    model(PROMPTS, **{CACHE: cache})
    return cache


def answers_of(model: PreTrainedModel, ends: set[int], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Rows of different prompts that all go on with the token 5."""
    return greedy(model, prefilled(model), 5, 4, max_new_tokens=new_tokens, end_tokens=ends)


def expected(model: PreTrainedModel, ends: set[int], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """By generate(), each prompt alone, with the 5 at its end."""
    answers = []
    for prompt in PROMPTS:
        begun = torch.cat([prompt, torch.tensor([5])])[None]
        answer = [5, *generated(model, begun, new_tokens - 1)]
        stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
        answers.append(answer[:stop])
    return answers


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_rows_are_decoded_as_if_alone(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    answers = answers_of(model, set())
    assert answers == expected(model, set())
    assert [len(answer) for answer in answers] == [NEW_TOKENS] * 4
    assert len(set(map(tuple, answers))) == 4


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_rows_leave_the_batch_one_after_the_other(build: Callable[..., PreTrainedModel]) -> None:
    model = build(eos_token_id=None)
    whole = expected(model, set())
    # The first row ends at its third token, the third at its sixth, the others when it is time.
    ends = {whole[0][2], whole[2][5]}
    answers = answers_of(model, ends)
    assert answers == expected(model, ends)
    assert len({len(answer) for answer in answers}) >= 3


def test_a_first_token_that_ends_the_answer_leaves_nothing() -> None:
    assert answers_of(tiny_llama(), {5}) == [[]] * 4


def test_one_token_needs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    cache = prefilled(model)
    monkeypatch.setattr(model, "forward", None)
    assert greedy(model, cache, 5, 4, max_new_tokens=1, end_tokens={2}) == [[5]] * 4


@torch.no_grad()
def losses_by_hand(model: PreTrainedModel, answer: Tensor) -> list[float]:
    """By the loss that the model itself computes of prompt and answer together, but for the answer's first token."""
    losses = []
    for prompt in PROMPTS:
        tokens = torch.cat([prompt, answer])[None]
        labels = tokens.clone()
        labels[:, : len(prompt) + 1] = -100
        losses.append(float(model(tokens, labels=labels).loss))
    return losses


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("length", [2, 3, 7])
@pytest.mark.parametrize("step", [1, 3, 7, 100])
def test_losses_are_the_models_own(build: Callable[..., PreTrainedModel], length: int, step: int) -> None:
    model = build()
    answer = random_prompt(length, seed=9)[0]
    found = answer_losses(model, answer, prefilled(model), 4, step=step)
    assert found == pytest.approx(losses_by_hand(model, answer), abs=1e-4)
    assert len(set(found)) == 4


def test_losses_that_are_not_finite_are_an_error() -> None:
    model = tiny_llama()
    cache = prefilled(model)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.inf
    with pytest.raises(CompressionError, match="logits are not finite"):
        answer_losses(model, random_prompt(3)[0], cache, 4, step=3)
