from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.data import Message, Row
from clusterprof.errors import DataError
from clusterprof.evaluation.perplexity import PerplexityBenchmark, check_answers, measurable
from clusterprof.evaluation.session import Session
from clusterprof.evaluation.tasks import Entrant, Task, TaskMaker
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
        # No prompt has a perplexity of its own: it is the exponential of the mean loss.
        assert result.scores.keys() == {"loss"}
    return {it: result.scores["loss"] for it, result in measured.items()}


@torch.no_grad()
def by_hand(session: Session, task: Task, entrant: Entrant, answer: str) -> float:
    """Token after token, under compress(); the first one, which compression does not change, does not count."""
    model, tokens = session.model, tiny_tokenizer()(answer)["input_ids"]
    cache = DynamicCache(config=decoder_of(model).config)
    context: Any = nullcontext()
    if entrant.compression is not None:
        question = task.prompt.query_length if entrant.compression.window == "query" else None
        context = compress(model, entrant.compression, query_length=question, tokenizer=session.tokenizer)
    loss = 0.0
    with context:
        forward(model, prompt_of(task), cache=cache)
        for token, following in pairwise(tokens):
            logits = forward(model, torch.tensor([[token]]), cache=cache).logits[0, -1]
            loss -= float(logits.log_softmax(-1)[following])
    return loss / (len(tokens) - 1)


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


def test_the_shortest_answer(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    (task,) = make_tasks(session, [row(60, answers=(ANSWER[:2],))])
    entering = make_entrants(["topk", *DECODING])
    assert all(BENCH.measures(task, entrant) for entrant in entering)
    for entrant, loss in losses(session, task, entering).items():
        assert loss == pytest.approx(by_hand(session, task, entrant, ANSWER[:2]), abs=1e-5)


def test_no_compression_changes_the_first_token(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    (task,) = make_tasks(session, [row(60)])
    seen = {}

    def first_of(cache: Cache, first: Tensor, rows: int) -> list[Tensor]:
        return [first] * rows

    for entrant, first in session.run(task, make_entrants(["topk", "h2o", *DECODING]), first_of):
        seen[entrant] = first
    assert len(seen) == 5
    for first in seen.values():
        torch.testing.assert_close(first, next(iter(seen.values())))


def test_answers_that_end_with_their_first_token_are_left_out_and_counted(tmp_path: Path) -> None:
    session = open_session(tiny_llama(), tmp_path)
    maker = TaskMaker(session.model, session.tokenizer)
    rows = [row(60, answers=(answer,), seed=n) for n, answer in enumerate(("b", "by", "", ANSWER))]
    tasks = maker.make("places", rows)
    assert [task.row.answers[0] for task in measurable(tasks, maker)] == ["by", ANSWER]
    assert maker.left_out == {"their answers end with the first token, which no compression changes": 2}
    # Of an answer that is read as far as its first token there is no more.
    assert measurable(maker.make("places", rows, max_new_tokens=1), maker) == []


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


def test_a_row_without_an_answer_is_named() -> None:
    rows = [row(60), row(50, answers=())]
    with pytest.raises(DataError, match=r"'row-50-0' has no answer .* give rows with 'answers'"):
        check_answers(rows)
    check_answers(rows[:1])
