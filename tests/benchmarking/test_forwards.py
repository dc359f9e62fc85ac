from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterprof import compress
from clusterprof.benchmarking.forwards import decode, prefill
from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from tests.tiny import tiny_llama

COMPRESSION = Compression(size=24, window=8, method=ClusterAttn(num_block=2, theta=0.02))
PROMPT = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(1))


def generated(model: Any, compression: Compression | None, new_tokens: int) -> Tensor:
    """What transformers' own loop answers."""
    with nullcontext() if compression is None else compress(model, compression):
        output: Tensor = model.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
    return output[:, PROMPT.shape[1] :]


@pytest.mark.parametrize("compression", [None, COMPRESSION])
def test_tokens_are_those_of_generate(compression: Compression | None) -> None:
    model = tiny_llama()
    expected = generated(model, compression, 6)
    with nullcontext() if compression is None else compress(model, compression):
        going = prefill(model, PROMPT)
        tokens = [going.tokens]
        for _ in range(5):
            going = decode(model, going, 1)
            tokens.append(going.tokens)
        assert decode(model, prefill(model, PROMPT), 5).tokens.tolist() == tokens[-1].tolist()
    assert torch.cat(tokens, dim=1).tolist() == expected.tolist()


@pytest.mark.parametrize("compression", [None, COMPRESSION])
def test_repeated_rows_decode_alike_and_leave_the_original(compression: Compression | None) -> None:
    model = tiny_llama()
    with nullcontext() if compression is None else compress(model, compression):
        original = prefill(model, PROMPT)
        one = decode(model, original.repeated(1), 5).tokens
        three = decode(model, original.repeated(3), 5).tokens
        assert original.cache.get_seq_length() == 60
        assert decode(model, original, 5).tokens.tolist() == one.tolist()
    assert three.tolist() == one.tolist() * 3


def test_only_the_last_token_gets_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    shapes = []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    prefill(model, PROMPT)
    assert shapes == [(1, 1, 128)]
