"""The comparison with kvpress, as far as it goes without kvpress: what is measured, compared and printed."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from benchmarks.kvpress import environment
from benchmarks.kvpress.exchange import (
    PLAIN,
    SNAPKV,
    PromptRuns,
    Run,
    Task,
    read_runs,
    read_task,
    write_runs,
    write_task,
)
from benchmarks.kvpress.measure import kept_positions, measure
from benchmarks.kvpress.ours import CLUSTERATTN, measure_ours
from benchmarks.kvpress.table import agreement_text, compare_kept, numbers, render, summarise
from clusterprof.errors import ClusterprofError
from clusterprof.runtime.transformers_names import CACHE
from tests.tiny import tiny_llama

PROMPTS = [
    torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (60, 71)
]


def task_of(prompts: list[list[int]] = PROMPTS, *, size: int = 24) -> Task:
    return Task(
        model="folder", prompts=prompts, size=size, window=8, kernel_size=5, decode_tokens=4, threads=1
    )


def run_of(
    *, prefill_s: float = 1.0, decode_s: float = 1.0, tokens: int = 5, kept: list[int] | None = None
) -> Run:
    return Run(prefill_s, decode_s, list(range(tokens)), [[kept]] if kept else [])


@given(st.data())
def test_the_ratio_makes_kvpress_keep_exactly_size(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 200_000))
    size = data.draw(st.integers(1, length - 1))
    ratio = task_of(size=size).compression_ratio(length)
    assert 0 <= ratio < 1
    # kvpress.utils.compute_n_kept of 0.5.5
    assert max(1, int(length * (1 - ratio))) == size


def test_task_and_runs_survive_the_files(tmp_path: Path) -> None:
    write_task(tmp_path / "task.json", task_of())
    assert read_task(tmp_path / "task.json") == task_of()
    runs: list[PromptRuns] = [{PLAIN: run_of(), SNAPKV: run_of(kept=[0, 2])}]
    write_runs(tmp_path / "runs.json", runs)
    assert read_runs(tmp_path / "runs.json") == runs


def test_kept_positions_are_found_whatever_their_order() -> None:
    full = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0))
    chosen = torch.stack(
        [torch.randperm(50, generator=torch.Generator().manual_seed(i))[:12] for i in range(3)]
    )
    keys = torch.stack([full[head, chosen[head]] for head in range(3)])
    assert torch.equal(kept_positions(keys, full), chosen.sort(dim=-1).values)


@pytest.mark.parametrize("change", ["other", "twice"])
def test_a_cache_of_other_tokens_is_refused(change: str) -> None:
    full = torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))
    keys = full[:, :6].clone()
    keys[0, 5] = keys[0, 4] if change == "twice" else keys[0, 5] + 1e-3
    with pytest.raises(RuntimeError, match="distinct tokens"):
        kept_positions(keys, full)


def test_measured_tokens_are_those_of_generate_and_the_kept_sets_are_whole() -> None:
    model = tiny_llama()
    runs = measure_ours(task_of(), model)
    assert [set(prompt) for prompt in runs] == [{PLAIN, SNAPKV, CLUSTERATTN}] * 2
    for tokens, prompt in zip(PROMPTS, runs, strict=True):
        ids = torch.tensor([tokens])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, do_sample=False
        )
        assert prompt[PLAIN].tokens == expected[0, len(tokens) :].tolist()
        assert prompt[PLAIN].kept == []
        for name in (SNAPKV, CLUSTERATTN):
            window = list(range(len(tokens) - 8, len(tokens)))
            heads = [head for layer in prompt[name].kept for head in layer]
            assert len(heads) == 2 * 2
            assert all(len(set(head)) == 24 and head[-8:] == window for head in heads)
            assert prompt[name].prefill_s > 0
            assert prompt[name].decode_s > 0


def test_a_side_that_keeps_another_number_is_refused() -> None:
    model = tiny_llama()

    def forward(tokens: Tensor, cache: DynamicCache, position: int) -> Tensor:
        logits: Tensor = model(tokens, **{CACHE: cache}).logits
        return logits[:, -1]

    with pytest.raises(RuntimeError, match="60 tokens were kept where 24 were asked for"):
        measure(task_of(), "nobody", model, forward, {SNAPKV: lambda length: nullcontext()})


def test_table() -> None:
    runs: list[PromptRuns] = [
        {PLAIN: run_of(prefill_s=2, decode_s=2), SNAPKV: run_of(prefill_s=3, decode_s=1)},
        {PLAIN: run_of(prefill_s=4, decode_s=1), SNAPKV: run_of(prefill_s=4, decode_s=0.5)},
        {PLAIN: run_of(prefill_s=4, decode_s=4, tokens=6), SNAPKV: run_of(prefill_s=2, decode_s=0.4)},
    ]
    row = summarise("ours", runs, SNAPKV, lambda index, tokens: index == 2 and len(tokens) == 5)
    assert row.full_prefill_s == 4
    assert row.overheads == (1.5, 1.0, 0.5)
    # 4, 8 and 10 tokens/s compressed; 2, 4 and 5/4 full
    assert (row.speed, row.full_speed) == (8, 2)
    assert (row.right, row.full_right) == (1, 0)
    head, rule, line = render([row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line == "| ours | 4.00 | 1.000 (0.50 to 1.50) | 8.0 | 2.0 | 4.00 | 1 of 3 | 0 of 3 |"


def test_agreement_counts_what_lies_at_the_ends_of_the_prefix() -> None:
    # Prefix 0 to 51: a kernel of 5 reaches over its ends at 0, 1, 50 and 51.
    theirs: list[PromptRuns] = [
        {SNAPKV: Run(1, 1, [7, 8], [[[0, 5, 9, 52], [3, 4, 5, 52]], [[10, 20, 30, 52], [2, 3, 4, 52]]])}
    ]
    ours: list[PromptRuns] = [
        {SNAPKV: Run(1, 1, [7, 8], [[[0, 5, 50, 52], [3, 4, 5, 52]], [[10, 21, 51, 52], [2, 3, 4, 52]]])}
    ]
    agreement = compare_kept(theirs, ours, SNAPKV, task_of([PROMPTS[0]]))
    assert (agreement.heads, agreement.equal_heads) == (4, 2)
    assert (agreement.kept, agreement.shared, agreement.at_edges) == (16, 13, 2)
    assert (agreement.prompts, agreement.equal_texts) == (1, 1)
    text = agreement_text(agreement)
    assert "Of the 16 positions that SnapKVPress kept, SnapKV kept 13 (81.250%)" in text
    assert "Of the 3 others, 2 gave way" in text
    assert "1 have another cause" in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 7391.", {"7391"}),
        ("1,234,567 or 42", {"1234567", "42"}),
        ("12,34", {"12", "34"}),
        ("none", set()),
    ],
)
def test_numbers(text: str, found: set[str]) -> None:
    assert numbers(text) == found


def test_an_environment_is_built_once_and_a_half_built_one_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(environment, "_run", commands.append)
    folder = tmp_path / "new" / "environment"
    python = environment.build(folder)
    assert python.is_relative_to(folder)
    assert commands[0] == [sys.executable, "-m", "venv", str(folder)]
    assert commands[1][0] == str(python)
    assert commands[1][-1] == "kvpress==0.5.5"
    assert environment.build(folder) == python
    assert len(commands) == 2

    def killed(command: list[str]) -> None:
        raise KeyboardInterrupt

    half = tmp_path / "half"
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_run", killed)
        with pytest.raises(KeyboardInterrupt):
            environment.build(half)
    (half / "rest").touch()
    environment.build(half)
    assert len(commands) == 4
    assert not (half / "rest").exists()


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(ClusterprofError, match="holds something else"):
        environment.build(tmp_path)
    assert (tmp_path / "pyvenv.cfg").exists()


def test_a_failed_command_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ClusterprofError, match=r"kvpress\.worker.*failed with exit code 3"):
        environment.run_worker(python, tmp_path / "task.json", tmp_path / "runs.json")
