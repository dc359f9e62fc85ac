from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.errors import CompressionError
from clusterprof.runtime.padding import Rows, alike, left_padding


@given(
    paddings=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    dtype=st.sampled_from(["bool", "int64", "float32"]),
)
def test_counts_the_zeros_at_the_start(paddings: list[int], dtype: str) -> None:
    mask = torch.tensor(
        [[0] * padded + [1] * (9 - padded) for padded in paddings], dtype=getattr(torch, dtype)
    )
    found = left_padding(mask, len(paddings), 9)
    assert found == paddings


def test_no_mask_is_no_padding() -> None:
    assert left_padding(None, 2, 5) == [0, 0]


@pytest.mark.parametrize(
    "row",
    [[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 1, 0, 1]],
    ids=["right", "both sides", "middle", "left and middle"],
)
def test_padding_elsewhere_is_refused(row: list[int]) -> None:
    with pytest.raises(CompressionError, match="needs padding on the left"):
        left_padding(torch.tensor([[1, 1, 1, 1], row]), 2, 4)


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(CompressionError, match="A row of the batch is empty"):
        left_padding(torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), 2, 4)


def test_a_row_of_an_unfinished_prompt_may_be_all_padding() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 0]])
    assert left_padding(mask, 2, 3, unfinished=True) == [1, 3]
    additive = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min)
    assert left_padding(additive, 1, 3, unfinished=True) == [3]
    for row in ([1, 1, 0], [1, 0, 1]):
        with pytest.raises(CompressionError, match="needs padding on the left"):
            left_padding(torch.tensor([row]), 1, 3, unfinished=True)


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (4,), (2, 1, 4, 5)], ids=str)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CompressionError, match=r"shape \(batch, 4\)"):
        left_padding(torch.ones(shape), 2, 4)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("in_dict", [True, False])
def test_masks_as_attention_takes_them_are_read(kind: str, in_dict: bool) -> None:
    paddings = torch.tensor([2, 0])
    positions = torch.arange(5)
    seen = (positions <= positions[:, None]) & (positions >= paddings[:, None, None, None])
    mask = seen if kind == "boolean" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    assert mask.shape == (2, 1, 5, 5)
    found = left_padding({"full_attention": mask, "sliding_attention": None} if in_dict else mask, 2, 5)
    assert found == [2, 0]


def test_a_dict_without_a_mask_is_no_padding() -> None:
    assert left_padding({"full_attention": None}, 1, 4) == [0]


def test_one_mask_may_serve_all_rows() -> None:
    assert left_padding(torch.tensor([[0, 1, 1]]), 3, 3) == [1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=8))
def test_neighbours_that_are_alike_go_together(rows: list[tuple[int, int]]) -> None:
    padding, windows = [row[0] for row in rows], [row[1] for row in rows]
    groups = alike(padding, windows)
    assert [(g.padding, g.window) for g in groups for _ in padding[g.of_batch]] == rows
    assert [row for g in groups for row in range(len(rows))[g.of_batch]] == list(range(len(rows)))
    assert all((a.padding, a.window) != (b.padding, b.window) for a, b in pairwise(groups))


def test_equal_rows_are_one_group() -> None:
    assert alike([0, 0, 0], [8, 8, 8]) == [Rows(slice(0, 3), 0, 8)]
