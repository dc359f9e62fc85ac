from collections.abc import Callable
from typing import Any

import pytest
import torch

from clusterprof.benchmarking import measure as module
from clusterprof.benchmarking.measure import Measurements, measure
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import subjects
from clusterprof.errors import CompressionError, UnsupportedModelError
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.runtime.cache import GROWTH
from tests.tiny import tiny_gemma3, tiny_llama, tiny_mistral

SIZE = 24
SUBJECTS = subjects(
    Compression(size=SIZE, window=8, method=ClusterAttn(num_block=2, theta=0.02)), tuned=False
)
COMPRESSED = ("ours", "snapkv", "streaming_llm", "topk")
SETTINGS = BenchSettings(tokens=(60, 90), batch_sizes=(1, 3), new_tokens=4, repeats=2)
PROMPTS = torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(0))
# Two layers, 2 KV heads of 16 numbers, keys and values, float32.
BYTES_PER_TOKEN = 2 * 2 * 16 * 2 * 4


class Listener:
    """Notes what it is told, and presses Ctrl-C when part number `interrupt` starts."""

    def __init__(self, interrupt: int | None = None) -> None:
        self.interrupt = interrupt
        self.parts: int | None = None
        self.told: list[str] = []
        self.ended = False

    def begin(self, measurements: int) -> None:
        self.parts = measurements

    def measuring(self, what: str) -> None:
        if len(self.told) == self.interrupt:
            raise KeyboardInterrupt
        self.told.append(what)

    def end(self) -> None:
        self.ended = True


def measured(
    settings: BenchSettings = SETTINGS, listener: Listener | None = None, model: Any = None
) -> Measurements:
    return measure(model or tiny_llama(), PROMPTS, SUBJECTS, settings, listener or Listener())


@pytest.fixture(scope="module")
def usual() -> tuple[Measurements, Listener]:
    listener = Listener()
    return measured(listener=listener), listener


def fail_for(
    monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[[Any], bool], error: Exception
) -> None:
    """Let a forward of the benchmark fail for some of its arguments."""
    forward = getattr(module, name)

    def failing(model: Any, argument: Any, *rest: Any) -> Any:
        if fails(argument):
            raise error
        return forward(model, argument, *rest)

    monkeypatch.setattr(module, name, failing)


def test_everything_is_measured_as_often_as_asked(usual: tuple[Measurements, Listener]) -> None:
    found, listener = usual
    assert found.prefills.keys() == {
        (tokens, 1, name) for tokens in (60, 90) for name in ("full", *COMPRESSED)
    }
    assert found.decodes.keys() == {
        (tokens, batch, name)
        for tokens in (60, 90)
        for batch in (1, 3)
        for name in ("full", "full_preallocated", *COMPRESSED)
    }
    for samples in [*found.prefills.values(), *found.decodes.values()]:
        assert len(samples.seconds) == 2
        assert min(samples.seconds) > 0
        assert samples.error is None
    assert listener.parts == len(listener.told)
    assert listener.ended
    assert not found.interrupted


def test_turns_alternate_between_the_subjects() -> None:
    listener = Listener()
    measured(BenchSettings(tokens=(60,), new_tokens=1, repeats=2), listener)
    assert listener.told[0] == "60 tokens, full cache: prefill's memory"
    one_round = listener.told[5:16]
    assert listener.told[16:] == one_round
    assert one_round[:5] == [
        "60 tokens, full cache: prefill",
        "60 tokens, full cache: decoding at batch 1",
        "60 tokens, full, preallocated: decoding at batch 1",
        "60 tokens, ClusterAttn: prefill",
        "60 tokens, ClusterAttn: decoding at batch 1",
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_kv_bytes_are_those_of_the_tokens_kept(usual: tuple[Measurements, Listener], batch: int) -> None:
    found, _ = usual
    full, roomy = found.decodes[60, batch, "full"], found.decodes[60, batch, "full_preallocated"]
    # One step to warm up, four that are timed.
    assert full.kv_bytes_start == batch * 60 * BYTES_PER_TOKEN
    assert full.kv_bytes_end == batch * 65 * BYTES_PER_TOKEN
    assert roomy.kv_bytes_start == roomy.kv_bytes_end == full.kv_bytes_end
    for name in COMPRESSED:
        samples = found.decodes[60, batch, name]
        assert samples.kv_bytes_start == batch * SIZE * BYTES_PER_TOKEN
        assert samples.kv_bytes_end == batch * (SIZE + GROWTH) * BYTES_PER_TOKEN
        assert found.prefills[60, 1, name].kv_bytes_end == SIZE * BYTES_PER_TOKEN


def test_a_compressed_prefill_holds_less() -> None:
    # Wide KV heads and a narrow model, so that the cache is most of what is there.
    model = tiny_llama(num_hidden_layers=6, num_key_value_heads=4, hidden_size=16, intermediate_size=16)
    found = measured(BenchSettings(tokens=(90,), new_tokens=1, repeats=1), model=model)
    bytes_per_token = 6 * 4 * 16 * 2 * 4
    full, ours = found.prefills[90, 1, "full"], found.prefills[90, 1, "topk"]
    assert full.peak_bytes is not None
    assert ours.peak_bytes is not None
    assert full.peak_bytes > 90 * bytes_per_token
    # All layers but the one at work are down to the size.
    assert full.peak_bytes - ours.peak_bytes > 3 / 6 * (90 - SIZE) * bytes_per_token


def test_a_prompt_that_fits_is_measured_too() -> None:
    found = measured(BenchSettings(tokens=(20, 60), new_tokens=2, repeats=1))
    assert found.decodes[20, 1, "ours"].kv_bytes_start == 20 * BYTES_PER_TOKEN


def test_every_row_can_be_read() -> None:
    settings = BenchSettings(tokens=(60,), batch_sizes=(1, 3), new_tokens=2, repeats=1, prefill_batch=True)
    listener = Listener()
    found = measured(settings, listener)
    assert {rows for _, rows, _ in found.prefills} == {1, 3}
    assert found.prefills[60, 3, "ours"].kv_bytes_end == 3 * SIZE * BYTES_PER_TOKEN
    assert found.decodes[60, 3, "ours"].kv_bytes_start == 3 * SIZE * BYTES_PER_TOKEN
    assert listener.parts == len(listener.told)


def test_sliding_layers_are_measured_as_they_are() -> None:
    found = measured(BenchSettings(tokens=(60,), new_tokens=2, repeats=1), model=tiny_gemma3())
    per_layer = BYTES_PER_TOKEN // 2
    # A sliding layer of 32 keeps 31 tokens, whatever the full one does.
    assert found.decodes[60, 1, "full"].kv_bytes_start == (31 + 60) * per_layer
    assert found.decodes[60, 1, "full_preallocated"].kv_bytes_start == (31 + 63) * per_layer
    assert found.decodes[60, 1, "ours"].kv_bytes_start == (31 + SIZE) * per_layer


@pytest.mark.parametrize("part", [0, 3, 5, 6, 7, 15, 21, 30])
def test_ctrl_c_leaves_what_was_measured(part: int) -> None:
    settings = BenchSettings(tokens=(30, 60), new_tokens=1, repeats=1)
    model, listener = tiny_llama(), Listener(interrupt=part)
    found = measured(settings, listener, model)
    assert found.interrupted
    assert not listener.ended
    assert len(listener.told) == part
    done = [len(samples.seconds) for samples in [*found.prefills.values(), *found.decodes.values()]]
    memory = [samples for samples in found.prefills.values() if samples.peak_bytes is not None]
    assert sum(done) + len(memory) == part
    # The context of the method at work was left.
    assert model.config._attn_implementation == "sdpa"


def test_a_prefill_that_runs_out_of_memory_costs_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    fail_for(monkeypatch, "prefill", lambda prompt: prompt.shape[1] == 90, error)
    listener = Listener()
    found = measured(listener=listener)
    for name in ("full", "full_preallocated", *COMPRESSED):
        assert found.decodes[60, 3, name].error is None
        assert found.decodes[90, 3, name].error == "out of memory"
        assert not found.decodes[90, 3, name].seconds
    assert found.prefills[90, 1, "full"].error == "out of memory"
    assert listener.parts == len(listener.told)


def test_a_batch_that_runs_out_of_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "decode", lambda prefilled: prefilled.tokens.shape[0] == 3, MemoryError("no more"))
    found = measured()
    assert found.decodes[60, 3, "full"].error == "out of memory"
    assert len(found.decodes[60, 1, "full"].seconds) == 2


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), UnsupportedModelError("a model"), CompressionError("not finite")]
)
def test_any_other_error_is_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_for(monkeypatch, "prefill", lambda prompt: prompt.shape[1] == 90, error)
    with pytest.raises(type(error), match=str(error)):
        measured()


def test_a_model_that_cannot_be_compressed_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match="nothing to compress"):
        measured(model=tiny_mistral(sliding_window=16))
