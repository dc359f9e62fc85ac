"""The options, each with its help and the range of what a user may type."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_MODEL, _DATA, _SEARCH = "Model", "Data", "Search"

# Above what any machine or dataset has; larger numbers would only fail later, and less clearly.
MOST = 10_000_000
# Those of clusterprof.data.builtin.generator, whose import would slow down every start.
MIN_TOKENS, MAX_TOKENS = 256, 131_072
_LONGEST_NAME = 300
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT])(i?)B", re.ASCII)


def _share(value: float | None) -> float | None:
    # Written this way round, NaN is out of range too.
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is not in the range 0<x<=1.")
    return value


def _seconds(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} is not a number of seconds above 0.")
    return value


def _not_blank(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty.")
    return value


def _name(value: str | None) -> str | None:
    """For names that databases keep and terminals show."""
    if value is not None and not value.isprintable():
        raise typer.BadParameter("it has characters that cannot be printed.")
    if value is not None and len(value) > _LONGEST_NAME:
        raise typer.BadParameter(
            f"it has {len(value):,} characters, and at most {_LONGEST_NAME} are allowed."
        )
    return _not_blank(value)


def _window(value: str | int) -> int | str:
    # The default comes as the number it is.
    text = str(value)
    if text == "query":
        return text
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST:
        raise typer.BadParameter(f"it is neither a number in the range 1<=x<={MOST} nor the word query.")
    return int(text)


def memory_bytes(text: str) -> int:
    """Return the bytes of an amount such as 24GiB, 80GB or 512 MiB; raise a BadParameter if it is none."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not an amount of memory; write it as 24GiB or 80GB.")
    number, prefix, binary = found.groups()
    amount = int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(prefix)))
    if amount == 0:
        raise typer.BadParameter(f"{text!r} holds nothing; give more than 0.")
    return amount


Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]

# Which model, and how it runs.
_NAME = "builtin, a model folder, or a hub id."
Model = Annotated[
    str | None,
    typer.Option(
        callback=_not_blank,
        help=_NAME,
        show_default="Mistral-7B-Instruct-v0.2 with CUDA, else builtin",
        rich_help_panel=_MODEL,
    ),
]
ProfilesModel = Annotated[
    str | None,
    typer.Option(
        "--model", callback=_not_blank, help=_NAME, show_default="the profile's", rich_help_panel=_MODEL
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(callback=_not_blank, help="Branch, tag or commit on the hub.", rich_help_panel=_MODEL),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        help="Of the weights; auto: float32 on a CPU, else the checkpoint's half type.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        callback=_not_blank,
        help="auto (CUDA where there is one), cpu, cuda, cuda:N or mps.",
        rich_help_panel=_MODEL,
    ),
]
Attention = Annotated[
    Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"],
    typer.Option(
        "--attn",
        help="Attention backend; auto: flash_attention_2 where it can be had, else sdpa.",
        rich_help_panel=_MODEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that the model brings along.", rich_help_panel=_MODEL
    ),
]


@dataclass(frozen=True)
class Running:
    """How a model runs."""

    revision: Revision = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    attn: Attention = "auto"
    trust_remote_code: TrustRemoteCode = False


# Which prompts.
DatasetName = Annotated[
    str,
    typer.Option(
        callback=_not_blank,
        help="A name from `clusterprof datasets ls`, a local .jsonl, .json, .csv or .parquet file, or a hub id.",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        min=MIN_TOKENS,
        max=MAX_TOKENS,
        help="Length of generated prompts.",
        show_default="2000",
        rich_help_panel=_DATA,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of LongBench's JSONL files, or its data.zip.",
        show_default="the hub",
        rich_help_panel=_DATA,
    ),
]
Templates = Annotated[
    Path | None,
    typer.Option(help="JSON file with another wording of LongBench's tasks.", rich_help_panel=_DATA),
]
Fraction = Annotated[
    float | None,
    typer.Option(
        callback=_share,
        metavar="SHARE",
        help="Share of the rows to tune on.",
        show_default="0.2, but at least 6 rows, or half of fewer than 12",
        rich_help_panel=_DATA,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Rows to tune on, instead of a share.", rich_help_panel=_DATA),
]
Holdout = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST,
        help="Other rows, to judge the result by.",
        show_default="as many as are tuned on, at least 6, and what a target takes",
        rich_help_panel=_DATA,
    ),
]

# What to look for, and how long.
Method = Annotated[
    Literal["clusterattn", "snapkv", "topk", "streaming_llm", "h2o", "kmeans", "dbscan", "ngram"],
    typer.Option(
        help="Compression method to tune. kmeans and dbscan need the extra `baselines` and take seconds per "
        "prompt and trial; h2o takes longer to capture.",
        rich_help_panel=_SEARCH,
    ),
]
Sizes = Annotated[
    list[int],
    typer.Option(
        "--size",
        min=2,
        max=MOST,
        help="Prompt tokens to keep per KV head, the window included; again for a profile of another size.",
    ),
]
Window = Annotated[
    Any,  # an int or "query", and typer knows no such type
    typer.Option(
        parser=_window,
        metavar="N|query",
        help="Observation window, which judges the rest: the prompt's last N tokens, or its question.",
        rich_help_panel=_SEARCH,
    ),
]
DecodeTokens = Annotated[
    int, typer.Option(min=1, max=MOST, help="Longest answer per prompt.", rich_help_panel=_SEARCH)
]
Question = Annotated[
    str | None,
    typer.Option(callback=_not_blank, help="The question about the prompt, put after it."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=MOST, help="Longest answer.")]
Objective = Annotated[
    Literal["log_kl", "kl", "agreement", "loss", "cosine", "cosine_padded", "attention_output"] | None,
    typer.Option(
        help="What the search optimises.",
        show_default="log_kl; for a target of attention, that one",
        rich_help_panel=_SEARCH,
    ),
]
Sampler = Annotated[
    Literal["tpe", "gp", "grid"],
    typer.Option(
        help="How the search chooses what to try: two of Optuna's samplers, or points at even distances.",
        rich_help_panel=_SEARCH,
    ),
]
PerLayer = Annotated[
    bool,
    typer.Option(
        "--per-layer",
        help="Then look for other values in groups of layers; kept if held-out prompts show them to be better.",
        rich_help_panel=_SEARCH,
    ),
]
Trials = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST,
        help="Finished trials of each search, those of earlier runs included; fewer where a method has no more values "
        "to try, but always those that a search begins with.",
        rich_help_panel=_SEARCH,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        callback=_seconds,
        metavar="SECONDS",
        help="Start no new trial of a search after this time.",
        rich_help_panel=_SEARCH,
    ),
]
# Samplers take seeds of 32 bits.
Seed = Annotated[
    int,
    typer.Option(min=0, max=2**32 - 1, help="Of sampling, generators and search.", rich_help_panel=_SEARCH),
]
CaptureMemory = Annotated[
    Any,  # bytes, parsed from the text that is its default, too
    typer.Option(
        parser=memory_bytes,
        metavar="AMOUNT",
        help="Disk space for the captures of all runs together, as 8GiB: those used longest ago are deleted when "
        "they take more, but none that a run is using. In memory they only fill the page cache.",
        rich_help_panel=_SEARCH,
    ),
]
Study = Annotated[
    str | None,
    typer.Option(
        callback=_name,
        metavar="NAME",
        help="Name for the Optuna studies: NAME-SIZE, and NAME-SIZE-snapkv of the SnapKV that is compared with.",
        show_default="made of what matters",
        rich_help_panel=_SEARCH,
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        callback=_name,
        help="URL of the Optuna storage.",
        show_default="SQLite in the cache folder",
        rich_help_panel=_SEARCH,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Where the profile goes; the folder where they go, if there are several sizes.",
        show_default="profiles/MODEL/DATASET-SIZE[-METHOD].json",
    ),
]
