"""`clusterprof compare PROFILE...`: profiles against the baselines, on samples that their tunes did not use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterprof.cli import _options as opt
from clusterprof.cli._data import load_rows
from clusterprof.cli._groups import with_groups
from clusterprof.cli._model import profiles_model
from clusterprof.cli.evaluation._options import RunOptions, names_of, samples_option
from clusterprof.cli.evaluation._run import Plan, check_replayable, run
from clusterprof.errors import DataError, ProfileError
from clusterprof.text import one_line

if TYPE_CHECKING:
    from clusterprof.data import Dataset, Row
    from clusterprof.evaluation.held_out import HeldOutBenchmark
    from clusterprof.evaluation.tasks import Task, TaskMaker
    from clusterprof.profile import DatasetRecord, Profile

_BASELINES = "clusterattn,snapkv,topk,streaming_llm"


@with_groups
def compare(
    *,
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE...", help="Profiles of one model and one dataset.")
    ],
    methods: Annotated[
        str, typer.Option(metavar="A,B,...", help="What to compare them with, at the profiles' sizes.")
    ] = _BASELINES,
    samples: Annotated[int | None, samples_option("Held-out rows, instead of all.")] = None,
    decode_tokens: opt.DecodeTokens = 64,
    capture_memory: opt.CaptureMemory = "20GiB",
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File of results, JSON lines; one that is there is continued.",
            show_default="runs/held-out-MODEL.jsonl, with a hash where the model's name does not fit a file",
        ),
    ] = None,
    model: opt.ProfilesModel = None,
    running: opt.Running,
    as_json: opt.Json = False,
) -> None:
    """Compare profiles with baselines at the same size, tuned SnapKV too, on samples that no tune of them used."""
    from clusterprof.evaluation.contestants import contestants, tuned_rivals
    from clusterprof.evaluation.generation import scorer_of
    from clusterprof.evaluation.held_out import HeldOutBenchmark
    from clusterprof.evaluation.tasks import entrants
    from clusterprof.profile import Profile

    loaded = [Profile.load(path) for path in profiles]
    compared = contestants([*(str(path.absolute()) for path in profiles), *names_of(methods, "--methods")])
    compared += tuned_rivals(compared)
    data = _Data.of(loaded, [it.profile for it in compared if it.profile is not None])
    entering = entrants(compared, [], loaded[0].compression.window)
    check_replayable(entering)
    options = RunOptions(
        seed=data.seed,
        output=output,
        model=profiles_model(model, loaded[0]),
        running=running,
        as_json=as_json,
    )
    bench = HeldOutBenchmark(scorer_of(data.name), decode_tokens)
    held_out = _held_out(data, samples, decode_tokens, data_dir, templates)

    def tasks(maker: "TaskMaker") -> "list[Task]":
        made = held_out(maker)
        _say_if_not_scored(bench, made)
        return made

    run(options, Plan(bench, entering, tasks, decode_tokens=decode_tokens, capture_memory=capture_memory))


def _say_if_not_scored(bench: "HeldOutBenchmark", tasks: "Sequence[Task]") -> None:
    from clusterprof.report.console import message_console, say

    longest = max((task.row.max_new_tokens or 0 for task in tasks if not bench.is_scored(task)), default=0)
    if bench.score is not None and longest:
        say(
            message_console(),
            f"Answers may have {longest} tokens here and would be cut at {bench.decode_tokens}, so they are not "
            f"scored; use --decode-tokens {longest}.",
            style="yellow",
        )


@dataclass(frozen=True)
class _Data:
    """The data that profiles were tuned on, and the rows of it that they were tuned or judged on."""

    name: str
    tokens: int | None
    seed: int
    content_hash: str
    seen: frozenset[str]

    @classmethod
    def of(cls, profiles: "list[Profile]", compared: "list[Profile]") -> "_Data":
        """The data of profiles; ``compared`` are those of --methods, too, which may be of other data."""
        first = profiles[0].dataset
        for profile in profiles:
            other = profile.dataset
            # Whatever the file is called.
            if other.content_hash != first.content_hash:
                raise ProfileError(
                    f"The profiles were tuned on different data ({_shown(first)} and {_shown(other)}); compare those "
                    "of the same data with one another."
                )
        used = [it.dataset for it in compared if it.dataset.content_hash == first.content_hash]
        seen = frozenset(name for data in used for name in (*data.sampled_ids, *data.held_out_ids))
        return cls(first.name, first.tokens, first.seed, first.content_hash, seen)


def _shown(dataset: "DatasetRecord") -> str:
    length = "" if dataset.tokens is None else f" of {dataset.tokens:,} tokens"
    return f"{one_line(dataset.name)}{length}, rows {dataset.content_hash[:8]}"


def _held_out(
    data: _Data, samples: int | None, decode_tokens: int, data_dir: Path | None, templates: Path | None
) -> "Callable[[TaskMaker], list[Task]]":
    from clusterprof.data import sample_rows
    from clusterprof.evaluation.longbench_scores import GROUP_OF_TASK, check_rows

    def choose(dataset: "Dataset") -> "tuple[Row, ...]":
        if dataset.content_hash != data.content_hash:
            raise DataError(
                f"The rows of {one_line(data.name)} are not those that the profiles were tuned on (another file, other "
                "templates or another Python version), so it is not known which ones they have not seen; tune again."
            )
        unseen = tuple(row for row in dataset.rows if row.id not in data.seen)
        if not unseen:
            raise DataError(
                f"The profiles were tuned and judged on all {len(dataset.rows)} rows of {one_line(data.name)}, so none "
                "is left to compare them on; tune with a smaller --fraction or --holdout."
            )
        chosen = sample_rows(replace(dataset, rows=unseen), fraction=1.0, samples=samples, seed=data.seed)
        if dataset.name in GROUP_OF_TASK:
            check_rows(dataset.name, chosen)
        return chosen

    known = load_rows(data.name, data.tokens, data.seed, data_dir, templates, None)
    if known is not None:
        choose(known)

    def make(maker: "TaskMaker") -> "list[Task]":
        dataset = known or load_rows(data.name, data.tokens, data.seed, data_dir, templates, maker.tokenizer)
        assert dataset is not None
        return maker.make(
            dataset.name,
            choose(dataset),
            max_new_tokens=decode_tokens,
            content_hash=dataset.content_hash,
        )

    return make
