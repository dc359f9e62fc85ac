"""torch.compile: decode steps over the static cache are compiled once, and no prefill escapes compression."""

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel

from clusterprof import compress
from clusterprof.methods import TopK
from clusterprof.runtime import StaticCompressedCache
from tests.runtime.subjects import (
    TINY,
    compressed_layers,
    forward,
    generate,
    greedy_singly,
    pad_left,
    random_stream,
)
from tests.tiny import tiny_gemma3, tiny_llama

PROMPT = random_stream()[None, :60]
OTHERS = [random_stream(seed=3)[None, :47], random_stream(seed=4)[None, :61]]
SHORT = PROMPT[:, :10]
ROOM = 12
Build = Callable[..., PreTrainedModel]


def static_cache(model: PreTrainedModel) -> Any:
    return StaticCompressedCache(model.config, TINY, max_new_tokens=ROOM)


@dataclass
class Backend:
    """A backend of torch.compile that runs the graphs it gets as they are, and counts them and their runs."""

    graphs: int = 0
    runs: int = 0
    config: CompileConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = CompileConfig(fullgraph=True, backend=self, mode="default")
        # Otherwise generate() compiles on a GPU only.
        vars(self.config)["_compile_all_devices"] = True

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph.forward(*arguments)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        # generate() copies its settings.
        return self


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@torch.no_grad()
def test_decode_steps_are_compiled_once_for_all_prompts(build: Build, backend: Backend) -> None:
    model = build(eos_token_id=None)
    cache = static_cache(model)
    # transformers' own static cache compiles twice where there is a sliding window: filling, and full.
    graphs = 2 if build is tiny_gemma3 else 1
    places = set()
    with compress(model, TINY):
        for count, prompt in enumerate([PROMPT, *OTHERS], start=1):
            expected = generate(model, prompt, ROOM).sequences
            found = generate(model, prompt, ROOM, cache=cache, compile_config=backend.config).sequences
            assert torch.equal(found, expected)
            assert (backend.graphs, backend.runs) == (graphs, count * (ROOM - 1))
            places.add(tuple((layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers))
            cache.reset()
    assert len(places) == 1


@torch.no_grad()
def test_a_batch_and_a_short_prompt_are_compiled_too(backend: Backend) -> None:
    model = tiny_llama(eos_token_id=None)
    cache = static_cache(model)
    batch, mask = pad_left([PROMPT, PROMPT[:, 10:40]])
    with compress(model, TINY):
        for prompt, attention_mask in ((batch, mask), (SHORT, torch.ones_like(SHORT))):
            options: dict[str, Any] = {"attention_mask": attention_mask}
            expected = generate(model, prompt, ROOM, **options).sequences
            options |= {"cache": cache, "compile_config": backend.config}
            assert torch.equal(generate(model, prompt, ROOM, **options).sequences, expected)
            cache.reset()
    assert backend.runs == 2 * (ROOM - 1)


@torch.no_grad()
def test_contexts_do_not_share_what_is_compiled(backend: Backend) -> None:
    # Hooks are no part of what compiled code depends on.
    model = tiny_llama(eos_token_id=None)
    sizes = [TINY, TINY.model_copy(update={"size": 16}), TINY]
    for compression in sizes:
        with compress(model, compression):
            expected = generate(model, PROMPT, ROOM).sequences
            cache: Any = StaticCompressedCache(model.config, compression, max_new_tokens=ROOM)
            found = generate(model, PROMPT, ROOM, cache=cache, compile_config=backend.config).sequences
        assert torch.equal(found, expected)
        assert {layer.prompt for layer in compressed_layers(cache)} == {compression.size}
    assert backend.runs == 3 * (ROOM - 1)


@torch.no_grad()
def test_a_model_that_its_user_compiled_decodes_in_one_graph(backend: Backend) -> None:
    model = tiny_llama(eos_token_id=None)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    cache = static_cache(model)
    with compress(model, TINY):
        expected = generate(model, PROMPT, ROOM).sequences
        # Not a slice of what is expected, whose strides would be compiled for too.
        first = forward(model, PROMPT, cache=cache).logits[:, -1:].argmax(-1)
        found = [int(first), *greedy_singly(compiled, cache, first, ROOM - 1)]
    assert found == expected[0, 60:].tolist()
    assert (backend.graphs, backend.runs) == (1, ROOM - 1)


def growing_cache(model: PreTrainedModel) -> Any:
    return DynamicCache(config=model.config)


new_caches = pytest.mark.parametrize("new_cache", [static_cache, growing_cache])


@pytest.mark.parametrize(("new_cache", "in_place"), [(static_cache, True), (growing_cache, False)])
@torch.no_grad()
def test_a_compiled_prefill_is_compressed_too(
    new_cache: Callable[[PreTrainedModel], Any], in_place: bool, backend: Backend, kept_sets: list[Tensor]
) -> None:
    model = tiny_llama(eos_token_id=None, num_hidden_layers=1)
    # A method of one step, as every step would be compiled by itself.
    top = TINY.model_copy(update={"method": TopK()})
    with compress(model, top):
        expected = generate(model, PROMPT, ROOM).sequences
    compiled: Any = model if in_place else torch.compile(model, backend=backend)
    if in_place:
        model.compile(backend=backend)
    # Compiled for prompts of this length before, with nothing to compress.
    compiled(PROMPT)
    assert backend.graphs == 1
    with compress(model, top):
        cache = new_cache(model)
        first = forward(compiled, PROMPT, cache=cache).logits[:, -1:].argmax(-1)
        assert {layer.stored for layer in compressed_layers(cache)} == {TINY.size}
        with torch.compiler.set_stance("force_eager"):
            answer = [int(first), *greedy_singly(model, cache, first, ROOM - 1)]
    assert answer == expected[0, 60:].tolist()
    assert len(kept_sets) == 2
    assert torch.equal(*kept_sets)


@new_caches
@torch.no_grad()
def test_a_prefill_in_one_compiled_graph_is_refused(
    new_cache: Callable[[PreTrainedModel], Any], backend: Backend
) -> None:
    # There is no way out of such a graph, and none to see the queries in it.
    model = tiny_llama(eos_token_id=None)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    compiled(PROMPT)
    cache = new_cache(model)
    with compress(model, TINY):
        with pytest.raises(Exception, match="Only decode steps can be compiled inside compress"):
            forward(compiled, PROMPT, cache=cache)
        with pytest.raises(Exception, match="Only decode steps can be compiled inside compress"):
            generate(
                model,
                PROMPT,
                ROOM,
                cache=static_cache(model),
                prefill_chunk_size=20,
                compile_config=backend.config,
            )


# In a process of its own: setuptools, which it imports, fails where distutils was imported before.
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's default backend needs a C++ compiler")
def test_the_default_backend() -> None:
    process = multiprocessing.get_context("spawn").Process(target=compile_with_inductor)
    process.start()
    process.join()
    assert process.exitcode == 0


@torch.no_grad()
def compile_with_inductor() -> None:
    model = tiny_llama(eos_token_id=None, num_hidden_layers=1)
    config = CompileConfig(fullgraph=True, mode="default")
    vars(config)["_compile_all_devices"] = True
    cache = static_cache(model)
    with compress(model, TINY):
        for prompt in (PROMPT, OTHERS[0]):
            expected = generate(model, prompt, ROOM).sequences
            found = generate(model, prompt, ROOM, cache=cache, compile_config=config).sequences
            assert torch.equal(found, expected)
            cache.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
