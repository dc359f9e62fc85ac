"""`clusterprof compare PROFILE...`: profiles against the baselines, on samples that their tunes did not use."""

from collections.abc import Callable
from dataclasses import dataclass
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
    data_dir: opt.DataDir = None,
    templates: opt.Templates = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File of results, JSON lines; one that is there is continued.",
            show_default="runs/held-out-MODEL.jsonl",
        ),
    ] = None,
    model: opt.ProfilesModel = None,
    running: opt.Running,
    as_json: opt.Json = False,
) -> None:
    """Compare profiles with the baselines at the same size, on samples that none of their tunes used."""
    from clusterprof.evaluation.contestants import contestants
    from clusterprof.evaluation.generation import scorer_of
    from clusterprof.evaluation.held_out import HeldOutBenchmark
    from clusterprof.evaluation.tasks import entrants
    from clusterprof.profile import Profile

    loaded = [Profile.load(path) for path in profiles]
    data = _Data.of(loaded)
    compared = contestants([*(str(path.absolute()) for path in profiles), *names_of(methods, "--methods")])
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
    tasks = _held_out(data, samples, decode_tokens, data_dir, templates)
    run(options, Plan(bench, entering, tasks, decode_tokens=decode_tokens))


@dataclass(frozen=True)
class _Data:
    """The data that profiles were tuned on, and the rows of it that they were tuned or judged on."""

    name: str
    tokens: int | None
    seed: int
    content_hash: str
    seen: frozenset[str]

    @classmethod
    def of(cls, profiles: "list[Profile]") -> "_Data":
        first = profiles[0].dataset
        for profile in profiles:
            other = profile.dataset
            if (other.name, other.tokens, other.content_hash) != (
                first.name,
                first.tokens,
                first.content_hash,
            ):
                raise ProfileError(
                    f"The profiles were tuned on different data ({_shown(first)} and {_shown(other)}); compare those "
                    "of the same data with one another."
                )
        seen = frozenset(
            name
            for profile in profiles
            for name in (*profile.dataset.sampled_ids, *profile.dataset.held_out_ids)
        )
        return cls(first.name, first.tokens, first.seed, first.content_hash, seen)


def _shown(dataset: "DatasetRecord") -> str:
    length = "" if dataset.tokens is None else f" of {dataset.tokens:,} tokens"
    return f"{one_line(dataset.name)}{length}, rows {dataset.content_hash[:8]}"


def _held_out(
    data: _Data, samples: int | None, decode_tokens: int, data_dir: Path | None, templates: Path | None
) -> "Callable[[TaskMaker], list[Task]]":
    rows = load_rows(data.name, data.tokens, data.seed, data_dir, templates, None)

    def make(maker: "TaskMaker") -> "list[Task]":
        from dataclasses import replace

        from clusterprof.data import sample_rows

        dataset = rows or load_rows(data.name, data.tokens, data.seed, data_dir, templates, maker.tokenizer)
        assert dataset is not None
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
        return maker.make(dataset.name, chosen, max_new_tokens=decode_tokens)

    return make
