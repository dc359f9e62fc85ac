"""Loading a causal language model and its tokenizer, by hub id, by folder, or the built-in one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clusterprof.errors import ModelError
from clusterprof.models.builtin import BUILTIN_ID, BUILTIN_NAME
from clusterprof.models.choices import (
    ATTENTIONS,
    DTYPES,
    check_choice,
    choose_attention,
    choose_device,
    choose_dtype,
    flash_attention_available,
)
from clusterprof.models.source import ModelSource, find_model, unreachable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Heads that write text; what a checkpoint of another kind lacks would be filled in at random.
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attn: str = "auto",
    trust_remote_code: bool = False,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a causal language model, ready to generate, and its tokenizer, ready for batches.

    The model is in evaluation mode. The tokenizer pads on the left, with the end-of-sequence token
    where it has no padding token.

    Parameters
    ----------
    name_or_path
        "builtin", a model folder, or an id on the Hugging Face hub. What the hub's cache holds is
        used when the hub does not answer.
    revision
        Branch, tag or commit on the hub.
    dtype
        "auto" (float32 on a CPU, else the checkpoint's half type), "float32", "bfloat16" or "float16".
    device
        "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N" or "mps".
    attn
        "auto" (flash_attention_2 where it can be had, else sdpa), "sdpa", "eager", "flash_attention_2" or
        "flash_attention_3".
    trust_remote_code
        Whether to run the Python code that a model brings along.

    Raises
    ------
    ModelError
        If there is no such model, it is not a causal language model, or it cannot be loaded as asked.
    """
    # All that can be wrong without the model is found before it is fetched.
    check_choice("dtype", dtype, DTYPES)
    check_choice("attn", attn, ATTENTIONS)
    target = choose_device(device)
    source = find_model(name_or_path, revision)
    common = {
        "revision": source.revision,
        "local_files_only": source.local_only,
        "trust_remote_code": trust_remote_code,
    }
    with _errors_for(source), _no_weight_bar():
        config = _load_config(source, common)
        torch_dtype = choose_dtype(dtype, device=target, config=config)
        flash = target.type == "cuda" and flash_attention_available(attn)
        backend = choose_attention(attn, device=target, dtype=torch_dtype, flash_available=flash)
        tokenizer = _load_tokenizer(source, common)
        model = _load_weights(
            source,
            config=config,
            dtype=torch_dtype,
            device_map={"": target},
            # Left open, transformers takes sdpa wherever the model has it.
            attn_implementation=None if attn == "auto" and backend == "sdpa" else backend,
            **common,
        )
    _settle(model, tokenizer, source)
    return model, tokenizer


def _settle(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", source: ModelSource) -> None:
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    # Where describe_model looks; transformers used to keep it there itself.
    model.config._commit_hash = source.commit
    if source.id == BUILTIN_ID:
        # Not the path in this user's cache, which says nothing to anyone else.
        model.config.name_or_path = model.name_or_path = tokenizer.name_or_path = BUILTIN_ID


def _load_config(source: ModelSource, common: dict[str, Any]) -> "PreTrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: PreTrainedConfig = AutoConfig.from_pretrained(source.path, **common)
    classes = config.architectures or []
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = own_code or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal = not classes or any(name.endswith(_CAUSAL_SUFFIXES) for name in classes)
    if config.is_encoder_decoder or not known or not causal:
        kind = "an encoder-decoder model" if config.is_encoder_decoder else "not a causal language model"
        raise ModelError(
            f"{source.id} is {kind} ({', '.join(classes) or config.model_type}); "
            "clusterprof needs a decoder that writes text, such as a Llama, Mistral or Qwen."
        )
    return config


def _load_tokenizer(source: ModelSource, common: dict[str, Any]) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.path, padding_side="left", **common
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_weights(source: ModelSource, **options: Any) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    # Its declared type knows nothing of the report.
    loaded: Any = AutoModelForCausalLM.from_pretrained(source.path, output_loading_info=True, **options)
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights of {source.id} lack {len(missing)} tensors of {type(model).__name__}, {missing[0]} first; "
            "get a complete copy of the model."
        )
    return model


@contextmanager
def _errors_for(source: ModelSource) -> Iterator[None]:
    """Turn whatever transformers raises over the model into one sentence."""
    import torch

    try:
        yield
    except ModelError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"{source.id} does not fit into memory; use a smaller model, a half --dtype, or another --device."
        ) from error
    # No narrower, as a folder can be broken in as many ways as there are libraries reading it.
    except Exception as error:
        if source.obstacle is not None and isinstance(error, OSError):
            raise unreachable(source.id, source.obstacle) from error
        raise ModelError(_explain(source, error)) from error


def _explain(source: ModelSource, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip().rstrip(".")
    if "trust_remote_code" in str(error):
        return (
            f"{source.id} brings Python code of its own, which is not run unasked; "
            "read it, and if you trust it use --trust-remote-code."
        )
    if "gated repo" in str(error):
        return (
            f"{source.id} is gated: accept its terms at https://huggingface.co/{source.path} and "
            f"run `hf auth login`, or use --model {BUILTIN_NAME}."
        )
    return f"{source.id} cannot be loaded: {reason}; check the files, or use --model {BUILTIN_NAME}."


@contextmanager
def _no_weight_bar() -> Iterator[None]:
    """Hide the bar that transformers draws over the weights; the hub's, over a download, stays."""
    from transformers.utils.logging import set_tqdm_hook

    def hidden(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    previous = set_tqdm_hook(hidden)
    try:
        yield
    finally:
        set_tqdm_hook(previous)
