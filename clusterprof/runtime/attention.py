"""The seam to transformers: sees the queries and keys of every attention call, and changes nothing unless asked to."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from clusterprof.errors import CompressionError, UnsupportedModelError
from clusterprof.runtime.transformers_names import CACHE

# Called after a layer's attention: (layer index, query after RoPE, keys not repeated, scaling).
Observer = Callable[[int, Tensor, Tensor, float], None]
# Called before a forward: (cache, attention mask as given, its token ids, or embeddings in their place) -> its
# observer, if any.
Begin = Callable[[Cache | None, Any, Tensor], Observer | None]
# Called in place of a layer's attention: (layer index, query after RoPE, keys and values not repeated, scaling) ->
# its output, (batch, tokens, heads, head_dim); or None to leave this layer to the model.
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor | None]

_PREFIX = "clusterprof_"
_KWARG, _ATTEND = "attention_observer", "attention_in_place"


@contextmanager
def observe_attention(model: PreTrainedModel, begin: Begin, attend: Attend | None = None) -> Iterator[None]:
    """Let ``begin`` appoint an observer for each forward of ``model`` inside the context.

    The model's own backend computes the attention, where ``attend`` does not; the observer comes after it, layer
    by layer. On exit, also after an exception, the model is as before.

    Raises
    ------
    CompressionError
        If the model is already inside such a context, or does not use transformers' attention interface.
    """
    if not model._supports_attention_backend:
        raise _unsupported(model)
    decoder = decoder_of(model)
    config = decoder.config
    backend = config._attn_implementation
    # Also true of a model built from the same config object: the contexts would undo each other's backend.
    if backend.startswith(_PREFIX):
        raise CompressionError(
            "This model object, or another with the same config object, is already inside compress() or a tuning "
            "run, perhaps in another thread; open one context around all threads, or leave that one first."
        )
    config._attn_implementation = _register(backend)
    hook = _ForwardHook(begin, attend)
    handles = [
        decoder.register_forward_pre_hook(hook.before, with_kwargs=True),
        decoder.register_forward_hook(hook.after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if config._attn_implementation.startswith(_PREFIX):
            config._attn_implementation = backend


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The stack of layers inside a causal language model.

    Raises
    ------
    UnsupportedModelError
        If it is another kind of model, or its cache does not hold the keys and values of its heads.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"A {name} is not a model of transformers; pass the model itself (of a pipeline, pipeline.model)."
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, and clusterprof compresses the prompts of decoder-only language models; "
            "use one of these (Llama, Mistral, Qwen, Gemma 3, Phi-3, ...)."
        )
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} does not generate text, so there is no cache to compress; load the model as a causal language "
            "model (AutoModelForCausalLM)."
        )
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(decoder, PreTrainedModel):
        raise _unsupported(model)
    # Where a latent happens to be as wide as a head it would even run, and be wrong.
    if getattr(decoder.config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{name} has multi-head latent attention, whose cache holds one latent for all heads instead of keys and "
            "values for each, which clusterprof does not support; use a model with plain multi-head attention."
        )
    return decoder


def _unsupported(model: PreTrainedModel) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} does not run every layer's attention through transformers' attention interface, "
        "which clusterprof needs to see its queries and keys; use a model that does (Llama, Mistral, Qwen, "
        "Gemma 3, Phi-3, ...)."
    )


class _ForwardHook(threading.local):
    """Hooks of the decoder: make sure of a cache, pass an observer down, and check that it saw every layer.

    Each thread that runs the model has its own state.
    """

    def __init__(self, begin: Begin, attend: Attend | None) -> None:
        self.begin, self.attend = begin, attend
        self.expected: list[int] = []
        self.seen: list[int] = []

    def before(
        self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not decoder.config._attn_implementation.startswith(_PREFIX):
            raise CompressionError(
                "The attention backend was changed inside compress(); set it before, as the observed one is in use."
            )
        if args:
            kwargs = dict(zip(signature(decoder.forward).parameters, args, strict=False)) | kwargs
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        # Newer versions of transformers still take the older name and rename it inside the forward.
        name = "past_key_values" if kwargs.get("past_key_values") is not None else CACHE
        cache = kwargs.get(name)
        if cache is None and kwargs.get("use_cache") is not False:
            cache = kwargs[name] = DynamicCache(config=decoder.config)
        observer = self.begin(cache, kwargs.get("attention_mask"), tokens)
        self.expected, self.seen = [], []
        if observer is None:
            return (), kwargs
        self.expected = list(range(decoder.config.num_hidden_layers))

        def observe(layer_idx: int, query: Tensor, key: Tensor, scaling: float) -> None:
            self.seen.append(layer_idx)
            observer(layer_idx, query, key, scaling)

        watching: dict[str, Any] = {_KWARG: observe}
        if self.attend is not None:
            watching[_ATTEND] = self.attend
        return (), kwargs | watching

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CompressionError("A model cannot be copied or saved inside compress(); do it outside.")

    def after(self, decoder: PreTrainedModel, args: tuple[Any, ...], output: object) -> None:
        """Refuse models that claim the interface and drop the observer on its way, or attend twice a layer."""
        if sorted(self.seen) != self.expected:
            raise _unsupported(decoder)


def _register(backend: str) -> str:
    """Register the observed variant of a backend, with the same masks, and return its name."""
    name = _PREFIX + backend
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _observed(backend))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[backend])
    return name


def _observed(backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        observer: Observer | None = kwargs.pop(_KWARG, None)
        attend: Attend | None = kwargs.pop(_ATTEND, None)
        if observer is not None:
            _refuse_other_softmax(module, attention_mask, kwargs)
        given = (
            attend(module.layer_idx, query, key, value, _scaling(query, kwargs))
            if attend is not None
            else None
        )
        if given is not None:
            output: tuple[Tensor, Tensor | None] = (given, None)
        else:
            output = _backend_function(backend, module)(
                _BackendView(module, backend) if "flash" in backend else module,
                query,
                key,
                value,
                attention_mask,
                **kwargs,
            )
        if observer is not None:
            observer(module.layer_idx, query, key, _scaling(query, kwargs))
        return output

    return attention


def _scaling(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling: float | None = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _refuse_other_softmax(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    # Gemma 2 caps its scores, gpt-oss adds a sink to them, others a bias: importance would be of another model.
    changes = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    # Doge's is not only a mask, but a bias.
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        changes.append("a mask for each head")
    if changes:
        raise UnsupportedModelError(
            f"{type(module).__name__} changes its attention scores ({', '.join(changes)}), which clusterprof does not "
            "support; use a model with plain scaled dot-product attention."
        )


def _backend_function(backend: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    # Each model file has its own eager attention; the other backends are registered.
    function: Callable[..., tuple[Tensor, Tensor | None]] = (
        sys.modules[type(module).__module__].eager_attention_forward
        if backend == "eager"
        else ALL_ATTENTION_FUNCTIONS[backend]
    )
    return function


class _BackendView:
    """An attention module whose config names the plain backend, by which flash attention picks its kernel."""

    def __init__(self, wrapped: Any, backend: str) -> None:
        self._wrapped, self._attn_implementation = wrapped, backend

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            return _BackendView(self._wrapped.config, self._attn_implementation)
        return getattr(self._wrapped, name)
