"""clusterprof: tune KV-cache compression offline, apply it during inference."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterprof.profile import Profile
    from clusterprof.runtime import compress

__all__ = ["Profile", "__version__", "compress"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy, so that `clusterprof --help` does not wait for torch and transformers.
    if name == "Profile":
        from clusterprof.profile import Profile

        return Profile
    if name == "compress":
        from clusterprof.runtime import compress

        return compress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
