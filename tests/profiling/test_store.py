import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from clusterprof.errors import ClusterprofError
from clusterprof.profiling import store as store_module
from clusterprof.profiling.capture import Capture, LayerCapture
from clusterprof.profiling.capture_files import VERSION
from clusterprof.profiling.replay import Replay, replay
from clusterprof.profiling.store import CaptureStore
from clusterprof.runtime.selection import kept_positions
from tests.profiling.subjects import ORIGIN, SMALL, WINDOW, capture
from tests.tiny import tiny_gemma3, tiny_llama

IDS = (5, 6, 7)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_gemma3()


@pytest.fixture(scope="module")
def found(model: PreTrainedModel) -> Capture:
    return capture(model, decode_tokens=4)


def store_in(folder: Path, **options: Any) -> CaptureStore:
    return CaptureStore(folder / "captures", ORIGIN, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def assert_equal_captures(found: Capture, expected: Capture) -> None:
    assert (found.prompt_length, found.window) == (expected.prompt_length, expected.window)
    assert found.scaling == expected.scaling
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert (found.word_starts is None) == (expected.word_starts is None)
    if expected.word_starts is not None:
        assert torch.equal(found.word_starts, expected.word_starts)  # type: ignore[arg-type]
    assert list(found.layers) == list(expected.layers)
    for i, layer in expected.layers.items():
        for field in fields(LayerCapture):
            ours, theirs = getattr(found.layers[i], field.name), getattr(layer, field.name)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    assert list(found.sliding) == list(expected.sliding)
    for i, tensors in expected.sliding.items():
        assert all(torch.equal(a, b) for a, b in zip(found.sliding[i], tensors, strict=True))


def test_round_trip(tmp_path: Path, model: PreTrainedModel, found: Capture) -> None:
    store = store_in(tmp_path)
    assert store.load(IDS, WINDOW) is None
    assert not store.folder.exists()
    saved, loaded = store.save(IDS, found), store_in(tmp_path).load(IDS, WINDOW)
    assert loaded is not None
    for other in (saved, loaded):
        assert_equal_captures(other, found)
    kept = kept_positions(SMALL.method, found.observation, SMALL.size)
    first, second = (replay(model, each, kept) for each in (found, loaded))
    assert all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(Replay))
    assert names(tmp_path) == [store.path(IDS, WINDOW).name]


def test_words_survive(tmp_path: Path, model: PreTrainedModel) -> None:
    found = capture(model, decode_tokens=2, word_starts=torch.arange(60) % 3 == 0)
    loaded = store_in(tmp_path).save(IDS, found)
    assert_equal_captures(loaded, found)
    assert loaded.word_starts is not None
    assert loaded.word_starts.dtype == torch.bool


def test_one_with_sums_serves_those_without_and_not_the_other_way(
    tmp_path: Path, model: PreTrainedModel, found: Capture
) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    assert store.load(IDS, WINDOW, accumulated=True) is None
    summed = capture(model, decode_tokens=4, accumulate=True)
    assert_equal_captures(store.save(IDS, summed), summed)
    for accumulated in (False, True):
        loaded = store.load(IDS, WINDOW, accumulated=accumulated)
        assert loaded is not None
        assert_equal_captures(loaded, summed)
    # Damaged, it is none, and the other one is still there.
    store.path(IDS, WINDOW, accumulated=True).write_bytes(b"garbage")
    assert store.load(IDS, WINDOW, accumulated=True) is None
    loaded = store.load(IDS, WINDOW)
    assert loaded is not None
    assert_equal_captures(loaded, found)


def test_layers_come_back_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    # As text, 10 would come before 2.
    found = capture(tiny_llama(num_hidden_layers=11, hidden_size=16, num_attention_heads=2), decode_tokens=1)
    loaded = store_in(tmp_path).save(IDS, found)
    assert list(loaded.layers) == list(range(11))
    assert torch.equal(loaded.observation.importance, found.observation.importance)


def test_bfloat16_survives(tmp_path: Path) -> None:
    found = capture(tiny_llama().bfloat16(), decode_tokens=2)
    assert_equal_captures(store_in(tmp_path).save(IDS, found), found)


def test_other_prompts_and_other_models_are_not_found(tmp_path: Path, found: Capture) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    assert store.load((5, 6), WINDOW) is None
    assert store.load((7, 6, 5), WINDOW) is None
    assert store.load((56, 7), WINDOW) is None
    others: list[dict[str, Any]] = [
        {"weights": "sha256:other"},
        {"vocabulary": "sha256:other"},
        {"decode_tokens": 5},
    ]
    for other in others:
        assert CaptureStore(store.folder, replace(ORIGIN, **other)).load(IDS, WINDOW) is None
    assert CaptureStore(store.folder, replace(ORIGIN, model="a copy")).load(IDS, WINDOW) is not None


def test_every_window_has_a_capture_of_its_own(
    tmp_path: Path, model: PreTrainedModel, found: Capture
) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    wide = capture(model, window=20, decode_tokens=4)
    assert store.load(IDS, 20) is None
    store.save(IDS, wide)
    for expected in (found, wide):
        loaded = store.load(IDS, expected.window)
        assert loaded is not None
        assert_equal_captures(loaded, expected)
    # The digits of the window and of the prompt do not run together.
    assert len({store.path((5, 6), 81), store.path((15, 6), 8), store.path((5, 6), 8)}) == 3


def test_a_capture_is_replaced_by_a_newer_one(tmp_path: Path, model: PreTrainedModel, found: Capture) -> None:
    store = store_in(tmp_path)
    mapped = store.save(IDS, capture(model, decode_tokens=2))
    assert_equal_captures(store.save(IDS, found), found)
    # What was mapped before stays readable.
    assert mapped.log_probs.shape[0] == 2
    assert bool(mapped.log_probs.isfinite().all())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_none_and_can_be_written_again(
    tmp_path: Path, found: Capture, share: float
) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    whole = store.path(IDS, WINDOW).read_bytes()
    store.path(IDS, WINDOW).write_bytes(whole[: int(len(whole) * share)])
    assert store.load(IDS, WINDOW) is None
    assert_equal_captures(store.save(IDS, found), found)


@pytest.mark.parametrize(
    "content",
    [b"garbage", b"\xff" * 4096, b"{}", (2**60).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"{}"],
    ids=["text", "ones", "json", "header of an exabyte", "no tensors"],
)
def test_garbage_is_none(tmp_path: Path, content: bytes) -> None:
    store = store_in(tmp_path)
    store.folder.mkdir()
    store.path(IDS, WINDOW).write_bytes(content)
    assert store.load(IDS, WINDOW) is None


@pytest.mark.parametrize("place", [0.3, 0.6, 0.95])
def test_one_changed_bit_is_noticed_though_every_number_is_finite(
    tmp_path: Path, found: Capture, place: float
) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    path = store.path(IDS, WINDOW)
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    # The lowest bit of one of the float32 numbers.
    content[start + int((len(content) - start) * place) // 4 * 4] ^= 1
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
    assert store.load(IDS, WINDOW) is None
    assert_equal_captures(store.save(IDS, found), found)


def test_a_changed_header_is_noticed(tmp_path: Path, found: Capture) -> None:
    store = store_in(tmp_path)
    store.save(IDS, found)
    path = store.path(IDS, WINDOW)
    whole = path.read_bytes()
    for before, after in ((rb"\"window\":8", rb"\"window\":9"), (b"layer.1.", b"layer.2.")):
        assert before in whole
        path.write_bytes(whole.replace(before, after))
        assert store.load(IDS, WINDOW) is None
    path.write_bytes(whole)
    assert store.load(IDS, WINDOW) is not None


HEADER = {"version": VERSION, "model": "m", "prompt_length": 60, "window": 8, "decoded": 4, "scaling": 0.25}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (["weight"], None),
        (["weight"], {"format": "pt"}),
        (["tokens", "log_probs"], {"capture": "not json"}),
        (["tokens", "log_probs"], {"capture": "[]"}),
        (["tokens", "log_probs"], {"capture": json.dumps({**HEADER, "window": None})}),
        (["tokens"], {"capture": json.dumps(HEADER)}),
        (["tokens", "log_probs", "layer.0.keys"], {"capture": json.dumps(HEADER)}),
        (["tokens", "log_probs", "layer.x.keys"], {"capture": json.dumps(HEADER)}),
        (["tokens", "log_probs", "layer."], {"capture": json.dumps(HEADER)}),
        (["tokens", "log_probs", "sliding.0.keys"], {"capture": json.dumps(HEADER)}),
        (["tokens", "log_probs"], {"capture": json.dumps(HEADER)}),
    ],
    ids=str,
)
def test_a_foreign_file_is_none(tmp_path: Path, tensors: list[str], metadata: dict[str, str] | None) -> None:
    store = store_in(tmp_path)
    store.folder.mkdir()
    content = {name: torch.zeros(2) for name in tensors}
    if metadata is not None and "capture" in metadata:
        # So that what it lacks is all that is wrong with it.
        metadata = {**metadata, "checksum": store_module._checksum(metadata["capture"], content)}
    save_file(content, store.path(IDS, WINDOW), metadata=metadata)
    assert store.load(IDS, WINDOW) is None


def test_a_folder_in_the_files_place_is_none(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.path(IDS, WINDOW).mkdir(parents=True)
    assert store.load(IDS, WINDOW) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("IoError 28")])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, found: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = store_in(tmp_path)
    store.save((1,), found)

    def half_written(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(store_module, "save_file", half_written)
    with pytest.raises(ClusterprofError, match="capture of a prompt cannot be written") as caught:
        store.save(IDS, found)
    assert "CLUSTERPROF_CACHE" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == [store.path((1,), WINDOW).name]
    assert store.load((1,), WINDOW) is not None


def test_ctrl_c_while_writing_leaves_nothing(
    tmp_path: Path, found: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store_in(tmp_path).save(IDS, found)
    assert names(tmp_path) == []


def test_the_file_appears_by_a_rename_alone(
    tmp_path: Path, found: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store_in(tmp_path).save(IDS, found)
    assert store_in(tmp_path).load(IDS, WINDOW) is None
    assert names(tmp_path) == []


def test_a_file_in_the_folders_place_is_one_sentence(tmp_path: Path, found: Capture) -> None:
    (tmp_path / "captures").write_text("in the way")
    with pytest.raises(ClusterprofError, match="cannot be written"):
        store_in(tmp_path).save(IDS, found)


def age(store: CaptureStore, ids: tuple[int, ...], seconds: int) -> None:
    moment = store.path(ids, WINDOW).stat().st_mtime - seconds
    os.utime(store.path(ids, WINDOW), (moment, moment))


def test_the_least_recently_used_go_when_there_are_too_many(tmp_path: Path, found: Capture) -> None:
    store_in(tmp_path).save((0,), found)
    size = store_in(tmp_path).path((0,), WINDOW).stat().st_size
    store = store_in(tmp_path, limit_bytes=3 * size + 100)
    for i in (1, 2):
        store.save((i,), found)
    for i, seconds in ((0, 30), (1, 20), (2, 10)):
        age(store, (i,), seconds)
    # Used again, so 1 is the oldest now.
    assert store.load((0,), WINDOW) is not None
    store.save((3,), found)
    assert [i for i in range(4) if store.path((i,), WINDOW).exists()] == [0, 2, 3]


def test_one_that_is_larger_than_the_limit_is_kept_alone(tmp_path: Path, found: Capture) -> None:
    store_in(tmp_path).save((0,), found)
    store = store_in(tmp_path, limit_bytes=1)
    assert_equal_captures(store.save((1,), found), found)
    assert names(tmp_path) == [store.path((1,), WINDOW).name]


def test_what_is_held_is_kept_whatever_the_limit(tmp_path: Path, found: Capture) -> None:
    before = store_in(tmp_path)
    for i in (0, 1):
        before.save((i,), found)
    size = before.path((0,), WINDOW).stat().st_size
    store = store_in(tmp_path, limit_bytes=size)
    assert store.held_bytes == 0
    loaded = store.load((0,), WINDOW)
    saved = [store.save((i,), found) for i in (2, 3)]
    # Found or made by this run; the one that nobody holds had to go.
    assert [i for i in range(4) if store.path((i,), WINDOW).exists()] == [0, 2, 3]
    assert store.held_bytes == 3 * size
    assert loaded is not None
    del loaded, saved
    assert store.held_bytes == 0
    last = store.save((4,), found)
    assert names(tmp_path) == [store.path((4,), WINDOW).name]
    assert_equal_captures(last, found)


def test_a_file_that_another_process_deletes_meanwhile_does_no_harm(tmp_path: Path, found: Capture) -> None:
    store = store_in(tmp_path, limit_bytes=1)
    store.folder.mkdir()
    # Listed, and gone when it is looked at.
    store.path((1,), WINDOW).symlink_to(tmp_path / "nowhere")
    assert_equal_captures(store.save(IDS, found), found)


def test_what_a_killed_process_left_half_written_counts_and_goes_first(
    tmp_path: Path, found: Capture
) -> None:
    store = store_in(tmp_path)
    store.save((0,), found)
    size = store.path((0,), WINDOW).stat().st_size
    leftover = store.path((1,), WINDOW).with_suffix(f".{'0' * 32}.tmp")
    leftover.write_bytes(bytes(size))
    os.utime(leftover, (1, 1))
    store_in(tmp_path, limit_bytes=2 * size + 100).save(IDS, found)
    assert sorted(names(tmp_path)) == sorted([store.path((0,), WINDOW).name, store.path(IDS, WINDOW).name])


def test_nothing_else_in_the_folder_counts_or_goes(tmp_path: Path, found: Capture) -> None:
    store = store_in(tmp_path, limit_bytes=1)
    store.folder.mkdir()
    # One is not a capture, the other one may still be written by somebody.
    notes, busy = store.folder / "notes.txt", store.path((1,), WINDOW).with_suffix(f".{'0' * 32}.tmp")
    for file in (notes, busy):
        file.write_bytes(bytes(1000))
    os.utime(notes, (1, 1))
    store.save(IDS, found)
    assert notes.exists()
    assert busy.exists()


def test_a_capture_that_is_gone_at_once_is_used_from_memory(
    tmp_path: Path, found: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_load", lambda path: None)
    assert store_in(tmp_path).save(IDS, found) is found
