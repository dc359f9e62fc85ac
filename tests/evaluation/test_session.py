from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from clusterprof import compress
from clusterprof.errors import CompressionError, DataError
from clusterprof.evaluation import session as session_module
from clusterprof.evaluation.contestants import Contestant, contestants
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, Task, entrants
from clusterprof.methods import ClusterAttn, TopK, method_names
from clusterprof.profile import Compression, LayerOverride
from clusterprof.profiling import collect
from clusterprof.profiling.capture import end_tokens
from clusterprof.profiling.prefill import prefill_prompt
from tests.evaluation.engine import (
    VOCAB_SIZE,
    WINDOW,
    make_entrants,
    make_tasks,
    open_session,
    prompt_of,
    row,
)
from tests.evaluation.test_contestants import saved
from tests.profiling.subjects import generated
from tests.runtime.subjects import model_state
from tests.tiny import tiny_gemma3, tiny_llama

NEW_TOKENS = 8
DECODING = ("h2o+decode", "streaming_llm+decode")
FEW = ("clusterattn", "snapkv", "h2o", "ngram", *DECODING)
SIZES = (24, 40)


def build(maker: Callable[..., PreTrainedModel] = tiny_llama, **options: Any) -> PreTrainedModel:
    return maker(**{"vocab_size": VOCAB_SIZE, **options})


def answered_alone(session: Session, task: Task, entrant: Entrant) -> list[int]:
    """By generate() inside compress(), or outside of it for the full cache."""
    prompt = prompt_of(task)
    if entrant.compression is None:
        return generated(session.model, prompt, task.max_new_tokens)
    question = task.prompt.query_length if entrant.compression.window == "query" else None
    with compress(session.model, entrant.compression, query_length=question, tokenizer=session.tokenizer):
        return generated(session.model, prompt, task.max_new_tokens)


def check_answers(session: Session, tasks: Sequence[Task], entering: Sequence[Entrant]) -> None:
    ends = end_tokens(session.model, session.tokenizer)
    for task in tasks:
        answers = dict(session.answers(task, entering))
        assert len(answers) == len(entering)
        for entrant in entering:
            tokens = [token for token in answered_alone(session, task, entrant) if token not in ends]
            assert answers[entrant] == session.tokenizer.decode(tokens, skip_special_tokens=True), entrant


@pytest.mark.parametrize(
    ("maker", "window"), [(tiny_llama, "query"), (tiny_gemma3, WINDOW), (tiny_gemma3, "query")]
)
def test_methods_together_answer_as_each_alone(
    maker: Callable[..., PreTrainedModel], window: Any, tmp_path: Path
) -> None:
    session = open_session(build(maker), tmp_path)
    # The last one fits in the larger size, but not together with its answer.
    tasks = make_tasks(session, [row(71, "why there?"), row(36)], NEW_TOKENS)
    entering = make_entrants(FEW, SIZES, window)
    before = model_state(session.model)
    check_answers(session, tasks, entering)
    assert model_state(session.model) == before


def test_a_profile_with_overrides_answers_as_alone(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(90)], 16)
    other = LayerOverride(layers=(1,), method=ClusterAttn(num_block=5, theta=0.1, gap_pool=1))
    entering: list[Entrant] = []
    for name, overrides in (("plain", ()), ("mixed", (other,))):
        compression = {"size": 24, "window": WINDOW, "overrides": overrides}
        path = saved(tmp_path / f"{name}.json", compression=compression)
        entering += entrants(contestants([str(path)])[1:], [], WINDOW)
    check_answers(session, [task], entering)
    plain, mixed = dict(session.answers(task, entering)).values()
    assert plain != mixed


def test_every_method_answers_as_alone(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    check_answers(session, make_tasks(session, [row(90)], NEW_TOKENS), make_entrants(method_names()))


def test_the_answers_differ_or_the_tests_above_say_nothing(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(90)], 16)
    answers = dict(session.answers(task, make_entrants(FEW, SIZES)))
    assert len(set(answers.values())) > len(answers) // 2
    # That decoded tokens are evicted, too, is seen in the answer.
    by_label = {(it.contestant.label, it.size): text for it, text in answers.items()}
    assert by_label["h2o", 24] != by_label["h2o+decode", 24]


def test_rows_that_end_early_leave_the_others_alone(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    entering = make_entrants(method_names()[:5])
    (task,) = make_tasks(session, [row(90)], 20)
    answers = [answered_alone(session, task, it) for it in entering]
    candidates = set.union(*map(set, answers)) - {answer[0] for answer in answers}

    def places(token: int) -> set[int]:
        return {answer.index(token) if token in answer else len(answer) for answer in answers}

    # A token that ends the rows in as many different steps as possible.
    end = max(sorted(candidates), key=lambda token: len(places(token)))
    assert len(places(end)) >= 3
    session.model.generation_config.eos_token_id = [end]
    check_answers(session, [task], entering)


def test_an_answer_that_ends_at_once_is_empty(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(90)], NEW_TOKENS)
    session.model.generation_config.eos_token_id = [generated(session.model, prompt_of(task), 1)[0]]
    assert set(dict(session.answers(task, make_entrants(FEW))).values()) == {""}


def test_an_answer_of_one_token(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    check_answers(session, make_tasks(session, [row(60)], 1), make_entrants(FEW))


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each prefill of the test was asked for."""
    seen: list[dict[str, Any]] = []

    def spy(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Any:
        seen.append({"tokens": input_ids.shape[1], **options})
        return prefill_prompt(model, input_ids, **options)

    monkeypatch.setattr(session_module, "prefill_prompt", spy)
    return seen


def test_one_prefill_serves_all(tmp_path: Path, prefilled: list[dict[str, Any]]) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(90)], 3)
    list(session.answers(task, make_entrants(["clusterattn", "topk"], SIZES)))
    # What no method needs is not computed.
    assert prefilled == [{"tokens": 90, "observed": WINDOW, "accumulate": False, "word_starts": None}]
    prefilled.clear()
    list(session.answers(task, make_entrants(["h2o", "ngram"], SIZES)))
    (asked,) = prefilled
    assert asked["accumulate"]
    assert asked["word_starts"].shape == (90,)


def test_contestants_with_windows_of_their_own_share_the_prefill(
    tmp_path: Path, prefilled: list[dict[str, Any]]
) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(90)], NEW_TOKENS)
    entering = [
        Entrant(Contestant(f"w{window}", "", None), 24, Compression(size=24, window=window, method=TopK()))
        for window in (3, 20, "query")
    ]
    check_answers(session, [task], entering)
    assert [asked["observed"] for asked in prefilled] == [20]


@pytest.mark.parametrize("tokens", [1, 5, 23, 24])
def test_a_prompt_that_fits_is_the_full_run_once(tokens: int, tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(24)], 4)
    task = Task(**{**vars(task), "prompt": shortened(task, tokens)})
    entering = make_entrants(["clusterattn", "h2o", "ngram", "streaming_llm+decode"], [24, 40])
    calls: list[int] = []

    def decode(cache: Cache, first: Tensor, rows: int) -> list[tuple[int, int]]:
        calls.append(rows)
        return [(cache.get_seq_length(), int(first.argmax()))] * rows

    results = dict(session.run(task, entering, decode))
    assert set(results) == set(entering)
    assert set(results.values()) == {(tokens, generated(session.model, prompt_of(task), 1)[0])}
    # But for what evicts decoded tokens at size 24, as prompt and answer together may not fit.
    assert calls == ([1] if tokens + 4 <= 24 else [1, 1])


def shortened(task: Task, tokens: int) -> Any:
    prompt = task.prompt
    return type(prompt)(prompt.id, prompt.input_ids[-tokens:], None, 0)


def test_nothing_to_measure_is_no_prefill(tmp_path: Path, prefilled: list[dict[str, Any]]) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(60)])
    assert list(session.answers(task, [])) == []
    assert prefilled == []


def test_a_question_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(60)])
    unknown = Task(**{**vars(task), "prompt": shortened(task, 60)})
    entering = make_entrants(["topk"], window="query")
    with pytest.raises(DataError, match=r"'row-60-0' are its question is not known; give rows with"):
        list(session.answers(unknown, entering))


def test_a_question_as_long_as_the_size_is_an_error(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    (task,) = make_tasks(session, [row(60, "where is the lake by the bay?")])
    with pytest.raises(CompressionError, match=r"question has 29 tokens .* nothing of size 24"):
        list(session.answers(task, make_entrants(["topk", "h2o+decode"], window="query")))


def test_numbers_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path)
    with torch.no_grad():
        session.model.lm_head.weight[5] = torch.inf
    for names in ([], ["h2o+decode"]):
        entering = make_entrants(names)[-1:]
        with pytest.raises(CompressionError, match="not finite"):
            list(session.answers(make_tasks(session, [row(60)])[0], entering))


def test_captures_are_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(build(), tmp_path, decode_tokens=5)
    (task,) = make_tasks(session, [row(60)], 5)
    first = session.capture(task, WINDOW)
    assert (first.prompt_length, first.window, len(first.tokens)) == (60, WINDOW, 6)
    assert first.tokens.tolist() == generated(session.model, prompt_of(task), 6)
    assert first.word_starts is not None
    assert first.observation.accumulated is None
    summed = session.capture(task, WINDOW, accumulate=True)
    assert summed.observation.accumulated is not None

    def no_more(*args: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(collect, "capture_prompt", no_more)
    again = open_session(build(), tmp_path, decode_tokens=5).capture(task, WINDOW)
    torch.testing.assert_close(again.log_probs, first.log_probs)
    with pytest.raises(AssertionError):
        session.capture(task, WINDOW + 1)
    with pytest.raises(AssertionError):
        open_session(build(), tmp_path, decode_tokens=6).capture(task, WINDOW)


def test_a_capture_needs_a_prompt_beyond_the_window(tmp_path: Path) -> None:
    session = open_session(build(), tmp_path, decode_tokens=5)
    (task,) = make_tasks(session, [row(60)], 5)
    with pytest.raises(CompressionError, match="60 tokens, and must be longer than the window of 60"):
        session.capture(task, 60)
