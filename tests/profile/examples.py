"""A profile to start from, as its file reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof import Profile
from clusterprof.errors import ProfileError

Document = dict[str, Any]


def document() -> Document:
    """A profile as its file should read, written down by hand."""
    return {
        "schema_version": 1,
        "model": {
            "id": "tiny/llama",
            "revision": None,
            "architecture": "LlamaForCausalLM",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope": {"rope_type": "default", "rope_theta": 10000.0},
            "tokenizer_hash": "a" * 64,
            "chat_template_hash": None,
        },
        "dataset": {
            "name": "needle",
            "source": "built-in",
            "split": None,
            "fraction": 0.2,
            "seed": 0,
            "rows": 10,
            "sampled_ids": ["needle-3", "Nadel-größer"],
            "held_out_ids": ["needle-5"],
            "content_hash": "b" * 64,
            "prompts_cut": 0,
            "prompts_fitting": 1,
            "tokens": 2000,
        },
        "compression": {
            "window": 32,
            "size": 256,
            "method": {
                "name": "clusterattn",
                "num_block": 8,
                "theta": 0.003,
                "gap_pool": 15,
                "gap_pooling": "avg",
                "importance": "mean",
            },
        },
        "results": {
            "tuning": {"objective": "cosine", "value": 0.98, "interval_95": [0.97, 0.99], "samples": 2},
            "held_out": None,
            "metrics": {
                "cosine": 0.98,
                "cosine_padded": 0.97,
                "attention_output": 0.96,
                "kl": 0.125,
                "agreement": 0.875,
                "loss": 0.625,
                "log_kl": -2.0,
            },
            "baselines": [
                {
                    "method": {
                        "name": "clusterattn",
                        "num_block": 8,
                        "theta": 0.002,
                        "gap_pool": 15,
                        "gap_pooling": "avg",
                        "importance": "mean",
                    },
                    "metrics": {
                        "cosine": 0.95,
                        "cosine_padded": 0.99,
                        "attention_output": 0.94,
                        "kl": 0.25,
                        "agreement": 0.75,
                        "loss": 0.75,
                        "log_kl": -2.0,
                    },
                    "difference": {"value": 0.03, "interval_95": [-0.01, 0.07]},
                },
                {
                    "method": {"name": "full"},
                    "metrics": {
                        "cosine": 1.0,
                        "cosine_padded": 1.0,
                        "attention_output": 1.0,
                        "kl": 0.0,
                        "agreement": 1.0,
                        "loss": 0.5,
                        "log_kl": -2.0,
                    },
                    "difference": None,
                },
            ],
        },
        "search": {
            "sampler": "TPESampler",
            "trials": 30,
            "seed": 0,
            "study": "needle-256",
            "storage": "sqlite:///study.db",
            "duration_s": 12.5,
            "objective": "cosine",
            "space": {"num_block": [1, 32], "theta": [1e-5, 0.1], "pooling": ["avg", "max"]},
            "decode_tokens": 64,
            "dropped_samples": [{"id": "needle-7", "reason": "out of memory"}],
        },
        "environment": {
            "clusterprof": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "python": "3.11.7",
            "attention_backend": "sdpa",
            "dtype": "float32",
            "device": "cpu",
            "created": "2026-01-02T03:04:05Z",
        },
    }


def profile() -> Profile:
    return Profile.model_validate_json(json.dumps(document()))


def changed(path: str, value: Any) -> Document:
    """The document with the value at a dotted path replaced or added."""
    result = document()
    *parents, last = path.split(".")
    target: Any = result
    for name in parents:
        target = target[int(name) if name.isdigit() else name]
    target[last] = value
    return result


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
