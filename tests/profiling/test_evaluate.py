from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.methods import ClusterAttn, SnapKV
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling import evaluate
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import Scores
from clusterprof.profiling.replay import replay, replay_all
from clusterprof.runtime.selection import kept_positions
from tests.profiling.subjects import SMALL, capture, random_prompt
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def captures(model: PreTrainedModel) -> list[Capture]:
    return [capture(model, random_prompt(length, seed=length), decode_tokens=5) for length in (60, 45)]


def candidate(num_block: int, theta: float, size: int = SMALL.size) -> Compression:
    return Compression(size=size, window=SMALL.window, method=ClusterAttn(num_block=num_block, theta=theta))


def test_scores_are_the_means_of_a_replay_per_sample(model: PreTrainedModel, captures: list[Capture]) -> None:
    found = Evaluator(model, captures).scores(SMALL)
    assert len(found) == 2
    for sample, scores in zip(captures, found, strict=True):
        result = replay(model, sample, kept_positions(SMALL.method, sample.observation, SMALL.size))
        for name in ("cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"):
            assert scores[name] == pytest.approx(float(getattr(result, name).mean()), abs=1e-6)


def test_layers_with_values_of_their_own_are_replayed_with_them(
    model: PreTrainedModel, captures: list[Capture]
) -> None:
    other = ClusterAttn(num_block=5, theta=0.1, gap_pool=3)
    mixed = SMALL.model_copy(update={"overrides": (LayerOverride(layers=(1,), method=other),)})
    evaluator = Evaluator(model, captures)
    plain = evaluator.scores(SMALL)
    assert evaluator.scores(mixed) != plain
    for sample, scores in zip(captures, evaluator.scores(mixed), strict=True):
        first, second = (kept_positions(it, sample.observation, SMALL.size) for it in (SMALL.method, other))
        result = replay(model, sample, torch.stack([first[0], second[1]]))
        assert scores.kl == pytest.approx(float(result.kl.mean()), abs=1e-6)


def test_outputs_by_layer_are_the_means_over_samples(model: PreTrainedModel, captures: list[Capture]) -> None:
    evaluator = Evaluator(model, captures)
    evaluator.scores(SMALL)
    found = evaluator.outputs_by_layer(SMALL)
    assert evaluator.replays == 2
    for layer in range(2):
        by_sample = []
        for sample in captures:
            result = replay(model, sample, kept_positions(SMALL.method, sample.observation, SMALL.size))
            by_sample.append(float(result.attention_output[layer].mean()))
        assert float(found[layer]) == pytest.approx(sum(by_sample) / 2, abs=1e-6)
    overall = sum(scores.attention_output for scores in evaluator.scores(SMALL)) / 2
    assert float(found.mean()) == pytest.approx(overall, abs=1e-6)


def test_equal_kept_sets_are_looked_up(model: PreTrainedModel, captures: list[Capture]) -> None:
    evaluator = Evaluator(model, captures)
    first = evaluator.scores(candidate(2, 1.0))
    assert evaluator.replays == 2
    # Above every importance theta leaves no centre, whatever num_block is: SnapKV.
    assert evaluator.scores(candidate(7, 0.999)) == first
    assert evaluator.scores(SMALL.model_copy(update={"method": SnapKV(kernel_size=15)})) == first
    assert evaluator.replays == 2
    evaluator.scores(candidate(2, 1.0, size=25))
    assert evaluator.replays == 4


def test_kept_sets_that_differ_in_one_layer_are_not_equal(
    model: PreTrainedModel, captures: list[Capture]
) -> None:
    # Without importance in the first layer, every theta keeps the same there.
    first = replace(captures[0].layers[0], importance=torch.zeros_like(captures[0].layers[0].importance))
    doctored = replace(captures[0], layers={**captures[0].layers, 0: first})
    evaluator = Evaluator(model, [doctored])
    assert evaluator.scores(candidate(2, 1.0)) != evaluator.scores(candidate(2, 0.02))
    assert evaluator.replays == 2


def test_samples_are_not_mixed_up(model: PreTrainedModel, captures: list[Capture]) -> None:
    # StreamingLLM-like kept sets are equal for prompts of one length, their scores are not.
    twins = [captures[0], capture(model, random_prompt(60, seed=1), decode_tokens=5)]
    scores = Evaluator(model, twins).scores(SMALL)
    assert scores[0] != scores[1]
    assert Evaluator(model, twins[1:]).scores(SMALL) == scores[1:]


def test_the_full_cache_is_perfect(model: PreTrainedModel, captures: list[Capture]) -> None:
    evaluator = Evaluator(model, captures)
    for sample, scores in zip(captures, evaluator.full_scores(), strict=True):
        everything = torch.arange(sample.prompt_length).expand(2, 2, -1)
        result = replay(model, sample, everything)
        for name in ("cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"):
            # Near nothing a logarithm takes rounding for something.
            rounding = 1e-3 if name == "log_kl" else 1e-5
            assert scores[name] == pytest.approx(float(getattr(result, name).mean()), abs=rounding)
    assert evaluator.replays == 0


def test_a_failed_replay_is_not_remembered(
    model: PreTrainedModel, captures: list[Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = Evaluator(model, captures)

    def fail(*arguments: object) -> list[CompressionError]:
        return [CompressionError("not finite")]

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "replay_all", fail)
        with pytest.raises(CompressionError, match="not finite"):
            evaluator.scores(SMALL)
    assert evaluator.scores(SMALL) == Evaluator(model, captures).scores(SMALL)


def test_what_is_new_is_replayed_together_and_in_order(
    model: PreTrainedModel, captures: list[Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, rows = Evaluator(model, captures), []

    def counted(*arguments: Any) -> Any:
        rows.append(arguments[2].shape[0])
        return replay_all(*arguments)

    monkeypatch.setattr(evaluate, "replay_all", counted)
    wide, none = candidate(2, 0.02), candidate(2, 1.0)
    (known,) = evaluator.sample_scores(1, [none])
    # Without a centre num_block has no say: the third keeps what the first does.
    found = evaluator.sample_scores(1, [none, wide, candidate(7, 0.999), candidate(3, 0.01), wide])
    assert (rows, evaluator.replays) == ([1, 2], 3)
    assert found[0] == found[2] == known
    assert found[1] == found[4]
    alone = Evaluator(model, captures)
    for result, compression in zip(found, [none, wide, none, candidate(3, 0.01), wide], strict=True):
        (expected,) = alone.sample_scores(1, [compression])
        assert isinstance(result, Scores)
        assert isinstance(expected, Scores)
        assert asdict(result) == pytest.approx(asdict(expected), abs=1e-5)


def test_where_memory_does_not_suffice_for_all_they_are_replayed_one_by_one(
    model: PreTrainedModel, captures: list[Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1

    def limited(*arguments: Any) -> Any:
        if arguments[2].shape[0] > most:
            raise torch.OutOfMemoryError("no memory")
        return replay_all(*arguments)

    several = [candidate(2, 0.02), candidate(2, 1.0), candidate(3, 0.01)]
    expected = [Evaluator(model, captures).sample_scores(0, [it])[0] for it in several]
    monkeypatch.setattr(evaluate, "replay_all", limited)
    assert Evaluator(model, captures).sample_scores(0, several) == expected
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        Evaluator(model, captures).sample_scores(0, several)
