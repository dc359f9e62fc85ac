from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.evaluation import fit
from clusterprof.evaluation.contestants import Contestant
from clusterprof.evaluation.held_out import HeldOutBenchmark
from clusterprof.evaluation.run import Measured
from clusterprof.evaluation.session import Session, kept
from clusterprof.evaluation.tasks import Entrant, Task
from clusterprof.methods import SnapKV, method_names
from clusterprof.profile import Compression
from clusterprof.profiling import collect
from clusterprof.profiling.capture import capture_prompt
from tests.evaluation.engine import (
    VOCAB_SIZE,
    WINDOW,
    make_entrants,
    make_tasks,
    open_session,
    prompt_of,
    row,
)
from tests.profiling.subjects import generated
from tests.tiny import tiny_gemma3, tiny_llama

STEPS = 10


def length(task: Task, text: str) -> dict[str, float]:
    return {"length": float(len(text))}


SCORED = HeldOutBenchmark(length, 16)


def opened(
    tmp_path: Path, build: Callable[..., PreTrainedModel] = tiny_llama, **options: Any
) -> tuple[Session, Task]:
    model = build(vocab_size=VOCAB_SIZE, **options)
    session = open_session(model, tmp_path, decode_tokens=STEPS)
    return session, make_tasks(session, [replace(row(70, "why there?"), max_new_tokens=None)], STEPS)[0]


def measure(
    session: Session, task: Task, entering: list[Entrant], bench: HeldOutBenchmark = SCORED
) -> dict[Entrant, Measured]:
    measured = dict(bench.measure(session, task, entering))
    assert set(measured) == set(entering)
    return measured


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_answers_are_those_of_every_other_benchmark(
    build: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    session, task = opened(tmp_path, build)
    names = list(method_names()) if build is tiny_llama else ["clusterattn", "h2o"]
    entering = make_entrants(names, [24, 40])
    answers = dict(session.answers(task, entering))
    for entrant, measured in measure(session, task, entering).items():
        assert measured.text == answers[entrant]
        assert measured.scores["length"] == len(answers[entrant])
    assert len(set(answers.values())) > 3


def test_attention_is_scored_as_in_a_tune(tmp_path: Path) -> None:
    session, task = opened(tmp_path)
    full, *entering = make_entrants(["clusterattn", "h2o", "ngram"], [24, 40])
    found = measure(session, task, [full, *entering])
    capture = session.capture(task, WINDOW, accumulate=True)
    for entrant in entering:
        scores, curves = fit.measure(
            session.model, capture, kept(entrant, capture.observation, capture.layers)
        )
        assert found[entrant].scores == {**scores, "length": len(found[entrant].text or "")}
        assert found[entrant].curves == curves


def test_the_full_cache_is_its_own_measure(tmp_path: Path) -> None:
    session, task = opened(tmp_path, eos_token_id=None)
    answer = generated(session.model, prompt_of(task), STEPS)
    session.model.generation_config.eos_token_id = [max(set(range(VOCAB_SIZE)) - set(answer))]
    (full,) = make_entrants([])
    found = measure(session, task, [full])[full]
    assert found.text == session.tokenizer.decode(answer, skip_special_tokens=True)
    loss = session.capture(task, WINDOW).full_loss
    expected = {
        "cosine": 1,
        "cosine_padded": 1,
        "attention_output": 1,
        "kl": 0,
        "agreement": 1,
        "length": len(found.text or ""),
    }
    assert found.scores == {**expected, "loss": pytest.approx(loss), "log_kl": pytest.approx(log(1e-3))}


def test_an_answer_that_ends_early_ends_there_in_the_full_run_too(tmp_path: Path) -> None:
    session, task = opened(tmp_path, eos_token_id=None)
    answer = generated(session.model, prompt_of(task), STEPS)
    end = next(token for token in answer[2:] if answer.index(token) >= 2)
    session.model.generation_config.eos_token_id = [end]
    (full,) = make_entrants([])
    kept = answer[: answer.index(end)]
    assert measure(session, task, [full])[full].text == session.tokenizer.decode(kept)


def test_without_a_score_nothing_is_generated(tmp_path: Path) -> None:
    session, task = opened(tmp_path)
    entering = make_entrants(["topk"])
    found = measure(session, task, entering, HeldOutBenchmark(None, 16))
    assert [it.text for it in found.values()] == [None, None]
    assert all(
        it.scores.keys()
        == {"cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"}
        for it in found.values()
    )


def test_an_answer_that_its_protocol_would_not_cut_is_not_scored(tmp_path: Path) -> None:
    session, task = opened(tmp_path)
    longer = replace(task, row=replace(task.row, max_new_tokens=STEPS + 1))
    entering = make_entrants(["topk"])
    for measured in measure(session, longer, entering).values():
        assert measured.text is None
        assert "length" not in measured.scores
        assert "kl" in measured.scores


def test_an_answer_is_scored_as_far_as_its_protocol_has_it(tmp_path: Path) -> None:
    session, task = opened(tmp_path, eos_token_id=None)
    short = replace(task, row=replace(task.row, max_new_tokens=4))
    entering = make_entrants(["topk"])
    answers = dict(session.answers(replace(task, max_new_tokens=4), entering))
    assert {it: measured.text for it, measured in measure(session, short, entering).items()} == answers
    # What is compared with the full run is as long as was asked for.
    whole, cut = measure(session, task, entering), measure(session, short, entering)
    assert {it: measured.scores["kl"] for it, measured in cut.items()} == {
        it: measured.scores["kl"] for it, measured in whole.items()
    }


def test_profiles_with_other_windows_have_captures_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, task = opened(tmp_path)
    windows: list[int] = []

    def spy(*args: Any, **options: Any) -> Any:
        windows.append(options["window"])
        return capture_prompt(*args, **options)

    monkeypatch.setattr(collect, "capture_prompt", spy)
    own = [
        Entrant(Contestant(f"{window}", "", None), 24, Compression(size=24, window=window, method=SnapKV()))
        for window in (5, "query")
    ]
    entering = [*make_entrants(["snapkv"]), *own]
    found = measure(session, task, entering)
    assert windows == [5, WINDOW, len("why there?")]
    answers = dict(session.answers(task, entering))
    assert {it: measured.text for it, measured in found.items()} == answers
    assert len({measured.scores["cosine"] for measured in found.values()}) == 4


def test_what_is_measured(tmp_path: Path) -> None:
    _, task = opened(tmp_path)
    entering = make_entrants(["topk"], [24, 70, 96])
    assert [it.size for it in entering if SCORED.measures(task, it)] == [None, 24]


def test_an_answer_that_ends_at_once_costs_the_prompt(tmp_path: Path) -> None:
    session, task = opened(tmp_path)
    session.model.generation_config.eos_token_id = generated(session.model, prompt_of(task), 1)
    with pytest.raises(CompressionError, match="ended its answer with the first token"):
        measure(session, task, make_entrants(["topk"]))
