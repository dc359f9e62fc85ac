import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof import Profile
from clusterprof.data import Dataset, Message, Prompt, Row, build_prompt
from clusterprof.data.rows import make_dataset
from clusterprof.errors import ClusterprofError, CompressionError, DataError, UnsupportedModelError
from clusterprof.methods import ClusterAttn, SnapKV, StreamingLLM, TopK
from clusterprof.profile import Compression
from clusterprof.profiling import collect
from clusterprof.profiling.capture import capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.profiling.objective import DIRECTIONS, ObjectiveName, mean_scores
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.tune import TuneResult, tune
from tests.tiny import tiny_llama, tiny_mistral, tiny_tokenizer

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
LENGTHS = (90, 70, 80, 20)
SETTINGS: dict[str, Any] = {"size": 40, "window": 8, "decode_tokens": 5, "trials": 4, "fraction": 1.0}
SETTINGS |= {"storage": "sqlite:///:memory:"}


class Listener:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def prepared(self, prompts: Sequence[Prompt], fitting: int) -> None:
        self.events.append(("prepared", len(prompts), fitting))

    def captured(self, prompt: Prompt, seconds: float, error: str | None) -> None:
        self.events.append(("captured", prompt.id, seconds > 0, error))

    def over_limit(self, limit_bytes: int) -> None:
        self.events.append(("over limit", limit_bytes))

    def searching(self, study: str, storage: str, done: int, trials: int) -> None:
        self.events.append(("searching", done, trials))

    def tried(self, trial: FrozenTrial, best: FrozenTrial | None) -> None:
        assert best is not None
        self.events.append(("tried", trial.number))

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


def run(
    loaded: Loaded,
    folder: Path,
    data: Dataset | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> TuneResult:
    settings = TuneSettings(**{**SETTINGS, **options})
    return tune(*loaded, data or dataset(), settings, cache_dir=folder, listener=listener or Listener())


@pytest.mark.parametrize("objective", ["cosine", "kl"])
def test_the_result_is_no_worse_than_the_paper_default(
    loaded: Loaded, tmp_path: Path, objective: ObjectiveName
) -> None:
    result = run(loaded, tmp_path, objective=objective)
    tuned, default = (result.methods[i].scores[objective] for i in range(2))
    assert tuned >= default if DIRECTIONS[objective] == "maximize" else tuned <= default
    assert result.profile.results.tuning.value == pytest.approx(tuned)
    assert result.profile.results.tuning.objective == objective
    assert result.profile.compression.method == result.methods[0].method


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
    methods = [ClusterAttn.paper_default(40), SnapKV(), TopK(), StreamingLLM()]
    for found, method in zip(result.methods[1:-1], methods, strict=True):
        assert found.method == method
        expected = mean_scores(evaluator.scores(Compression(size=40, window=8, method=method)))
        for name in DIRECTIONS:
            assert found.scores[name] == pytest.approx(expected[name], abs=1e-6)
    assert (result.methods[-1].label, result.methods[-1].method) == ("full", None)

    assert result.samples == {"dataset": 4, "sampled": 4, "fitting": 1, "cut": 0, "dropped": 0, "used": 3}
    assert listener.events == [
        ("prepared", 3, 1),
        *(("captured", f"row-{length}", True, None) for length in LENGTHS[:3]),
        ("searching", 0, 4),
        *(("tried", number) for number in range(4)),
        ("comparing", 5),
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
        ("searching", 3, 6),
        *(("tried", number) for number in (3, 4, 5)),
        ("comparing", 5),
    ]
    assert second.profile.search.trials == 6
    assert second.profile.search.study == first.profile.search.study
    assert second.profile.results.tuning.value >= first.profile.results.tuning.value


def test_other_settings_are_another_study(loaded: Loaded, tmp_path: Path) -> None:
    one = dataset((90,))
    options: list[dict[str, Any]] = [
        {},
        {"size": 41},
        {"seed": 1},
        {"objective": "kl"},
        {"method": "snapkv"},
        {"data": dataset((91,))},
    ]
    names = [
        run(loaded, tmp_path, trials=1, **{"data": one, **each}).profile.search.study for each in options
    ]
    assert len(set(names)) == len(names)


def test_a_named_study_of_something_else_is_refused_and_says_what_differs(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: dict[str, Any] = {"data": dataset((90,)), "trials": 1, "storage": None, "study": "mine"}
    run(loaded, tmp_path, **one)
    retrained = copy.deepcopy(loaded[0])
    with torch.no_grad():
        retrained.model.layers[0].mlp.up_proj.weight += 1e-3
    cases: list[tuple[dict[str, Any], str]] = [
        ({"size": 41}, "size 40, now 41"),
        ({"window": 9}, "window 8, now 9"),
        ({"decode_tokens": 6}, "decode tokens 5, now 6"),
        ({"seed": 1}, "seed 0, now 1"),
        ({"objective": "kl"}, "objective cosine, now kl"),
        ({"data": dataset((91,))}, "other prompts"),
        ({"loaded": (retrained, loaded[1])}, "other weights"),
    ]
    for options, expected in cases:
        with pytest.raises(ClusterprofError, match=r"'mine' .* was made with .*--study") as caught:
            run(**{"loaded": loaded, "folder": tmp_path, **one, **options})
        said = str(caught.value).partition("was made with ")[2].partition(", so its trials")[0]
        # Other captures may have another range of theta.
        assert [part for part in said.split("; ") if not part.startswith("range of theta")] == [expected]
    monkeypatch.setattr(ClusterAttn, "version", 2)
    with pytest.raises(ClusterprofError, match="was made with method version 1, now 2, so"):
        run(loaded, tmp_path, **one)
    monkeypatch.undo()
    assert run(loaded, tmp_path, **one).profile.search.study == "mine"


def test_a_study_says_what_it_was_made_with(loaded: Loaded, tmp_path: Path) -> None:
    study = run(loaded, tmp_path, trials=1, storage=None).profile.search.study
    (summary,) = optuna.get_all_study_summaries(f"sqlite:///{tmp_path / 'studies.db'}")
    assert summary.study_name == study
    (made_with,) = summary.user_attrs.values()
    readable = {"method": "clusterattn", "size": 40, "window": 8, "decode_tokens": 5, "objective": "cosine"}
    assert {part: made_with[part] for part in readable} == readable
    assert {"model", "revision", "weights", "vocabulary", "prompts", "method_version"} <= made_with.keys()
    assert made_with["prompts"].startswith("sha256:")


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
    with pytest.raises(ClusterprofError, match=r"No sample could be captured.*it is not finite"):
        run(loaded, tmp_path, dataset((90,)))


def test_a_model_of_sliding_windows_alone_is_told_as_such(tmp_path: Path) -> None:
    loaded = tiny_mistral(sliding_window=16), tiny_tokenizer()
    with pytest.raises(ClusterprofError, match="Every layer of this model has sliding-window"):
        run(loaded, tmp_path)


def test_prompts_that_all_fit_are_found_before_anything_is_captured(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"All 4 sampled prompts of texts fit in --size 90 \(the longest has 90"
    ):
        run(loaded, tmp_path, size=90)
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
