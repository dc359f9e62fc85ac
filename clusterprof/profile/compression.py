"""What a profile compresses to: size, window, and the method with its parameters, by layer where they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, field_validator

from clusterprof.methods import MethodConfig
from clusterprof.profile.fields import Count, PositiveCount, Window
from clusterprof.profile.section import Section

if TYPE_CHECKING:
    from pydantic import ValidationInfo


class LayerOverride(Section):
    """The method with other parameters, for some layers.

    Attributes
    ----------
    layers : tuple of int
        Indices of full-attention layers, ascending.
    """

    layers: Annotated[tuple[Count, ...], Field(min_length=1, max_length=4096)]
    method: MethodConfig

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if list(layers) != sorted(set(layers)):
            raise ValueError("layers must be ascending, each of them once")
        return layers

    @property
    def where(self) -> str:
        """The layers in words, such as "layers 0 to 7"."""
        first, last = self.layers[0], self.layers[-1]
        if first == last:
            return f"layer {first}"
        if last - first == len(self.layers) - 1:
            return f"layers {first} to {last}"
        return f"layers {', '.join(map(str, self.layers))}"

    def changes(self, method: BaseModel) -> dict[str, Any]:
        """The parameters in which it differs from the method of the other layers."""
        others = method.model_dump()
        return {name: value for name, value in self.method.model_dump().items() if value != others[name]}


# Left out of files where there are none: a profile for releases without them reads as it always did.
Overrides = Annotated[
    tuple[LayerOverride, ...], Field(max_length=4096, exclude_if=lambda overrides: not overrides)
]


class Compression(Section):
    """How to compress: the method with its parameters, and how many prompt tokens stay.

    Attributes
    ----------
    window : int or "query"
        Length of the observation window, in tokens, or the prompt's question (the paper's own definition).
    size : int
        Prompt tokens kept per KV head, the window included; above ``window``, and at least 2. The same in all layers.
    method : MethodConfig
        Of every layer that has no override.
    overrides : tuple of LayerOverride
        The same method with other parameters, no layer twice.
    """

    window: Window
    size: PositiveCount
    method: MethodConfig
    overrides: Overrides = ()

    @field_validator("size")
    @classmethod
    def _above_window(cls, size: int, info: ValidationInfo) -> int:
        # A window that is itself invalid is missing here and already reported.
        window = info.data.get("window", 0)
        if window == "query":
            if size < 2:
                raise ValueError("with the question as the window it must be at least 2")
        elif size <= window:
            raise ValueError(f"with a window of {window} it must be at least {window + 1}")
        return size

    @field_validator("overrides")
    @classmethod
    def _of_one_method(
        cls, overrides: tuple[LayerOverride, ...], info: ValidationInfo
    ) -> tuple[LayerOverride, ...]:
        layers = [layer for override in overrides for layer in override.layers]
        if len(layers) != len(set(layers)):
            raise ValueError("a layer must not be in two of them")
        method: MethodConfig | None = info.data.get("method")
        # One that is itself invalid is missing here and already reported.
        if method is None:
            return overrides
        for override in overrides:
            if override.method.name != method.name:
                raise ValueError(f"all layers must have the method {method.name}")
            # One attention mask serves all layers, so their caches must have the same length at every step.
            if "evict_while_decoding" in override.changes(method):
                raise ValueError("evict_while_decoding must be the same in all layers")
        return overrides

    def uniform(self, method: MethodConfig) -> Compression:
        """The same size and window, with this method in all layers."""
        return Compression(window=self.window, size=self.size, method=method)

    def method_of(self, layer: int) -> MethodConfig:
        """The method with the parameters that it has in a layer, by index in the model."""
        return next((it.method for it in self.overrides if layer in it.layers), self.method)
