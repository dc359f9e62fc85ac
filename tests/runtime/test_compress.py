"""What the context does to a prompt, beyond the rows of test_cases.py."""

import pytest
from torch import Tensor
from transformers import DynamicCache

from clusterprof import Profile, compress
from clusterprof.errors import ProfileError
from tests.profile.examples import document
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
from tests.tiny import tiny_llama


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
