"""Every method is tuned with the same captures and the same search."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof import Profile
from clusterprof.data import build_prompt
from clusterprof.errors import ClusterprofError
from clusterprof.methods import MethodConfig, NGram, TopK, default_method, method_names
from clusterprof.profile import Compression
from clusterprof.profiling import collect
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import mean_scores
from clusterprof.runtime.words import starts_of_words
from tests.profiling.test_query_window import questions
from tests.profiling.test_tune import Listener, Loaded, dataset, loaded, run

__all__ = ["loaded"]

TRIALS = 3
DEFAULTS = {
    "clusterattn": "paper default",
    "snapkv": "SnapKV default",
    "topk": "top-k default",
    "streaming_llm": "StreamingLLM default",
    "h2o": "H2O default",
    "kmeans": "K-means default",
    "dbscan": "DBSCAN default",
    "ngram": "n-gram default",
}
BASELINES = {
    "clusterattn": "ClusterAttn",
    "snapkv": "SnapKV",
    "snapkv tuned": "SnapKV tuned",
    "topk": "top-k",
    "streaming_llm": "StreamingLLM",
}


@pytest.mark.parametrize("name", method_names())
def test_every_method_is_tuned(loaded: Loaded, tmp_path: Path, name: str) -> None:
    listener = Listener()
    result = run(loaded, tmp_path, dataset((90, 70)), listener, method=name, trials=TRIALS)
    profile = result.profile
    expected_trials = 1 if name == "topk" else TRIALS
    assert profile.search.trials == result.timings["trials"] == expected_trials
    # SnapKV is tuned by the same search, to be compared with and to begin from.
    searches = [("searching", 40, "snapkv", 0, TRIALS)] if name != "snapkv" else []
    searches += [("searching", 40, name, 0, expected_trials)]
    assert [event for event in listener.events if event[0] == "searching"] == searches
    assert sum(event[0] == "tried" for event in listener.events) == sum(int(str(it[-1])) for it in searches)
    assert profile.search.sampler == ("none" if name == "topk" else "tpe")

    tuned, default = result.judgement.methods[:2]
    assert profile.compression == Compression(size=40, window=8, method=_method(tuned.method))
    assert _method(tuned.method).name == name
    assert default.method == default_method(name, 40)
    assert tuned.scores.cosine >= default.scores.cosine
    assert profile.results.tuning.value == pytest.approx(tuned.scores.cosine)
    for parameter, values in profile.search.space.items():
        chosen: Any = getattr(tuned.method, parameter)
        first, last = values[0], values[-1]
        assert chosen in values if isinstance(first, str) else first <= chosen <= last

    labels = [label for other, label in BASELINES.items() if other not in (name, f"{name} tuned")]
    labels.insert(0, DEFAULTS[name])
    assert [each.label for each in result.judgement.methods] == ["tuned", *labels, "full"]
    assert ("comparing", len(labels) + 1) in listener.events
    assert [baseline.method for baseline in profile.results.baselines[:-1]] == [
        each.method for each in result.judgement.methods[1:-1]
    ]
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def _method(method: MethodConfig | None) -> MethodConfig:
    assert method is not None
    return method


def captures_by_hand(loaded: Loaded, lengths: Sequence[int]) -> list[Capture]:
    model, tokenizer = loaded
    found = []
    for row in dataset(lengths).rows:
        ids = torch.tensor([build_prompt(row, tokenizer, max_tokens=500).input_ids])
        words = starts_of_words(tokenizer, ids[0])
        found.append(
            capture_prompt(
                model, ids, window=8, decode_tokens=5, end_tokens={2}, accumulate=True, word_starts=words
            )
        )
    return found


def test_a_search_of_all_points_ends_at_the_best_of_a_dense_grid(loaded: Loaded, tmp_path: Path) -> None:
    result = run(loaded, tmp_path, dataset((90, 70)), method="ngram", trials=100)
    grid = [NGram(n=n) for n in (1, 2, 3, 4)]
    evaluator = Evaluator(loaded[0], captures_by_hand(loaded, (90, 70)))
    scores = {
        method: mean_scores(evaluator.scores(Compression(size=40, window=8, method=method))).cosine
        for method in grid
    }
    assert result.profile.search.trials == len(grid)
    assert result.profile.results.tuning.value == pytest.approx(max(scores.values()), abs=1e-6)
    best = result.judgement.methods[0].method
    assert isinstance(best, NGram)
    assert scores[best] == pytest.approx(max(scores.values()), abs=1e-6)


@pytest.mark.parametrize(("name", "need"), [("h2o", "accumulated"), ("ngram", "words"), ("topk", None)])
def test_only_what_a_method_needs_is_captured(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, need: str | None
) -> None:
    seen: list[Capture] = []

    def spy(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Capture:
        seen.append(capture_prompt(model, input_ids, **options))
        return seen[-1]

    monkeypatch.setattr(collect, "capture_prompt", spy)
    run(loaded, tmp_path, dataset((90,)), method=name, trials=1)
    assert (seen[0].observation.accumulated is not None) == (need == "accumulated")
    # Words cost nothing and may come along with any capture.
    if need == "words":
        assert seen[0].observation.word_starts is not None


def test_a_second_run_goes_on_with_the_methods_own_study(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(loaded, tmp_path, method="h2o", trials=2, storage=None)
    monkeypatch.setattr(collect, "capture_prompt", lambda *arguments, **options: pytest.fail("captured"))
    listener = Listener()
    second = run(loaded, tmp_path, method="h2o", trials=4, storage=None, listener=listener)
    assert ("searching", 40, "h2o", 2, 4) in listener.events
    assert first.profile.search.study == second.profile.search.study
    assert first.profile.search.study.startswith("texts-40-h2o-")
    # What needs less is served by the same captures, and its study is another one.
    for method, trials in (("topk", 1), ("ngram", 2)):
        other = run(loaded, tmp_path, method=method, trials=2, storage=None)
        assert other.profile.search.study.startswith(f"texts-40-{method}-")
        assert other.profile.search.trials == trials


def test_the_papers_own_method_keeps_its_short_name(loaded: Loaded, tmp_path: Path) -> None:
    study = run(loaded, tmp_path, dataset((90,)), trials=1).profile.search.study
    name, size, digest = study.split("-")
    assert (name, size, len(digest)) == ("texts", "40", 8)


def test_a_named_study_of_another_method_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    run(loaded, tmp_path, dataset((90,)), method="ngram", trials=1, storage=None, study="mine")
    with pytest.raises(
        ClusterprofError,
        match=r"'mine-40' .* made with method ngram, now snapkv; range of kernel size none, now .*--study",
    ):
        run(loaded, tmp_path, dataset((90,)), method="snapkv", trials=1, storage=None, study="mine")


@pytest.mark.parametrize("name", ["kmeans", "dbscan"])
def test_without_scikit_learn_its_methods_are_refused_before_any_prompt(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # An entry of None makes the import fail.
    for module in [*sys.modules, "sklearn"]:
        if module.partition(".")[0] == "sklearn":
            monkeypatch.setitem(sys.modules, module, None)
    listener = Listener()
    with pytest.raises(ClusterprofError, match=r"needs scikit-learn.*clusterprof\[baselines\]"):
        run(loaded, tmp_path, method=name, listener=listener)
    assert listener.events == []
    assert not (tmp_path / "captures").exists()


def test_without_parameters_the_default_is_the_result(loaded: Loaded, tmp_path: Path) -> None:
    result = run(loaded, tmp_path, dataset((90,)), method="topk", trials=50)
    tuned, default = result.judgement.methods[:2]
    assert tuned.method == default.method == TopK()
    assert tuned.scores == default.scores
    assert result.profile.search.space == {}


def test_snapkv_tuned_is_what_a_tune_of_snapkv_finds(loaded: Loaded, tmp_path: Path) -> None:
    ours = run(loaded, tmp_path / "ours", trials=6, fraction=0.5)
    theirs = run(loaded, tmp_path / "theirs", trials=6, fraction=0.5, method="snapkv")
    [rival] = [each for each in ours.judgement.methods if each.label == "SnapKV tuned"]
    tuned, default = theirs.judgement.methods[:2]
    assert rival.method == tuned.method
    assert rival.method != default.method
    assert (rival.scores, ours.judgement.held_out) == (tuned.scores, True)
    # Each sees the other from its own side.
    assert rival.behind is not None
    assert rival.behind.mean == pytest.approx(ours.judgement.methods[0].scores.cosine - tuned.scores.cosine)
    # In one cache folder they share the study: nothing is tried twice.
    listener = Listener()
    for method in ("clusterattn", "snapkv"):
        run(loaded, tmp_path / "one", listener=listener, trials=3, storage=None, method=method)
    assert ("searching", 40, "snapkv", 3, 3) in listener.events


def test_with_the_question_as_the_window(loaded: Loaded, tmp_path: Path) -> None:
    result = run(loaded, tmp_path, questions(7, 19), method="ngram", trials=2, window="query")
    assert result.profile.compression.window == "query"
    assert result.samples["used"] == 2
