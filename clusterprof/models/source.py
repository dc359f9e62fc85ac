"""Where the files of a named model are: the built-in folder, a folder of the user, the hub, or only its cache."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterprof.errors import ModelError
from clusterprof.models.builtin import BUILTIN_ID, BUILTIN_NAME, GGUF_SHA256, builtin_folder

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

# The hub's client alone would retry every file for a minute or more.
_HUB_PATIENCE_S = 12.0
_WAYS_OUT = f"name a folder that holds the model, or use --model {BUILTIN_NAME}"


@dataclass(frozen=True)
class ModelSource:
    """What to hand to transformers.

    Attributes
    ----------
    id
        The name for the user, in messages and profiles.
    path
        A folder, or an id on the hub.
    revision
        The revision on the hub, as resolved by its client, which holds on to one commit.
    commit
        What exactly the weights are: the hub's commit, or the sha256 of the built-in model's source.
    local_only
        Whether the network is of no use: for a folder, and while the hub does not answer.
    obstacle
        Why the hub does not answer, if it does not.
    """

    id: str
    path: str
    revision: str | None = None
    commit: str | None = None
    local_only: bool = True
    obstacle: str | None = None


def find_model(name_or_path: str, revision: str | None) -> ModelSource:
    """Return where the model's files are.

    Raises
    ------
    ModelError
        If the name is neither a model folder nor an id that the hub has, as far as it can be asked, or
        a revision is asked of anything but a hub id.
    """
    path = Path(name_or_path)
    if revision is not None and (name_or_path == BUILTIN_NAME or path.exists()):
        raise ModelError(
            f"Only models on the hub have revisions, and {name_or_path} is not there; drop --revision."
        )
    if name_or_path == BUILTIN_NAME:
        return ModelSource(id=BUILTIN_ID, path=str(builtin_folder()), commit=GGUF_SHA256)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"The folder {name_or_path} has no config.json, so it is not a model; {_WAYS_OUT}."
            )
        return ModelSource(id=name_or_path, path=name_or_path)
    if path.is_file():
        raise ModelError(f"{name_or_path} is a file; name the folder that holds config.json and the weights.")
    if not _is_hub_id(name_or_path):
        raise ModelError(f"There is no folder {name_or_path!r}, and it is no hub id either; {_WAYS_OUT}.")
    return _ask_hub(name_or_path, revision)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _ask_hub(repo_id: str, revision: str | None) -> ModelSource:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError, RevisionResolutionError

    answer = _hub_answer(repo_id, revision)
    if not isinstance(answer, Exception):
        return ModelSource(
            id=repo_id, path=repo_id, revision=answer, commit=answer.resolved, local_only=False
        )
    if isinstance(answer, RevisionNotFoundError):
        raise ModelError(f"The hub's {repo_id} has no revision {revision!r}; check --revision.") from answer
    if isinstance(answer, RepositoryNotFoundError):
        raise ModelError(
            f"There is no folder {repo_id!r}, and the hub shows no such model (a private one needs "
            f"`hf auth login` first); check the name, or {_WAYS_OUT}."
        ) from answer
    obstacle = (str(answer).strip() or type(answer).__name__).splitlines()[0]
    try:
        cached = HfApi().resolve_revision(repo_id, revision=revision, local_files_only=True)
    except RevisionResolutionError as error:
        raise unreachable(repo_id, obstacle) from error
    return ModelSource(id=repo_id, path=repo_id, revision=cached, commit=cached.resolved, obstacle=obstacle)


def unreachable(repo_id: str, obstacle: str) -> ModelError:
    """Return the error for a model that is not all in the hub's cache while the hub does not answer."""
    return ModelError(
        f"The hub cannot be reached ({obstacle.rstrip('.')}) and its cache does not hold all of {repo_id}; {_WAYS_OUT}."
    )


def _hub_answer(repo_id: str, revision: str | None) -> "ResolvedRevision | Exception":
    """The revision's commit on the hub, or what a short attempt to ask for it raises."""
    from huggingface_hub import HfApi

    answers: list[ResolvedRevision | Exception] = []

    def ask() -> None:
        api = HfApi()
        try:
            # Resolving alone falls back on the cache, and does not tell whether the hub answered.
            api.model_info(repo_id, revision=revision, timeout=_HUB_PATIENCE_S)
            answers.append(api.resolve_revision(repo_id, revision=revision))
        except Exception as error:
            answers.append(error)

    # A thread, as name resolution without a network can hang for longer than any timeout that can be set.
    thread = threading.Thread(target=ask, name="clusterprof-hub", daemon=True)
    thread.start()
    thread.join(_HUB_PATIENCE_S)
    return answers[0] if answers else TimeoutError(f"no answer within {_HUB_PATIENCE_S:.0f} s")
