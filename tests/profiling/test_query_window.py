"""Tuning with the prompt's question as the observation window."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clusterprof import Profile
from clusterprof.data import Dataset
from clusterprof.data.records import row_from_record
from clusterprof.data.rows import make_dataset
from clusterprof.errors import ClusterprofError, DataError
from clusterprof.methods import StreamingLLM
from clusterprof.profile import Compression
from clusterprof.profiling import collect
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.evaluate import Evaluator
from clusterprof.runtime.selection import kept_positions
from tests.profiling.subjects import SMALL, capture, random_prompt
from tests.profiling.test_tune import SETTINGS, Listener, run, text
from tests.tiny import tiny_llama, tiny_tokenizer

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
(SIZE,) = SETTINGS["sizes"]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return tiny_llama(eos_token_id=None), tiny_tokenizer()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Capture]]:
    """The prompts that are run in full, and what that leaves."""
    seen = []

    def spy(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Capture:
        found = capture_prompt(model, input_ids, **options)
        seen.append((input_ids, found))
        return found

    monkeypatch.setattr(collect, "capture_prompt", spy)
    return seen


def questions(*lengths: int, context: int = 70) -> Dataset:
    """Rows whose question has so many characters, which are as many tokens."""
    records = [{"id": f"asks-{n}", "context": text(context + n), "question": text(n)} for n in lengths]
    rows = [row_from_record(record, "here") for record in records]
    return make_dataset("questions", "written here", "", rows)


def importance_by_hand(model: PreTrainedModel, input_ids: torch.Tensor, start: int) -> torch.Tensor:
    """What the tokens from ``start`` on pay to each one before, ``(layers, kv_heads, start)``."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = model(input_ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    mean = torch.stack(attentions)[:, 0, :, start:, :start].mean(dim=2)
    return mean.view(len(attentions), model.config.num_key_value_heads, -1, start).mean(dim=2)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/]{% endfor %}"
        "{% if add_generation_prompt %} answer:{% endif %}",
    ],
    ids=["plain", "chat"],
)
def test_the_question_of_each_prompt_observes(
    tmp_path: Path, captured: list[tuple[torch.Tensor, Capture]], template: str | None
) -> None:
    model, tokenizer = tiny_llama(eos_token_id=None), tiny_tokenizer()
    tokenizer.chat_template = template
    data = questions(7, 19, 4)
    result = run((model, tokenizer), tmp_path, data, window="query")
    assert len(captured) == 3
    for row, (input_ids, found) in zip(data.rows, captured, strict=True):
        characters = tokenizer.convert_ids_to_tokens(input_ids[0].tolist())
        prompt = "".join(characters)
        assert len(prompt) == len(characters)
        start = prompt.index("\n\n") + 2
        assert prompt[start:].startswith(row.question)
        assert (found.prompt_length, found.window) == (len(prompt), len(prompt) - start)
        expected = importance_by_hand(model, input_ids, start)
        torch.testing.assert_close(found.observation.importance, expected, atol=1e-6, rtol=1e-4)
        for other in (start - 1, start + 1):
            width = min(start, other)
            wrong = importance_by_hand(model, input_ids, other)[..., :width]
            assert not torch.allclose(found.observation.importance[..., :width], wrong, atol=1e-5)
    assert result.profile.compression.window == "query"
    result.profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == result.profile


def test_every_prompt_is_scored_with_its_own_window(loaded: Loaded) -> None:
    model, _ = loaded
    captures = [capture(model, random_prompt(60, seed=w), window=w, decode_tokens=4) for w in (3, 11, 23)]
    for method in (SMALL.method, StreamingLLM()):
        together = Evaluator(model, captures).scores(Compression(size=24, window="query", method=method))
        for found, scores in zip(captures, together, strict=True):
            alone = Compression(size=24, window=found.window, method=method)
            assert Evaluator(model, [found]).scores(alone) == [scores]
            kept = kept_positions(alone.method, found.observation, alone.size)
            assert kept[..., -found.window :].eq(torch.arange(60 - found.window, 60)).all()


def test_a_row_without_a_question_is_named_before_anything_runs(
    loaded: Loaded, tmp_path: Path, captured: list[object]
) -> None:
    first, second = questions(7, 9).rows
    blank = replace(second, id="no-question", question="", question_start=None)
    data = make_dataset("questions", "written here", "", [first, blank])
    listener = Listener()
    with pytest.raises(DataError) as caught:
        run(loaded, tmp_path, data, listener, window="query")
    assert "row 'no-question'" in str(caught.value)
    assert "'context' and 'question', or use --window N" in str(caught.value)
    assert captured == listener.events == []
    # Its own last tokens are nobody's question.
    assert run(loaded, tmp_path, data, window=8).samples["used"] == 2


def test_a_question_that_the_template_rewrites_is_told_as_such(
    tmp_path: Path, captured: list[object]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    with pytest.raises(DataError, match=r"row 'asks-7' it cannot be found .*rewrites.*use --window N"):
        run((tiny_llama(), tokenizer), tmp_path, questions(7), window="query")
    assert captured == []


def test_a_question_that_fills_the_size_is_left_out_and_named(
    loaded: Loaded, tmp_path: Path, captured: list[tuple[torch.Tensor, Capture]]
) -> None:
    listener = Listener()
    result = run(loaded, tmp_path, questions(SIZE, 7, SIZE - 1, SIZE + 30), listener, window="query")
    assert sorted(found.window for _, found in captured) == [7, SIZE - 1]
    dropped = {sample.id: sample.reason for sample in result.profile.search.dropped_samples}
    assert dropped.keys() == {f"asks-{SIZE}", f"asks-{SIZE + 30}"}
    assert dropped[f"asks-{SIZE}"] == (
        "Its question has 40 tokens and leaves nothing of --size 40 for the rest of the prompt; "
        "raise --size, or use --window N."
    )
    assert (result.samples["dropped"], result.samples["used"]) == (2, 2)
    told = [event for event in listener.events if event[0] == "captured" and event[3]]
    assert told == [("captured", name, False, reason) for name, reason in dropped.items()]


def test_a_question_that_is_the_whole_prompt_is_left_out(
    loaded: Loaded, tmp_path: Path, captured: list[tuple[torch.Tensor, Capture]]
) -> None:
    alone = row_from_record({"id": "alone", "context": "", "question": text(90)}, "here")
    data = make_dataset("questions", "written here", "", [alone, *questions(7).rows])
    result = run(loaded, tmp_path, data, window="query")
    assert [sample.id for sample in result.profile.search.dropped_samples] == ["alone"]
    assert [found.window for _, found in captured] == [7]


def test_questions_that_all_fill_the_size_are_an_error_before_anything_runs(
    loaded: Loaded, tmp_path: Path, captured: list[object]
) -> None:
    with pytest.raises(
        DataError,
        match=r"The question of every sampled prompt of .* takes all of --size 40 \(the shortest has \d+ ",
    ):
        run(loaded, tmp_path, questions(SIZE, SIZE + 5), window="query")
    assert captured == []


def test_a_cut_prompts_question_stays_the_window(
    tmp_path: Path, captured: list[tuple[torch.Tensor, Capture]]
) -> None:
    loaded = tiny_llama(eos_token_id=None, max_position_embeddings=75), tiny_tokenizer()
    data = questions(9, context=100)
    result = run(loaded, tmp_path, data, window="query")
    assert result.samples["cut"] == 1
    ((input_ids, found),) = captured
    prompt = "".join(loaded[1].convert_ids_to_tokens(input_ids[0].tolist()))
    assert prompt[-found.window :] == data.rows[0].question


def windows(captured: Sequence[tuple[torch.Tensor, Capture]]) -> list[int]:
    return [found.window for _, found in captured]


def test_captures_are_shared_by_equal_windows_only(
    loaded: Loaded, tmp_path: Path, captured: list[tuple[torch.Tensor, Capture]]
) -> None:
    data = questions(12)
    run(loaded, tmp_path, data, window=20)
    run(loaded, tmp_path, data, window=12)
    assert windows(captured) == [20, 12]
    run(loaded, tmp_path, data, window="query")
    assert windows(captured) == [20, 12]
    run(loaded, tmp_path, data, window=11)
    assert windows(captured) == [20, 12, 11]


def test_the_question_is_another_study_than_a_window_of_its_length(loaded: Loaded, tmp_path: Path) -> None:
    data = questions(12)
    results = [
        run(loaded, tmp_path, data, window=window, trials=2, storage=None) for window in (12, "query", 12)
    ]
    studies = [result.profile.search.study for result in results]
    assert studies[0] == studies[2] != studies[1]
    # The captures are the same, so the scores are.
    assert len({result.profile.results.tuning.value for result in results}) == 1
    run(loaded, tmp_path, data, window=12, trials=2, storage=None, study="mine")
    with pytest.raises(ClusterprofError, match=r"made with window 12, now query, so .*--study"):
        run(loaded, tmp_path, data, window="query", trials=2, storage=None, study="mine")
