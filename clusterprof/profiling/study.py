"""Studies: in which storage and under which name the trials of a search are kept, and what they depend on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from filelock import FileLock

from clusterprof.data import Prompt
from clusterprof.methods import METHODS
from clusterprof.profiling.capture_files import VERSION as CAPTURE_VERSION
from clusterprof.profiling.objective import VERSION as SCORES_VERSION
from clusterprof.profiling.origin import FOR_PEOPLE, Origin, hash_text
from clusterprof.profiling.search import open_study
from clusterprof.profiling.settings import TuneSettings
from clusterprof.profiling.spaces import SearchSpace


@dataclass(frozen=True)
class Studies:
    """The studies of one run: one for each method and size.

    Attributes
    ----------
    dataset : str
        Its name, a part of the studies' names.
    origin : Origin
        What the captures come from.
    """

    settings: TuneSettings
    dataset: str
    origin: Origin
    cache_dir: Path

    @property
    def storage(self) -> str:
        """URL of where they are."""
        return self.settings.storage or f"sqlite:///{self.cache_dir / 'studies.db'}"

    def open(self, space: SearchSpace, prompts: Sequence[Prompt]) -> optuna.Study:
        """Open the study of exactly this space and these prompts, under this run's settings.

        Raises
        ------
        ClusterprofError
            If the storage cannot be opened, or a study of the user's name is about something else.
        """
        made_with = self._made_with(space, prompts)
        name = self._name(space, made_with)
        # Optuna tells about every study and trial on stderr; the listener does that here.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            # Two processes that create the tables of the same database at once get in each other's way.
            with FileLock(self.cache_dir / "studies.lock"):
                return open_study(name, self.storage, self.settings.objective, made_with)
        finally:
            optuna.logging.set_verbosity(verbosity)

    def _made_with(self, space: SearchSpace, prompts: Sequence[Prompt]) -> dict[str, str | int]:
        method = space.default.name
        return {
            "method": method,
            "method_version": METHODS[method].version,
            "size": space.size,
            "window": space.window,
            "objective": self.settings.objective,
            "sampler": self.settings.sampler,
            "seed": self.settings.seed,
            "prompts": hash_text(repr([(prompt.input_ids, prompt.query_length) for prompt in prompts])),
            **{f"range_of_{name}": json.dumps(ends) for name, ends in space.ranges().items()},
            **asdict(self.origin),
            "version_of_captures": CAPTURE_VERSION,
            "version_of_scores": SCORES_VERSION,
        }

    def _name(self, space: SearchSpace, made_with: dict[str, str | int]) -> str:
        settings, method = self.settings, space.default.name
        if settings.study is not None:
            # Never without the size, so that a run with one more goes on with the others.
            suffix = "" if method == settings.method else f"-{method}"
            return f"{settings.study}-{space.size}{suffix}"
        compared = {part: value for part, value in made_with.items() if part not in FOR_PEOPLE}
        digest = hash_text(json.dumps(compared)).removeprefix("sha256:")
        suffix = "" if method == "clusterattn" else f"-{method}"
        return f"{Path(self.dataset).stem}-{space.size}{suffix}-{digest[:8]}"
