"""`clusterprof apply`: answer a prompt with the KV cache compressed as a profile says."""

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._files import check_encoding, read_prompt
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import ModelChoice, profiles_model
from clusterprof.cli._shell import print_json
from clusterprof.errors import ClusterprofError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from clusterprof.cli._answer import Answer
    from clusterprof.data import Prompt
    from clusterprof.profile import Compression, Profile


@with_groups
def apply(
    *,
    profile: Annotated[Path, typer.Option(help="A profile that `clusterprof tune` wrote.")],
    dash: Annotated[
        str | None,
        typer.Argument(metavar="[-]", show_default=False, help="Read the prompt from standard input."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text file with the prompt; - for standard input.")
    ] = None,
    question: opt.Question = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer with the full cache too, and show both side by side.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the prompt as it is, without a chat template.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Use the profile although it was made for another model.")
    ] = False,
    model: opt.ProfilesModel = None,
    running: opt.Running,
    as_json: opt.Json = False,
) -> None:
    """Answer a prompt with a compressed KV cache."""
    text = read_prompt(prompt, prompt_file, dash)
    if question is not None:
        check_encoding(question, "The text of --question is not UTF-8; type it in a terminal set to UTF-8.")
    from clusterprof.profile import Profile
    from clusterprof.report.console import message_console, say

    console = message_console()
    loaded = Profile.load(profile)
    if loaded.compression.window == "query" and question is None:
        raise typer.BadParameter(
            "the profile's observation window is the prompt's question; give the question here, and the rest of "
            "the prompt as before.",
            param_hint="--question",
        )
    choice = ModelChoice(profiles_model(model, loaded), running)
    say(console, f"Loading {choice.id}")

    import torch

    from clusterprof.cli._answer import warm_up

    try:
        language_model, tokenizer = choice.load(console)
        forced = _differences(loaded, language_model, tokenizer, force=force, console=console)
        built = _build(language_model, tokenizer, text, question, raw=raw, max_new_tokens=max_new_tokens)
        query_length = _query_length(built, loaded.compression)
        input_ids = torch.tensor([built.input_ids], device=language_model.device)
        prompt_tokens, size = len(built.input_ids), loaded.compression.size
        if prompt_tokens <= size:
            say(console, f"not compressed: the prompt's {prompt_tokens:,} tokens fit in size {size:,}")
        warm_up(language_model, input_ids)
        ask = partial(_ask, language_model, tokenizer, input_ids, query_length, max_new_tokens, console)
        full = ask(None, echo=False) if compare else None
        answered = ask(loaded.compression, echo=not (as_json or compare))
    except KeyboardInterrupt:
        raise ClusterprofError("Interrupted; the answer is not complete.") from None
    kept_tokens = min(size, prompt_tokens)
    if as_json:
        print_json(_document(answered, full, prompt_tokens, kept_tokens, forced))
    else:
        _show(answered, full, prompt_tokens, kept_tokens, console)


def _ask(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    input_ids: "Tensor",
    query_length: int | None,
    max_new_tokens: int,
    console: "Console",
    compression: "Compression | None",
    *,
    echo: bool,
) -> "Answer":
    from clusterprof.cli._answer import answer
    from clusterprof.report.progress import waiting

    cache = "the full cache" if compression is None else f"at most {compression.size} tokens kept"
    with waiting(console, f"Reading {input_ids.shape[1]:,} tokens and answering with {cache}") as stop:
        return answer(
            model,
            tokenizer,
            input_ids,
            compression,
            query_length=query_length,
            max_new_tokens=max_new_tokens,
            echo=echo,
            on_first=stop if echo else lambda: None,
        )


def _document(
    answered: "Answer", full: "Answer | None", prompt_tokens: int, kept_tokens: int, forced: list[str]
) -> dict[str, Any]:
    document = {
        **asdict(answered),
        "prompt_tokens": prompt_tokens,
        "kept_tokens": kept_tokens,
        "compressed": kept_tokens < prompt_tokens,
        "forced": forced,
    }
    if full is not None:
        document["full"] = {name: value for name, value in asdict(full).items() if name != "kv_bytes_full"}
    return document


def _show(
    answered: "Answer", full: "Answer | None", prompt_tokens: int, kept_tokens: int, console: "Console"
) -> None:
    from clusterprof.report.answers import answer_summary, comparison_summary, comparison_table
    from clusterprof.report.console import result_console, say

    if full is None:
        say(console, answer_summary(answered, prompt_tokens=prompt_tokens, kept_tokens=kept_tokens))
    else:
        result_console().print(comparison_table(full, answered, kept_tokens=kept_tokens))
        say(result_console(), comparison_summary(full, answered))


def _differences(
    profile: "Profile",
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    force: bool,
    console: "Console",
) -> list[str]:
    """What does not match between profile and model, said aloud; an error unless forced."""
    from clusterprof.report.console import say

    if not force:
        profile.check(model, tokenizer, otherwise=", or apply it all the same with --force")
        return []
    found = profile.mismatches(model, tokenizer)
    if found:
        sentence = f"Forced: the profile was made for another model ({'; '.join(found)})."
        say(console, sentence, style="yellow")
    return found


def _build(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    question: str | None,
    *,
    raw: bool,
    max_new_tokens: int,
) -> "Prompt":
    """The prompt, built as the tune built its own."""
    from clusterprof.data import Message, Row, build_prompt
    from clusterprof.data.rows import question_row
    from clusterprof.models import describe_model

    if question is None:
        row = Row(id="", messages=(Message("user", text),))
    else:
        row = question_row(text, question.strip(), max_new_tokens=max_new_tokens)
    row = replace(row, id="prompt", use_chat_template=not raw)
    built = build_prompt(row, tokenizer, max_tokens=sys.maxsize)
    context, tokens = describe_model(model).max_position_embeddings, len(built.input_ids)
    if context is not None and tokens + max_new_tokens > context:
        raise DataError(
            f"The prompt has {tokens:,} tokens, and with --max-new-tokens {max_new_tokens} that is more than "
            f"the model's context of {context:,}; shorten one of them, or use a model with a longer context."
        )
    return built


def _query_length(prompt: "Prompt", compression: "Compression") -> int | None:
    """Tokens of the question, if that is the observation window."""
    if compression.window != "query":
        return None
    length = prompt.query_length
    if length is None:
        raise DataError(
            "The question cannot be found among the prompt's tokens (the tokenizer is not a fast one, or its chat "
            "template rewrites the text); try --raw, or a profile whose window is a number of tokens."
        )
    if length >= compression.size:
        raise DataError(
            f"The question has {length:,} tokens, and the profile keeps {compression.size:,} of the whole prompt; "
            "shorten the question, or use a profile of a larger size."
        )
    return length
