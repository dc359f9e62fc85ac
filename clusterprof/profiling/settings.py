"""What a tune is asked for, and who is told what it does."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from clusterprof.profile import Window
from clusterprof.profiling.capture_files import LIMIT_BYTES
from clusterprof.profiling.objective import DEFAULT, ObjectiveName
from clusterprof.profiling.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna.trial import FrozenTrial

    from clusterprof.data import Prompt
    from clusterprof.profile import DroppedSample
    from clusterprof.profiling.samples import Samples

SamplerName = Literal["tpe", "gp", "grid"]


@dataclass(frozen=True)
class TuneSettings:
    """What to tune for and how long.

    Attributes
    ----------
    sizes : tuple of int
        Prompt tokens kept per head, the window included; each size is a search of its own on the same captures.
    method : str
        One of :func:`clusterprof.methods.method_names`.
    window : int or "query"
        Length of the observation window, in tokens, or each prompt's own question.
    decode_tokens : int
        Decoded tokens per sample, at most.
    sampler : str
        See :func:`clusterprof.profiling.search.search`.
    trials : int
        Finished trials each study shall have in the end; fewer if the method has no more points to try.
    timeout : float, optional
        Seconds for each search.
    fraction, samples : float, int or None
        Share or number of rows to tune on; by default 20 %, but at least six, or half of fewer than 12.
    holdout : int, optional
        Other rows, that judge the result; by default as many as are tuned on, at least six, and at least as many as
        can show the target, or what is left.
    capture_memory : int
        Bytes that the files of all captures may take together, see
        :class:`clusterprof.profiling.store.CaptureStore`.
    study, storage : str, optional
        What the names of the Optuna studies begin with, and the storage's URL; by default a name made of all that
        matters, in a SQLite file. Each search adds its size to the name, and SnapKV's, for comparison, its method.
    per_layer : bool
        Whether to look for other values in groups of layers, too.
    target : Target, optional
        A goal that held-out prompts shall show to be met: the largest size is then tuned first, and none below one
        that fails.
    """

    sizes: tuple[int, ...]
    method: str = "clusterattn"
    window: Window = 32
    decode_tokens: int = 64
    sampler: SamplerName = "tpe"
    trials: int = 50
    timeout: float | None = None
    fraction: float | None = None
    samples: int | None = None
    holdout: int | None = None
    seed: int = 0
    objective: ObjectiveName = DEFAULT
    capture_memory: int = LIMIT_BYTES
    study: str | None = None
    storage: str | None = None
    tokens: int | None = None
    per_layer: bool = False
    target: Target | None = None


class TuneListener(Protocol):
    """Told what a tune is doing, to show it."""

    def prepared(self, samples: "Samples") -> None:
        """Prompts are built; those that fit in the smallest size will be set aside."""

    def captured(self, prompt: "Prompt", seconds: float, error: str | None) -> None:
        """A prompt is captured (0 seconds: it was found on disk), or left out because of ``error``."""

    def left_out(self, sample: "DroppedSample") -> None:
        """A captured prompt cannot be used at the size whose searches come next."""

    def over_limit(self, limit_bytes: int) -> None:
        """This run's captures alone take more than ``capture_memory``; they are kept nevertheless."""

    def searching(self, size: int, method: str, study: str, storage: str, done: int, trials: int) -> None:
        """A search starts; ``done`` of ``trials`` trials are there from before."""

    def tried(self, trials: "Sequence[FrozenTrial]", best: "FrozenTrial | None") -> None:
        """Trials that were evaluated together ended."""

    def interrupting(self) -> None:
        """Ctrl-C came in a search, which ends when what is under way is done."""

    def searching_per_layer(self, steps: int) -> None:
        """The search for other values in groups of layers starts; it takes so many steps at most."""

    def tried_per_layer(self) -> None:
        """A step of it is done."""

    def comparing(self, methods: int) -> None:
        """The searches of a size are over; so many methods are scored for its table."""

    def compared(self, label: str) -> None:
        """A method is scored."""
