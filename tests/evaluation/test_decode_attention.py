from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from clusterprof.errors import CompressionError
from clusterprof.evaluation import decode_attention
from clusterprof.evaluation.decode_attention import summed_decode_attention
from tests.evaluation.subjects import attention_matrices, spoiled
from tests.profiling.subjects import WINDOW, capture
from tests.tiny import tiny_gemma3, tiny_llama, tiny_qwen3


@pytest.mark.parametrize("steps_at_once", [1, 5, 100])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gemma3])
def test_equals_the_full_matrix(
    build: Callable[[], PreTrainedModel], steps_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    found = capture(model)
    prompt, prefix = found.prompt_length, found.prompt_length - WINDOW
    monkeypatch.setattr(decode_attention, "_BLOCK_ELEMENTS", steps_at_once * 4 * prefix)
    expected = attention_matrices(model, found)[1][:, prompt:, :prefix].sum(dim=1)
    torch.testing.assert_close(summed_decode_attention(found, 1), expected, atol=1e-5, rtol=1e-4)


def test_names_the_layer_whose_attention_is_not_finite() -> None:
    found = spoiled(capture(tiny_llama()), layer=1, part="queries")
    summed_decode_attention(found, 0)
    with pytest.raises(CompressionError, match="layer 1 is not finite"):
        summed_decode_attention(found, 1)


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_a_layer_without_full_attention_is_refused(layer: int) -> None:
    with pytest.raises(CompressionError, match=f"no full attention in a layer {layer}; it has some in 1"):
        summed_decode_attention(capture(tiny_gemma3()), layer)
