"""Captures of tiny models, and what to compress them to."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clusterprof.methods import ClusterAttn
from clusterprof.profile import Compression
from clusterprof.profiling.capture import Capture, capture_prompt
from clusterprof.profiling.origin import Origin

WINDOW = 8
ORIGIN = Origin(
    model="org/tiny",
    revision="1234",
    weights="sha256:weights",
    model_settings="sha256:settings",
    vocabulary="sha256:vocabulary",
    end_tokens="2",
    decode_tokens=4,
    dtype="float32",
    device="cpu",
    attention="sdpa",
    torch="2.13.0",
    transformers="5.24.0",
)
SMALL = Compression(size=24, window=WINDOW, method=ClusterAttn(num_block=2, theta=0.02))


def random_prompt(length: int = 60, seed: int = 0) -> Tensor:
    """(1, length)."""
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def capture(model: PreTrainedModel, prompt: Tensor | None = None, **options: Any) -> Capture:
    settings: dict[str, Any] = {"window": WINDOW, "decode_tokens": 12, "end_tokens": set()}
    return capture_prompt(model, random_prompt() if prompt is None else prompt, **{**settings, **options})


def generated(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options: Any) -> list[int]:
    run: Any = model.generate
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False} | options
    tokens: list[int] = run(prompt, max_new_tokens=new_tokens, **options)[0, prompt.shape[1] :].tolist()
    return tokens
