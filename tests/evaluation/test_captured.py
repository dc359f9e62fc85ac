from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.evaluation import fit, hit_rate
from clusterprof.evaluation.captured import FitBenchmark, HitRateBenchmark
from clusterprof.evaluation.contestants import Contestant
from clusterprof.evaluation.session import Session, kept
from clusterprof.evaluation.tasks import Entrant
from clusterprof.methods import TopK, method_names
from clusterprof.profile import Compression
from clusterprof.profiling import collect
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.runtime.words import starts_of_words
from tests.evaluation.engine import WINDOW, make_entrants, make_tasks, open_session, prompt_of, row
from tests.tiny import tiny_gemma3, tiny_llama

STEPS = 6
FIT = FitBenchmark("fit", 8)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Window of each prompt that is captured, and whether attention was summed."""
    seen: list[tuple[int, bool]] = []

    def spy(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Capture:
        seen.append((options["window"], options["accumulate"]))
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", spy)
    return seen


def opened(tmp_path: Path, model: PreTrainedModel | None = None) -> Session:
    return open_session(model or tiny_llama(eos_token_id=None), tmp_path, decode_tokens=STEPS)


def fresh_capture(session: Session, prompt: Tensor, window: int) -> Capture:
    return capture_prompt(
        session.model,
        prompt,
        window=window,
        decode_tokens=STEPS,
        end_tokens={2},
        accumulate=True,
        word_starts=starts_of_words(session.tokenizer, prompt[0]),
    )


def test_the_hit_rate_is_that_of_the_prompts_capture(
    tmp_path: Path, captured: list[tuple[int, bool]]
) -> None:
    session = opened(tmp_path)
    (task,) = make_tasks(session, [row(60)], STEPS)
    entering = make_entrants([])
    bench = HitRateBenchmark(WINDOW, 16)
    # The thresholds are those of the paper's Figure 4.
    assert (bench.name, bench.settings) == (
        "hit-rate",
        {"window": WINDOW, "decode_tokens": 16, "theta": 5e-4, "mu": 5e-5},
    )
    assert bench.measures(task, entering[0])
    ((entrant, measured),) = bench.measure(session, task, entering)
    assert entrant == entering[0]
    scores, curves = hit_rate.measure(fresh_capture(session, prompt_of(task), WINDOW))
    assert measured.scores == pytest.approx(scores)
    assert measured.curves == curves
    assert measured.text is None
    assert captured == [(WINDOW, False)]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_each_method_is_replayed_on_the_same_capture(
    build: Any, tmp_path: Path, captured: list[tuple[int, bool]]
) -> None:
    session = opened(tmp_path, build(eos_token_id=None))
    (task,) = make_tasks(session, [row(60)], STEPS)
    full, *entering = make_entrants(method_names() if build is tiny_llama else ["snapkv", "h2o"], [24, 40])
    assert not FIT.measures(task, full)
    assert all(FIT.measures(task, entrant) for entrant in entering)
    found = dict(FIT.measure(session, task, entering))
    # One of them needs the summed attention, so the one capture has it.
    assert captured == [(WINDOW, True)]
    assert len(found) == len(entering)
    capture = fresh_capture(session, prompt_of(task), WINDOW)
    for entrant in entering:
        scores, curves = fit.measure(
            session.model, capture, kept(entrant, capture.observation, capture.layers)
        )
        assert found[entrant].scores == pytest.approx(scores, abs=1e-6)
        assert found[entrant].curves["layers"] == curves["layers"]
        torch.testing.assert_close(
            torch.tensor(found[entrant].curves["cosine_by_head"]), torch.tensor(curves["cosine_by_head"])
        )


def test_windows_of_their_own_take_captures_of_their_own(
    tmp_path: Path, captured: list[tuple[int, bool]]
) -> None:
    session = opened(tmp_path)
    (task,) = make_tasks(session, [row(60, "where is it?")], STEPS)
    entering = [
        Entrant(Contestant(f"{window}", "", None), 24, Compression(size=24, window=window, method=TopK()))
        for window in (WINDOW, "query", 4)
    ]
    found = dict(FIT.measure(session, task, [*entering, *make_entrants(["h2o"])[1:]]))
    assert captured == [(4, False), (WINDOW, True), (len("where is it?"), False)]
    assert len(found) == 4
    for entrant, window in zip(entering, (WINDOW, 12, 4), strict=True):
        capture = fresh_capture(session, prompt_of(task), window)
        scores, _ = fit.measure(session.model, capture, kept(entrant, capture.observation, capture.layers))
        assert found[entrant].scores == pytest.approx(scores, abs=1e-6)
    # Once captured, not again.
    list(FIT.measure(session, task, entering))
    assert len(captured) == 3


def test_a_prompt_that_fits_is_not_replayed(tmp_path: Path) -> None:
    session = opened(tmp_path)
    (task,) = make_tasks(session, [row(40)], STEPS)
    measured = [it.size for it in make_entrants(["topk"], [24, 40, 64]) if FIT.measures(task, it)]
    assert measured == [24]


def test_a_prompt_no_longer_than_the_window_costs_that_prompt_only(tmp_path: Path) -> None:
    session = opened(tmp_path)
    (task,) = make_tasks(session, [row(60)], STEPS)
    with pytest.raises(CompressionError, match="must be longer than the window of 64"):
        list(HitRateBenchmark(64, 16).measure(session, task, make_entrants([])))
