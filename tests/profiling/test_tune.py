import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FrozenTrial
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof import Profile
from clusterprof.data import Dataset, Message, Prompt, Row, build_prompt
from clusterprof.data.rows import make_dataset
from clusterprof.errors import ClusterprofError, CompressionError, DataError, UnsupportedModelError
from clusterprof.methods import ClusterAttn, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Compression, DroppedSample
from clusterprof.profiling import collect
from clusterprof.profiling.capture import capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, mean_scores
from clusterprof.profiling.samples import Samples
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.tune import TuneResult, tune
from tests.tiny import tiny_llama, tiny_mistral, tiny_tokenizer

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
LENGTHS = (90, 70, 80, 20)
SETTINGS: dict[str, Any] = {"sizes": (40,), "window": 8, "decode_tokens": 5, "trials": 4, "fraction": 1.0}
SETTINGS |= {"storage": "sqlite:///:memory:", "objective": "cosine"}


class Listener:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def interrupting(self) -> None:
        self.events.append(("interrupting",))

    def prepared(self, samples: Samples) -> None:
        self.events.append(("prepared", len(samples.tuning), len(samples.held_out)))

    def captured(self, prompt: Prompt, seconds: float, error: str | None) -> None:
        self.events.append(("captured", prompt.id, seconds > 0, error))

    def over_limit(self, limit_bytes: int) -> None:
        self.events.append(("over limit", limit_bytes))

    def left_out(self, sample: DroppedSample) -> None:
        self.events.append(("left out", sample))

    def searching(self, size: int, method: str, study: str, storage: str, done: int, trials: int) -> None:
        self.events.append(("searching", size, method, done, trials))

    def tried(self, trials: Sequence[FrozenTrial], best: FrozenTrial | None) -> None:
        assert best is not None
        self.events += [("tried", trial.number) for trial in trials]

    def searching_per_layer(self, steps: int) -> None:
        self.events.append(("searching per layer", steps))

    def tried_per_layer(self) -> None:
        self.events.append(("tried per layer",))

    def comparing(self, methods: int) -> None:
        self.events.append(("comparing", methods))

    def compared(self, label: str) -> None:
        pass


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return tiny_llama(eos_token_id=None), tiny_tokenizer()


def text(length: int) -> str:
    """As many tokens as characters."""
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(length))
    return "".join(map(chr, letters.tolist()))


def dataset(lengths: Sequence[int] = LENGTHS) -> Dataset:
    rows = [Row(f"row-{length}", (Message("user", text(length)),)) for length in lengths]
    return make_dataset("texts", "written here", "", rows)


def run_sizes(
    loaded: Loaded,
    folder: Path,
    data: Dataset | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> list[TuneResult]:
    settings = TuneSettings(**{**SETTINGS, **options})
    return list(tune(*loaded, data or dataset(), settings, cache_dir=folder, listener=listener or Listener()))


def run(*arguments: Any, **options: Any) -> TuneResult:
    """At one size; by default all rows are tuned on and none is held out."""
    [result] = run_sizes(*arguments, **options)
    return result


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_the_result_is_no_worse_than_the_paper_default(
    loaded: Loaded, tmp_path: Path, objective: ObjectiveName
) -> None:
    result = run(loaded, tmp_path, objective=objective)
    tuned, default = (result.judgement.methods[i].scores[objective] for i in range(2))
    assert tuned >= default if DIRECTIONS[objective] == "maximize" else tuned <= default
    assert result.profile.results.tuning.value == pytest.approx(tuned)
    assert result.profile.results.tuning.objective == objective
    assert result.profile.compression.method == result.judgement.methods[0].method


def test_every_method_is_scored_on_the_same_samples(loaded: Loaded, tmp_path: Path) -> None:
    listener = Listener()
    result = run(loaded, tmp_path, listener=listener)
    model, tokenizer = loaded
    prompts = [build_prompt(row, tokenizer, max_tokens=500) for row in dataset().rows[:3]]
    captures = [
        capture_prompt(model, torch.tensor([p.input_ids]), window=8, decode_tokens=5, end_tokens={2})
        for p in prompts
    ]
    evaluator = Evaluator(model, captures)
    found_by_label = {found.label: found for found in result.judgement.methods}
    methods = {
        "paper default": ClusterAttn.paper_default(40),
        "SnapKV": SnapKV(),
        "SnapKV tuned": found_by_label["SnapKV tuned"].method,
        "top-k": TopK(),
        "StreamingLLM": StreamingLLM(),
    }
    assert list(found_by_label) == ["tuned", *methods, "full"]
    for label, method in methods.items():
        found = found_by_label[label]
        assert method is not None
        assert found.method == method
        expected = mean_scores(evaluator.scores(Compression(size=40, window=8, method=method)))
        for name in DIRECTIONS:
            assert found.scores[name] == pytest.approx(expected[name], abs=1e-6)
    assert found_by_label["full"].method is None

    assert result.samples == {
        "dataset": 4,
        "sampled": 4,
        "fitting": 1,
        "cut": 0,
        "dropped": 0,
        "used": 3,
        "held_out": 0,
    }
    assert listener.events == [
        ("prepared", 4, 0),
        *(("captured", f"row-{length}", True, None) for length in LENGTHS[:3]),
        ("searching", 40, "snapkv", 0, 4),
        *(("tried", number) for number in range(4)),
        ("searching", 40, "clusterattn", 0, 4),
        *(("tried", number) for number in range(4)),
        ("comparing", 6),
    ]
    result.profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == result.profile
    result.profile.check(*loaded)


def test_a_second_run_captures_nothing_and_goes_on_with_the_study(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(loaded, tmp_path, trials=3, storage=None)
    monkeypatch.setattr(collect, "capture_prompt", lambda *arguments, **options: pytest.fail("captured"))
    listener = Listener()
    second = run(loaded, tmp_path, trials=6, storage=None, listener=listener)
    assert [event[2] for event in listener.events if event[0] == "captured"] == [False] * 3
    assert listener.events[4:] == [
        ("searching", 40, "snapkv", 3, 6),
        *(("tried", number) for number in (3, 4, 5)),
        ("searching", 40, "clusterattn", 3, 6),
        *(("tried", number) for number in (3, 4, 5)),
        ("comparing", 6),
    ]
    assert second.profile.search.trials == 6
    assert second.profile.search.study == first.profile.search.study
    assert second.profile.results.tuning.value >= first.profile.results.tuning.value


def test_captures_beyond_the_bound_are_kept_and_told(loaded: Loaded, tmp_path: Path) -> None:
    listener = Listener()
    run(loaded, tmp_path, listener=listener, capture_memory=1)
    assert listener.events.count(("over limit", 1)) == 1
    assert len(list((tmp_path / "captures").iterdir())) == 3
    listener = Listener()
    run(loaded, tmp_path, listener=listener, capture_memory=10**9)
    assert [event[2] for event in listener.events if event[0] == "captured"] == [False] * 3
    assert not any(event[0] == "over limit" for event in listener.events)


def fail_on(row: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    length = int(row.removeprefix("row-"))

    def capture(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> object:
        if input_ids.shape[1] == length:
            raise error
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", capture)


@pytest.mark.parametrize("error", [CompressionError("it is not finite"), torch.OutOfMemoryError("x" * 5000)])
def test_a_sample_that_fails_is_dropped_and_named(
    loaded: Loaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    fail_on("row-70", error, monkeypatch)
    result = run(loaded, tmp_path)
    (dropped,) = result.profile.search.dropped_samples
    assert dropped.id == "row-70"
    assert str(error).startswith(dropped.reason)
    assert (result.samples["dropped"], result.samples["used"]) == (1, 2)
    result.profile.save(tmp_path / "profile.json")


def test_when_every_sample_fails_the_reason_is_told(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on("row-90", CompressionError("it is not finite."), monkeypatch)
    with pytest.raises(ClusterprofError, match=r"No sample can be used for --size 40; .*it is not finite"):
        run(loaded, tmp_path, dataset((90,)))


def test_a_model_of_sliding_windows_alone_is_told_as_such(tmp_path: Path) -> None:
    loaded = tiny_mistral(sliding_window=16), tiny_tokenizer()
    with pytest.raises(ClusterprofError, match="Every layer of this model has sliding-window"):
        run(loaded, tmp_path)


def test_prompts_that_all_fit_are_found_before_anything_is_captured(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"All 4 sampled prompts of texts fit in --size 90 \(the longest has 90"
    ):
        run(loaded, tmp_path, sizes=(90,))
    assert not (tmp_path / "captures").exists()


def test_prompts_over_the_models_context_are_cut(tmp_path: Path) -> None:
    loaded = tiny_llama(eos_token_id=None, max_position_embeddings=75), tiny_tokenizer()
    result = run(loaded, tmp_path)
    assert result.samples["cut"] == result.profile.dataset.prompts_cut == 2


def test_a_time_limit_without_a_single_trial_is_an_error(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ClusterprofError, match="longer --timeout"):
        run(loaded, tmp_path, timeout=0)


def test_a_model_that_cannot_be_compressed_is_refused_before_any_prompt(tmp_path: Path) -> None:
    model, listener = tiny_mistral(sliding_window=16), Listener()
    with pytest.raises(UnsupportedModelError, match="Every layer"):
        run((model, tiny_tokenizer()), tmp_path, listener=listener)
    assert listener.events == []


def test_a_model_that_turns_out_unsupported_stops_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    def capture(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("Gemma2Attention changes its attention scores.")

    monkeypatch.setattr("clusterprof.profiling.collect.capture_prompt", capture)
    with pytest.raises(UnsupportedModelError):
        run((tiny_llama(), tiny_tokenizer()), tmp_path)


def test_decode_tokens_that_leave_no_room_for_a_prompt_are_named(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--decode-tokens 500 leaves 12 tokens"):
        run(loaded, tmp_path, decode_tokens=500)


def test_tunes_that_start_together_on_a_new_cache_all_work(loaded: Loaded, tmp_path: Path) -> None:
    def start(seed: int) -> TuneResult:
        return run((copy.deepcopy(loaded[0]), loaded[1]), tmp_path, seed=seed, storage=None)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(start, range(3)))
    assert len({result.profile.search.study for result in results}) == 3


def test_the_same_seed_gives_the_same_profile_byte_for_byte(loaded: Loaded, tmp_path: Path) -> None:
    texts = []
    for folder in ("first", "second"):
        # Enough trials for TPE to take over from the start-up draws, and prompts for candidates to be given up.
        options: dict[str, Any] = {"trials": 16, "fraction": 0.6, "objective": "kl", "storage": None}
        lengths = (60, 65, 70, 75, 80, 85, 90, 95)
        profile = run(loaded, tmp_path / folder, dataset(lengths), **options).profile
        environment = profile.environment.model_copy(update={"created": datetime(2025, 1, 1, tzinfo=UTC)})
        search = profile.search.model_copy(update={"duration_s": 0.0})
        path = tmp_path / folder / "profile.json"
        profile.model_copy(update={"environment": environment, "search": search}).save(path)
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]
