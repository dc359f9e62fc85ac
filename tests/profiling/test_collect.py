"""What `capture_all` asks of a capture for the methods that will choose from it, and what it finds in the store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.data import Message, Prompt, Row, build_prompt
from clusterprof.methods import H2O, NGram
from clusterprof.profiling import collect
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.capture_files import LIMIT_BYTES
from clusterprof.profiling.collect import Captured, capture_all
from clusterprof.profiling.origin import Origin
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime.selection import kept_positions
from tests.tiny import tiny_llama, tiny_tokenizer

TEXTS = ["the red door has key 417; which key has the red door?", "one, two and three 4 five, six?"]
SETTINGS = TuneSettings(sizes=(24,), window=8, decode_tokens=3)
SUMS = H2O.needs


class Silent:
    def __init__(self) -> None:
        self.limits: list[int] = []

    def captured(self, prompt: Prompt, seconds: float, error: str | None) -> None:
        assert error is None

    def over_limit(self, limit_bytes: int) -> None:
        self.limits.append(limit_bytes)


SILENT = Silent()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of every capture that is made, not found."""
    seen: list[dict[str, Any]] = []

    def spy(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> Capture:
        seen.append(options)
        return capture_prompt(model, input_ids, **options)

    monkeypatch.setattr(collect, "capture_prompt", spy)
    return seen


def collected(
    folder: Path,
    texts: Sequence[str] = TEXTS,
    listener: Any = SILENT,
    limit_bytes: int = LIMIT_BYTES,
    **options: Any,
) -> Captured:
    model, tokenizer = tiny_llama(eos_token_id=None), tiny_tokenizer()
    rows = [Row(text, (Message("user", text),)) for text in texts]
    prompts = [build_prompt(row, tokenizer, max_tokens=400) for row in rows]
    store = CaptureStore(folder, Origin.of(model, tokenizer, decode_tokens=3), limit_bytes)
    return capture_all(model, tokenizer, prompts, SETTINGS, store, listener, **options)


def test_words_are_always_there(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    # The second time from the files.
    for _ in range(2):
        result = collected(tmp_path)
        for prompt, capture in zip(result.prompts, result.captures, strict=True):
            text = tiny_tokenizer().decode(list(prompt.input_ids))
            assert capture.word_starts is not None
            found = [text[i] for i in capture.word_starts.nonzero().flatten().tolist()]
            assert "".join(found).startswith(("t r d h k 4;", "o, t a t"))
            assert capture.observation.accumulated is None
            assert kept_positions(NGram(), capture.observation, 24).shape == (2, 2, 24)
    assert [options["accumulate"] for options in runs] == [False, False]


def test_sums_are_made_for_methods_that_need_them(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    collected(tmp_path)
    result = collected(tmp_path, needs=SUMS)
    # One without the sums is of no use, one with them serves everyone.
    assert [options["accumulate"] for options in runs] == [False] * 2 + [True] * 2
    for found in (result, collected(tmp_path), collected(tmp_path, needs=SUMS)):
        for capture in found.captures:
            assert capture.observation.accumulated is not None
            assert kept_positions(H2O(), capture.observation, 24).shape == (2, 2, 24)
    assert len(runs) == 4


def test_more_captures_than_may_be_are_all_kept_and_it_is_said_once(
    tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    listener = Silent()
    first = collected(tmp_path, listener=listener, limit_bytes=1)
    assert listener.limits == [1]
    # Found again, so nothing was deleted; and that is said of captures that are found, too.
    again = collected(tmp_path, listener=listener, limit_bytes=1)
    assert len(runs) == len(first.captures) == len(again.captures) == len(TEXTS)
    assert listener.limits == [1, 1]
    collected(tmp_path, listener=listener)
    assert listener.limits == [1, 1]


def test_answers_are_as_long_as_the_store_says(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    assert [len(capture.log_probs) for capture in collected(tmp_path).captures] == [3, 3]
    assert [options["decode_tokens"] for options in runs] == [3, 3]
