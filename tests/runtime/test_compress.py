"""What the context does to a prompt, beyond the rows of test_cases.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from clusterprof import Profile, compress
from clusterprof.errors import CompressionError, ProfileError
from clusterprof.methods import SnapKV
from clusterprof.profile import Compression
from clusterprof.runtime.selection import kept_positions
from tests.profile.examples import document
from tests.profiling.subjects import capture
from tests.runtime.subjects import (
    TINY,
    Subject,
    forward,
    generate,
    pad_left,
    random_stream,
    stored_lengths,
    tiny_subject,
)
from tests.tiny import tiny_llama, tiny_qwen3


def test_compression_changes_something_here(tiny: Subject) -> None:
    # Otherwise the equalities in this folder would say nothing.
    prompt = tiny.prompt(tiny.long)
    plain = forward(tiny.model, prompt, cache=DynamicCache(config=tiny.model.config)).cache
    with compress(tiny.model, tiny.compression):
        compressed = forward(tiny.model, prompt).cache
    token = prompt[:, :1]
    difference = (
        forward(tiny.model, token, cache=plain).logits - forward(tiny.model, token, cache=compressed).logits
    )
    assert difference.abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3])
def test_the_highest_attention_of_the_window_may_decide(
    build: Callable[..., PreTrainedModel], kept_sets: list[Tensor]
) -> None:
    model, prompt = build(eos_token_id=None), random_stream()[None, :60]
    model.set_attn_implementation("eager")
    weights = model(prompt, output_attentions=True).attentions
    # Window queries and the query heads of a KV head together: (kv_heads, prefix).
    heads = model.config.num_key_value_heads
    highest = [layer[0, :, -8:, :52].reshape(heads, -1, 52).amax(dim=1) for layer in weights]
    by_mean = [layer[0, :, -8:, :52].reshape(heads, -1, 52).mean(dim=1) for layer in weights]

    compression = Compression(size=24, window=8, method=SnapKV(kernel_size=1, importance="max"))
    with compress(model, compression):
        forward(model, prompt)
    observation = capture(model, prompt).observation
    captured = kept_positions(compression.method, observation, 24)
    for kept, ours, peaks in zip(kept_sets, captured, highest, strict=True):
        best = peaks.topk(16).indices.sort().values
        assert torch.equal(kept[0, :, :16], best)
        assert torch.equal(ours[:, :16], best)
    # Otherwise the mean would do as well.
    assert any(
        not torch.equal(mean.topk(16).indices.sort().values, peaks.topk(16).indices.sort().values)
        for mean, peaks in zip(by_mean, highest, strict=True)
    )


def test_rows_of_a_batch_keep_all_their_tokens_while_these_fit(kept_sets: list[Tensor]) -> None:
    batch, mask = pad_left(
        [random_stream()[None, :60], random_stream()[None, :10], random_stream()[None, :3]]
    )
    model = tiny_llama(eos_token_id=None)
    with compress(model, TINY):
        generate(model, batch, 1, attention_mask=mask)
    for kept in kept_sets:
        for row, length in ((1, 10), (2, 3)):
            assert set(range(60 - length, 60)) <= set(kept[row, 0].tolist())


def test_a_context_can_be_entered_again_but_not_inside_itself() -> None:
    model, prompt = tiny_llama(eos_token_id=None), random_stream()[None, :60]
    context = compress(model, TINY)
    for _ in range(2):
        with context:
            assert stored_lengths(generate(model, prompt, 1).cache) == [TINY.size] * 2
            with pytest.raises(CompressionError, match=r"already inside compress\(\)"), context:
                pytest.fail("entered")
            assert stored_lengths(generate(model, prompt, 1).cache) == [TINY.size] * 2
        assert stored_lengths(generate(model, prompt, 1).cache) == [60] * 2

    @context
    def decorated() -> list[int]:
        return stored_lengths(generate(model, prompt, 1).cache)

    assert decorated() == decorated() == [TINY.size] * 2
    with pytest.raises(ZeroDivisionError), context:
        _ = 1 / 0
    assert stored_lengths(generate(model, prompt, 1).cache) == [60] * 2


def test_a_profile_of_another_model_is_refused_unless_forced() -> None:
    subject = tiny_subject(tiny_llama(eos_token_id=None))
    profile = Profile.model_validate(document(), strict=False)
    with (
        pytest.raises(ProfileError, match=r"made for another model .* with force=True\.$"),
        compress(subject.model, profile),
    ):
        pytest.fail("entered")
    with compress(subject.model, profile, force=True):
        result = generate(subject.model, random_stream()[None, :300], 1)
    assert stored_lengths(result.cache) == [256, 256]
