import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.data import Message, Row
from clusterprof.errors import DataError
from clusterprof.evaluation.perplexity import PerplexityBenchmark, check_answers
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, Task
from clusterprof.methods import method_names
from clusterprof.runtime.attention import decoder_of
from tests.evaluation.engine import make_entrants, make_tasks, open_session, prompt_of, row
from tests.runtime.subjects import forward
from tests.tiny import tiny_gemma3, tiny_llama, tiny_tokenizer

BENCH = PerplexityBenchmark()
ANSWER = "by the moor."
DECODING = ["h2o+decode", "streaming_llm+decode"]


def losses(session: Session, task: Task, entering: list[Entrant]) -> dict[Entrant, float]:
    measured = dict(BENCH.measure(session, task, entering))
    assert len(measured) == len(entering)
    for result in measured.values():
        assert result.text is None
        assert result.scores["perplexity"] == pytest.approx(math.exp(result.scores["loss"]))
    return {it: result.scores["loss"] for it, result in measured.items()}


@torch.no_grad()
def by_hand(session: Session, task: Task, entrant: Entrant, answer: str) -> float:
    """Token after token, under compress()."""
    model, tokens = session.model, tiny_tokenizer()(answer)["input_ids"]
    cache = DynamicCache(config=decoder_of(model).config)
    context: Any = nullcontext()
    if entrant.compression is not None:
        question = task.prompt.query_length if entrant.compression.window == "query" else None
        context = compress(model, entrant.compression, query_length=question, tokenizer=session.tokenizer)
    loss = 0.0
    with context:
        logits = forward(model, prompt_of(task), cache=cache).logits[0, -1]
        for token in tokens:
            loss -= float(logits.log_softmax(-1)[token])
            logits = forward(model, torch.tensor([[token]]), cache=cache).logits[0, -1]
    return loss / len(tokens)


@pytest.mark.parametrize(
    ("build", "names", "sizes", "window"),
    [
        (tiny_llama, [*method_names(), *DECODING], [40], 8),
        (tiny_llama, ["clusterattn", "h2o", *DECODING], [40], "query"),
        (tiny_gemma3, ["snapkv", "h2o", *DECODING], [24, 40], 8),
    ],
)
def test_the_loss_is_that_of_feeding_the_answer_token_by_token(
    build: Callable[[], PreTrainedModel], names: list[str], sizes: list[int], window: Any, tmp_path: Path
) -> None:
    session = open_session(build(), tmp_path)
    # The second prompt fits in the larger size, but not together with its answer.
    tasks = make_tasks(session, [row(80, answers=(ANSWER, "elsewhere")), row(36, answers=(ANSWER,))], 64)
    entering = make_entrants(names, sizes, window)
    for task in tasks:
        found = losses(session, task, entering)
        for entrant in entering:
            expected = by_hand(session, task, entrant, ANSWER)
            assert found[entrant] == pytest.approx(expected, abs=1e-4), entrant
        if task is tasks[0]:
            assert len({round(loss, 3) for loss in found.values()}) > len(found) // 2


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_answers(length: int, tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    (task,) = make_tasks(session, [row(60, answers=(ANSWER[:length],))])
    entering = make_entrants(["topk", *DECODING])
    assert all(BENCH.measures(task, entrant) for entrant in entering)
    for entrant, loss in losses(session, task, entering).items():
        assert loss == pytest.approx(by_hand(session, task, entrant, ANSWER[:length]), abs=1e-5)


def test_a_long_answer_is_read_as_far_as_one_would_be_generated(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    (task,) = make_tasks(session, [row(60, answers=(ANSWER,))], 5)
    (full,) = make_entrants([])
    assert losses(session, task, [full])[full] == pytest.approx(
        by_hand(session, task, full, ANSWER[:5]), abs=1e-5
    )


def test_an_answer_to_plain_text_begins_with_a_space(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    asked = Row(
        "few", (Message("user", "Question: where?\nAnswer:"),), answers=("ash",), use_chat_template=False
    )
    (task,) = make_tasks(session, [asked])
    (full,) = make_entrants([])
    assert losses(session, task, [full])[full] == pytest.approx(
        by_hand(session, task, full, " ash"), abs=1e-5
    )


def test_a_hopeless_answer_has_a_finite_perplexity(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight *= 1000
    session = open_session(model, tmp_path)
    (task,) = make_tasks(session, [row(60, answers=("q",))])
    ((_, result),) = BENCH.measure(session, task, make_entrants([]))
    assert result.scores["loss"] > 100
    assert result.scores["perplexity"] == pytest.approx(math.exp(13))


def test_a_row_without_an_answer_is_named(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    rows = [row(60), row(50, answers=())]
    with pytest.raises(DataError, match=r"'row-50-0' has no answer .* give rows with 'answers'"):
        check_answers(rows)
    check_answers(rows[:1])
    task = make_tasks(session, rows)[1]
    with pytest.raises(DataError, match="'row-50-0' has no answer"):
        list(BENCH.measure(session, task, make_entrants([])))


def test_an_answer_without_tokens_is_named(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    (task,) = make_tasks(session, [row(60, answers=("",))])
    with pytest.raises(DataError, match="answer of row 'row-60-0' has no tokens"):
        list(BENCH.measure(session, task, make_entrants([])))
