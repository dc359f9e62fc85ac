"""A tune that also looks for values per layer: what it keeps, and that held-out prompts decide."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from clusterprof import Profile
from clusterprof.errors import ClusterprofError, CompressionError, DataError
from clusterprof.methods import ClusterAttn, MethodConfig
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling import tune as tune_module
from clusterprof.profiling.capture import Capture
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.judge import judge
from clusterprof.profiling.objective import is_better, mean_scores
from clusterprof.profiling.per_layer import PerLayer
from tests.profiling.subjects import SMALL, capture, random_prompt
from tests.profiling.test_tune import Listener, Loaded, dataset, fail_on, loaded, run
from tests.tiny import tiny_llama

__all__ = ["loaded"]

ROWS = dataset(range(60, 70))
OPTIONS: dict[str, Any] = {"fraction": 0.4, "holdout": 6, "trials": 4, "per_layer": True}
# On the tiny model's prompts shown to be better than the small compression's values, and better but not shown to be.
OTHER = ClusterAttn(num_block=2, theta=1.0, gap_pool=1)
DOUBTFUL = ClusterAttn(num_block=5, theta=0.1, gap_pool=3)


def in_all_layers(compression: Compression, method: MethodConfig) -> Compression:
    """Overridden in both layers of the tiny model."""
    return compression.model_copy(update={"overrides": (LayerOverride(layers=(0, 1), method=method),)})


def some_captures(model: PreTrainedModel) -> list[Capture]:
    return [capture(model, random_prompt(length, seed=length), decode_tokens=5) for length in range(45, 65)]


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_a_better_mean_that_is_not_shown_is_not_taken(objective: Any) -> None:
    model = tiny_llama()
    judgement = judge(
        Evaluator(model, some_captures(model)), SMALL, None, in_all_layers(SMALL, DOUBTFUL),
        held_out=True, objective=objective, seed=0, listener=Listener(),
    )  # fmt: skip
    by_label = {result.label: result for result in judgement.methods}
    layered = by_label["tuned per layer"]
    assert is_better(layered.scores[objective], by_label["tuned uniformly"].scores[objective], objective)
    assert judgement.methods[0].label == "tuned uniformly"
    assert layered.behind is not None
    assert not layered.behind.excludes_zero


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_held_out_prompts_decide_which_of_the_two_the_profile_has(objective: Any) -> None:
    """Judged both ways round, one of them is shown to be better either time, and it is the same."""
    model = tiny_llama()
    evaluator = Evaluator(model, some_captures(model))
    other = SMALL.uniform(OTHER)
    pairs = [(SMALL, in_all_layers(SMALL, OTHER)), (other, in_all_layers(other, SMALL.method))]
    outcomes = set()
    for best, per_layer in pairs:
        judgement = judge(
            evaluator, best, None, per_layer, held_out=True, objective=objective, seed=0, listener=Listener()
        )
        by_label = {result.label: result for result in judgement.methods}
        alike, layered = by_label["tuned uniformly"], by_label["tuned per layer"]
        assert (alike.method, alike.overrides) == (best.method, ())
        assert (layered.method, layered.overrides) == (best.method, per_layer.overrides)
        for result, compression in ((alike, best), (layered, per_layer)):
            assert result.scores == mean_scores(evaluator.scores(compression))
        values = alike.scores[objective], layered.scores[objective]
        winner = layered if (values[1] > values[0]) == (objective == "cosine") else alike
        loser = alike if winner is layered else layered
        assert judgement.methods[0] is winner
        assert judgement.methods[1].label == "paper default"
        assert judgement.tuned == tuple(evaluator.scores(per_layer if winner is layered else best))
        assert winner.behind is None
        assert loser.behind is not None
        assert loser.behind.mean == pytest.approx(
            winner.scores[objective] - loser.scores[objective], abs=1e-6
        )
        outcomes.add(winner.label)
    assert outcomes == {"tuned uniformly", "tuned per layer"}


def planted(found: PerLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "search_per_layer", lambda *arguments, **options: found)


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_the_profile_has_the_values_that_win(loaded: Loaded, tmp_path: Path, objective: Any) -> None:
    listener = Listener()
    result = run(loaded, tmp_path, ROWS, listener, objective=objective, **OPTIONS)
    assert result.per_layer is not None
    first = result.judgement.methods[0]
    profile = result.profile
    assert profile.compression.overrides == first.overrides
    assert profile.compression.method == first.method
    labels = [found.label for found in result.judgement.methods]
    if result.per_layer.best is None:
        assert labels[0] == "tuned"
    else:
        assert {"tuned uniformly", "tuned per layer"} <= set(labels)
        assert "tuned" not in labels
    assert profile.results.metrics.kl == pytest.approx(first.scores.kl)
    steps = listener.events.count(("tried per layer",))
    (most,) = (event[1] for event in listener.events if event[0] == "searching per layer")
    assert isinstance(most, int)
    assert 0 < steps <= most <= 4 + 2 * 3
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_what_loses_is_in_the_profile_as_a_baseline(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform = run(loaded, tmp_path, ROWS, **{**OPTIONS, "per_layer": False}).profile
    # No better, as it is the same.
    best = in_all_layers(uniform.compression, uniform.compression.method)
    planted(PerLayer(best, tried=1, replays=5), monkeypatch)
    result = run(loaded, tmp_path, ROWS, **OPTIONS)
    assert result.judgement.methods[0].label == "tuned uniformly"
    assert result.profile.compression == uniform.compression
    assert result.profile.results.tuning == uniform.results.tuning
    (baseline,) = (it for it in result.profile.results.baselines if it.overrides)
    assert (baseline.method, baseline.overrides) == (uniform.compression.method, best.overrides)
    assert baseline.difference is not None
    assert baseline.difference.value == 0


def test_where_nothing_is_found_the_table_is_as_without(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(PerLayer(None, tried=2, replays=10), monkeypatch)
    result = run(loaded, tmp_path, ROWS, **OPTIONS)
    assert result.judgement.methods[0].label == "tuned"
    assert result.per_layer == PerLayer(None, tried=2, replays=10)
    assert result.profile.compression.overrides == ()


def test_it_starts_from_the_searchs_points(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Compression, list[Compression]]] = []

    def spy(
        evaluator: Evaluator, uniform: Compression, points: list[Compression], **options: Any
    ) -> PerLayer:
        asked.append((uniform, points))
        return PerLayer(None, 0, 0)

    monkeypatch.setattr(tune_module, "search_per_layer", spy)
    result = run(loaded, tmp_path, ROWS, **OPTIONS)
    [(uniform, points)] = asked
    assert uniform == result.profile.compression
    # Not those that were given up.
    assert uniform in points
    assert len(points) <= 4
    assert all(point.method.name == "clusterattn" for point in points)


def test_ctrl_c_leaves_what_the_search_had_found(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> PerLayer:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_module, "search_per_layer", interrupted)
    result = run(loaded, tmp_path, ROWS, **OPTIONS)
    assert result.interrupted
    assert result.per_layer is None
    labels = [found.label for found in result.judgement.methods]
    assert labels[0] == "tuned"
    assert "SnapKV tuned" in labels


def test_with_too_few_held_out_prompts_it_is_refused_before_any_capture(
    loaded: Loaded, tmp_path: Path
) -> None:
    for options, left in (({"fraction": 1.0}, 0), ({"holdout": 5}, 5)):
        with pytest.raises(
            DataError, match=rf"--per-layer needs at least 6 held-out .*, and {left} of .* used at --size 40"
        ):
            run(loaded, tmp_path, ROWS, **{**OPTIONS, **options})
    assert not (tmp_path / "captures").exists()


def test_held_out_prompts_that_fail_are_an_error(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = run(loaded, tmp_path, ROWS, samples=2, holdout=6, trials=1).profile.dataset.held_out_ids
    fail_on(held_out[0], CompressionError("it is not finite."), monkeypatch)
    with pytest.raises(ClusterprofError, match=r"held-out samples 5 can be used for --size 40.*not finite"):
        run(loaded, tmp_path / "again", ROWS, samples=2, holdout=6, trials=1, per_layer=True)
