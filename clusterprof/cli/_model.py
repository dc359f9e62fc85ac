"""The model that a command runs: which one, and loading it with a word to the user."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from clusterprof.cli._options import Running
from clusterprof.errors import ModelError
from clusterprof.report.console import say
from clusterprof.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.profile import Profile


@dataclass(frozen=True)
class ModelChoice:
    """A model and how to run it, as the options say; see `clusterprof.models.load_model`."""

    name: str
    running: Running

    @property
    def id(self) -> str:
        """What a profile calls this model."""
        from clusterprof.models import BUILTIN_ID, BUILTIN_NAME

        return BUILTIN_ID if self.name == BUILTIN_NAME else self.name

    def load(self, console: "Console") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """Load the model and its tokenizer, and say what they run on.

        Raises
        ------
        ModelError
            If it cannot be loaded as asked.
        """
        from clusterprof.models import load_model

        quiet_transformers()
        model, tokenizer = load_model(
            self.name,
            **asdict(self.running),
        )
        say(console, f"model    {_facts(model)}")
        return model, tokenizer


def profiles_model(named: str | None, profile: "Profile") -> str:
    """Return the model that is named, else the one that a profile was made for.

    Raises
    ------
    ModelError
        If neither is known.
    """
    from clusterprof.models import BUILTIN_ID, BUILTIN_NAME

    if named is not None:
        return named
    if not profile.model.id:
        raise ModelError("The profile does not name its model; name one with --model.")
    return BUILTIN_NAME if profile.model.id == BUILTIN_ID else profile.model.id


def quiet_transformers() -> None:
    """Keep off the terminal what transformers tells about its own doings; its errors stay."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _facts(model: "PreTrainedModel") -> str:
    """Return the model and what it runs on in one line."""
    from clusterprof.models import describe_model

    info = describe_model(model)
    heads = f"{info.num_attention_heads} query and {info.num_key_value_heads} KV heads"
    dtype, backend = str(model.dtype).removeprefix("torch."), model.config._attn_implementation
    return one_line(
        f"{info.id} ({info.architecture}, {info.num_hidden_layers} layers, {heads}), "
        f"{dtype} on {model.device}, {backend} attention"
    )
