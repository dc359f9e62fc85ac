import io
import re
from math import exp

import pytest
from rich.console import Console

from clusterprof.evaluation.groups import comparable
from clusterprof.evaluation.records import Record
from clusterprof.report.evaluation_document import summary_document
from clusterprof.report.evaluation_tables import evaluation_notes, evaluation_sheets, evaluation_tables
from clusterprof.report.metrics import metric_of
from clusterprof.report.sheets import Entry, Sheet
from clusterprof.statistics import mean_estimate, paired_difference
from tests.evaluation.examples import (
    ENVIRONMENT,
    ablation_run,
    every_run,
    fit_run,
    hit_rate_run,
    lines_run,
    longbench_run,
    needle_run,
    perplexity_run,
    record,
    samples_run,
)

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
FEW = ("clusterattn", "snapkv")
# As few prompts as a difference may rest on.
VALUES = {
    "full": [1.0, 1.0, 0.5] * 2,
    "snapkv": [0.5, 0.4, 0.1] * 2,
    "topk": [0.1, 0.1, 0.0] * 2,
    "h2o": [0.1, 0.2, 0.0] * 2,
}


def needles(values: dict[str, list[float]] = VALUES, size: int = 128) -> list[Record]:
    return [
        record(method=method, size=size, prompt=f"p{number}", scores={"accuracy": value})
        for method, scores in values.items()
        for number, value in enumerate(scores)
    ]


def sheets(records: list[Record]) -> list[Sheet]:
    return [sheet for group in comparable(records) for sheet in evaluation_sheets(group)]


def rows(sheet: Sheet) -> list[list[str]]:
    return [[entry.text for entry in row] for section in sheet.sections for row in section]


def on_a_terminal(records: list[Record], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    for table in evaluation_tables(records, width):
        console.print(table)
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return shown.getvalue()


def test_a_mean_has_its_interval_and_paired_differences() -> None:
    sheet = sheets(needles())[0]
    assert sheet.title == "Share of right answers (higher is better)"
    assert sheet.headings == ("size", "method", "prompts", "accuracy ↑", f"{MINUS} full", f"{MINUS} snapkv")
    topk = sheet.sections[1][1]
    mean = mean_estimate(VALUES["topk"])
    to_full = paired_difference(VALUES["topk"], VALUES["full"])
    assert topk[:4] == (
        Entry("128"),
        Entry("topk"),
        Entry("6"),
        Entry("0.067", f"[{mean.low:.3f}, {mean.high:.3f}]"),
    )
    assert topk[4] == Entry(f"{MINUS}0.767", f"[{to_full.low:+.3f}, {to_full.high:+.3f}]".replace("-", MINUS))
    assert [row[:2] for row in rows(sheet)] == [
        ["all", "full"],
        ["128", "snapkv"],
        ["128", "topk"],
        ["128", "h2o"],
    ]


def test_only_a_method_that_is_ahead_of_all_others_stands_out() -> None:
    sheet = sheets(needles())[0]
    strong = [row[1].text for section in sheet.sections for row in section if any(it.strong for it in row)]
    assert strong == ["snapkv"]
    assert any("Bold" in note for note in sheet.notes)
    close = {**VALUES, "snapkv": [0.1, 0.3, 0.0]}
    sheet = sheets(needles(close))[0]
    assert not any(entry.strong for section in sheet.sections for row in section for entry in row)
    assert not any("Bold" in note for note in sheet.notes)


def test_of_a_loss_the_lowest_stands_out() -> None:
    records = [
        record(bench="perplexity", labels={}, method=method, prompt=f"p{number}", scores={"loss": loss})
        for method, losses in {"snapkv": [1.0, 1.1, 1.2] * 2, "topk": [3.0, 3.0, 3.1] * 2}.items()
        for number, loss in enumerate(losses)
    ]
    sheet = sheets(records)[0]
    assert [row[1].text for section in sheet.sections for row in section if row[3].strong] == ["snapkv"]
    assert "lower is better" in sheet.title


def test_a_difference_that_was_not_shown_is_weak() -> None:
    sheet = sheets(
        needles({"full": [1.0, 0.0, 0.5, 0.1] * 2, "snapkv": [0.0, 1.0, 0.5, 0.1] * 2, "topk": [0.0] * 8})
    )[0]
    (_, (snapkv, topk)) = sheet.sections
    assert snapkv[4].weak
    assert not topk[4].weak


def test_two_prompts_have_no_interval() -> None:
    sheet = sheets(needles({"full": [1.0, 0.0], "topk": [0.0, 0.0]}))[0]
    assert sheet.sections[0][0][3] == Entry("0.500")
    assert sheet.sections[1][0][4] == Entry(f"{MINUS}0.500", weak=True)


def test_a_tuned_snapkv_is_a_reference_too() -> None:
    records = needles() + needles({"snapkv (needle-128-snapkv)": [0.4, 0.4, 0.4]})
    assert sheets(records)[0].headings[-2:] == (f"{MINUS} snapkv", f"{MINUS} snapkv (needle)")


UNEVEN = "Not every method and size has every prompt here: compare the differences, not the means."


def test_it_is_said_when_prompts_differ_or_fit() -> None:
    records = needles({"full": [1.0, 0.0, 1.0], "topk": [0.0, 0.0]})
    assert all(UNEVEN in sheet.notes for sheet in sheets(records)[:2])
    fits = record(prompt="short", prompt_tokens=90, labels={"tokens": 90, "fits": 1}, size=2048)
    assert "1 prompt fits in size 2,048; nothing was evicted from it." in sheets([*records, fits])[0].notes
    assert not any("fit" in note or note == UNEVEN for sheet in sheets(needles()) for note in sheet.notes)


def test_as_many_prompts_need_not_be_the_same_ones() -> None:
    def topk(*prompts: str) -> list[Record]:
        return [
            record(method=method, prompt=prompt, labels={"tokens": len(prompt)})
            for method, own in (("full", ("a", "b", "cc")), ("topk", prompts))
            for prompt in own
        ]

    overall, by_length = sheets(topk("a", "b", "dd"))[:2]
    assert [row[2] for row in rows(overall)] == ["3", "3"]
    assert UNEVEN in overall.notes
    assert UNEVEN in by_length.notes
    # The differences are over the two that both have.
    assert overall.sections[1][0][4].detail == "2 pairs"
    assert not any(UNEVEN in sheet.notes for sheet in sheets(topk("a", "b", "cc")))


def test_prompts_of_other_lengths_are_no_other_prompts_of_a_method() -> None:
    assert not any(UNEVEN in sheet.notes for sheet in sheets(list(hit_rate_run())))
    points = list(ablation_run())
    assert UNEVEN not in sheets(points)[0].notes
    assert UNEVEN in sheets(points[1:])[0].notes


def test_how_many_pairs_is_said_where_they_are_not_all_the_prompts() -> None:
    topk = sheets(needles({"full": [1.0, 0.9, 0.8, 0.7], "topk": [0.5, 0.1, 0.2]}))[0].sections[1][0]
    assert topk[4].detail.endswith("]")
    full_has_fewer = sheets(needles({"full": [1.0, 0.9, 0.8], "topk": [0.5, 0.1, 0.2, 0.1]}))[0].sections[1][
        0
    ]
    assert full_has_fewer[4].detail.endswith("] 3 pairs")


def test_it_is_said_how_many_prompts_were_cut() -> None:
    cut = [
        record(method=method, prompt=prompt, labels={"tokens": 1000, "cut": 7})
        for method in ("full", "topk")
        for prompt in ("a", "b")
    ]
    sheet = sheets([*needles(), *cut])[0]
    assert "2 prompts were longer than the model or --max-tokens allows and lost the middle." in sheet.notes
    (group,) = summary_document([*needles(), *cut])["groups"]
    assert (group["prompts"], group["prompts_cut"]) == (8, 2)


def test_needles_by_length() -> None:
    by_length = sheets(list(needle_run(FEW, repeats=1)))[1]
    assert by_length.headings == ("size", "method", "1,000", "2,000", "4,000")
    assert [row[:2] for row in rows(by_length)] == [
        ["all", "full"], ["128", "clusterattn"], ["128", "snapkv"], ["256", "clusterattn"], ["256", "snapkv"],
    ]  # fmt: skip


def test_lines_of_longevals_files_are_by_their_lines() -> None:
    records = [
        record(bench="lines", prompt=f"{n}", prompt_tokens=4000 + n, labels={"lines": 200}) for n in range(3)
    ]
    assert sheets(records)[1].headings == ("size", "method", "200")
    assert sheets(list(lines_run(FEW, repeats=1)))[1].headings[2:] == ("1,000", "2,000", "4,000", "8,000")


def test_longbench_has_all_tasks_groups_and_the_mean_over_tasks() -> None:
    records = [
        record(
            bench="longbench",
            dataset=task,
            prompt=f"{number}",
            labels={"task": task, "group": group},
            method="full",
            scores={"score": score},
        )
        for task, group, scores in (
            ("a", "QA", [10, 20, 30]),
            ("b", "QA", [100] * 6),
            ("c", "code", [0, 0, 0]),
        )
        for number, score in enumerate(scores)
    ]
    overall, by_group, by_task = sheets(records)
    assert rows(overall) == [["all", "full", "12", "40.0", DASH]]
    assert overall.notes[0].startswith("The mean of the means of 3 tasks")
    assert by_group.headings[2:] == ("QA", "code")
    assert rows(by_group) == [["all", "full", "60.0", "0.0"]]
    assert by_task.headings == ("size", "task", "full")
    assert [row[1:] for row in rows(by_task)] == [["a", "20.0"], ["b", "100.0"], ["c", "0.0"]]


def test_every_size_of_longbench_has_its_tasks_beside_the_full_caches() -> None:
    by_task = sheets(list(longbench_run(FEW)))[2]
    assert [[row[0].text for row in section] for section in by_task.sections] == [["256"] * 4, ["512"] * 4]
    full = [[row[2] for row in section] for section in by_task.sections]
    assert full[0] == full[1]


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    losses = [1.0, 2.0, 6.0]
    fields = {"bench": "perplexity", "labels": {}, "method": "full"}
    # Older releases wrote one for each prompt, whose mean is another number.
    records = [
        record(prompt=f"{loss}", scores={"loss": loss, "perplexity": exp(loss)}, **fields) for loss in losses
    ]
    _, perplexity = sheets(records)
    mean = mean_estimate(losses)
    assert mean.low is not None
    assert mean.high is not None
    assert perplexity.sections[0][0][2] == Entry(
        f"{exp(3):.2f}", f"[{exp(mean.low):.2f}, {exp(mean.high):.2f}]"
    )
    assert perplexity.headings == ("size", "method", "needle")
    (group,) = summary_document(records)["groups"]
    overall = {it["metric"]: it for it in group["means"] if not it["labels"]}
    assert list(overall) == ["loss", "perplexity"]
    assert overall["loss"]["mean"] == mean.mean
    derived = [overall["perplexity"][name] for name in ("mean", "low", "high")]
    assert derived == [exp(mean.mean), exp(mean.low), exp(mean.high)]


def test_a_hopeless_loss_has_a_finite_perplexity() -> None:
    (group,) = summary_document(
        [record(bench="perplexity", labels={}, method="full", scores={"loss": 5000.0})]
    )["groups"]
    assert {it["metric"]: it["mean"] for it in group["means"]} == {"loss": 5000, "perplexity": exp(20)}


def test_other_benchmarks_have_their_scores() -> None:
    (hit_rate,) = sheets(list(hit_rate_run()))
    assert hit_rate.headings == ("size", "method", "tokens", "prompts", "hit_rate ↑")
    assert [row[2:4] for row in rows(hit_rate)] == [["1,000", "3"], ["2,000", "3"], ["4,000", "3"]]
    fit, log_kl = sheets(list(fit_run()))
    assert fit.headings[3:] == ("log_kl ↓", "kl ↓", "agreement ↑", "cosine ↑")
    assert log_kl.headings[4:] == (f"{MINUS} clusterattn",)
    (ablation,) = sheets(list(ablation_run()))
    assert ablation.headings[2:] == ("num_block", "theta", "prompts", "cosine ↑", "kl ↓", "agreement ↑")
    assert len(rows(ablation)) == 12
    (mine,) = sheets([record(bench="mine", scores={"speed": 1.0})])
    assert mine.headings[3] == "speed ↑"
    # What only describes has no better direction.
    (marked,) = sheets([record(bench="hit-rate", scores={"hit_rate": 1.0, "window_share": 0.5})])
    assert marked.headings[-2:] == ("hit_rate ↑", "window_share")
    assert sheets(list(samples_run())) == []


def test_n_grams_of_an_ablation_have_a_column_of_their_own() -> None:
    ngram = record(bench="ablation", method="ngram", labels={"n": 2}, scores={"cosine": 0.9})
    (sheet,) = sheets([*ablation_run(), ngram])
    assert sheet.headings[2:5] == ("num_block", "theta", "n")
    assert rows(sheet)[-1] == ["128", "ngram", "", "", "2", "1", "0.9000", DASH, DASH]


def test_terminals_show_all_of_it() -> None:
    text = on_a_terminal(needles())
    assert "Share of right answers" in text
    assert "0.333 [" in text
    notes = evaluation_notes(needles())
    assert "95 % intervals" in notes[0]
    assert any("Bold" in note for note in notes)
    assert evaluation_notes(list(samples_run())) == []


def test_a_table_that_does_not_fit_has_intervals_below_means() -> None:
    records = needles()
    assert "0.333 [" in on_a_terminal(records, 100)
    narrow = on_a_terminal(records, 85)
    assert f"{MINUS}0.500 [" not in narrow
    assert f"{MINUS}0.500 " in narrow
    assert narrow.count("Share of right answers (") == 1


@pytest.mark.parametrize("bench", [bench for bench in every_run() if bench != "samples"])
def test_tables_fit_into_80_columns(bench: str) -> None:
    records = every_run()[bench]
    records += [
        it.model_copy(
            update={"method": f"snapkv (a profile with a long name-{it.size})", "key": it.key[::-1]}
        )
        for it in records
        if it.method == "snapkv"
    ]
    text = on_a_terminal(records, 80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    # All columns are there, and no number is broken.
    whole = on_a_terminal(records, 1000)
    numbers = re.compile(rf"[{MINUS}+]?\d[\d.,]*\d|\[.*?\]")
    assert set(numbers.findall(whole)) == set(numbers.findall(text))


def test_several_models_are_named() -> None:
    elsewhere = {**ENVIRONMENT, "model": "b (copy)"}
    others = [it.model_copy(update={"key": it.key[::-1], "environment": elsewhere}) for it in needles()]
    text = on_a_terminal(needles() + others)
    assert "needle, tiny/llama: Share of right answers" in text
    assert "needle, b (copy): Share of right answers" in text


def test_settings_that_differ_are_named() -> None:
    records = [
        record(bench="fit", method="topk", scores={"kl": 0.1}, settings={"decode_tokens": steps})
        for steps in (4, 64)
    ]
    text = on_a_terminal(records)
    assert "fit, tiny/llama, 4: " in text
    assert "fit, tiny/llama, 64: " in text


def test_parameters_that_differ_are_rows_means_and_lines_of_their_own() -> None:
    long = "snapkv (a profile with a name that is as long as names of profiles may be)"
    records = [
        record(
            method=long,
            prompt=prompt,
            parameters={"name": "snapkv", "kernel_size": size},
            scores={"accuracy": right},
        )
        for size, right in ((5, 0.0), (7, 1.0))
        for prompt in ("a", "b")
    ]
    names = [f"{long}, kernel_size {size}" for size in (5, 7)]
    assert [row[1:4:2] for row in rows(sheets(records)[0])] == [[names[0], "0.000"], [names[1], "1.000"]]
    (group,) = summary_document(records)["groups"]
    means = {it["method"]: it["mean"] for it in group["means"] if it["metric"] == "accuracy"}
    assert means == {names[0]: 0.0, names[1]: 1.0}


def test_names_are_text_not_markup() -> None:
    text = on_a_terminal([record(method="[red]x[/red]", parameters={"name": "x"})])
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    ("value", "text", "signed"),
    [
        (0.0, "0.000", "+0.000"),
        (-0.0004, "0.000", "+0.000"),
        (-1.5, f"{MINUS}1.500", f"{MINUS}1.500"),
        (2, "2.000", "+2.000"),
    ],
)
def test_numbers_have_no_negative_zero(value: float, text: str, signed: str) -> None:
    accuracy = metric_of("accuracy")
    assert (accuracy.text(value), accuracy.signed(value)) == (text, signed)


def test_the_document_has_every_mean_with_interval_and_differences() -> None:
    (group,) = summary_document(needles())["groups"]
    assert group["bench"] == "needle"
    assert group["environment"] == ENVIRONMENT
    assert group["settings"] == {}
    assert group["datasets"] == ["needle"]
    topk = next(it for it in group["methods"] if it["method"] == "topk")
    assert topk == {
        "method": "topk", "sizes": (128,), "parameters": {"name": "topk"}, "window": 32,
        "origin": "its paper's values",
    }  # fmt: skip
    mean = mean_estimate(VALUES["topk"])
    found = [it for it in group["means"] if it["method"] == "topk" and not it["labels"]]
    assert found[0] | {"differences": {}} == {
        "metric": "accuracy", "method": "topk", "size": 128, "labels": {}, "mean": mean.mean, "low": mean.low,
        "high": mean.high, "samples": 6, "differences": {},
    }  # fmt: skip
    difference = paired_difference(VALUES["topk"], VALUES["snapkv"])
    assert found[0]["differences"]["snapkv"]["mean"] == difference.mean
    assert [it["labels"] for it in group["means"] if it["method"] == "full"] == [{}, {"tokens": 1000}]


def test_the_document_of_longbench_has_means_over_tasks() -> None:
    (group,) = summary_document(list(longbench_run(FEW)))["groups"]
    overall = sheets(list(longbench_run(FEW)))[0]
    full = next(it for it in group["means"] if it["method"] == "full" and not it["labels"])
    assert f"{full['mean']:.1f}" == overall.sections[0][0][3].text
    labels = [tuple(it["labels"]) for it in group["means"]]
    assert set(labels) == {(), ("group",), ("task",)}


@pytest.mark.parametrize("run", [perplexity_run, hit_rate_run, fit_run, ablation_run])
def test_every_benchmark_has_a_document(run: object) -> None:
    (group,) = summary_document(list(run()))["groups"]  # type: ignore[operator]
    assert group["means"]


def test_what_the_full_cache_cannot_do_shows_nothing_and_the_table_says_so() -> None:
    hopeless, *_ = sheets(needles({"full": [0, 0, 0], "topk": [0, 0, 0]}))
    assert any("the model itself cannot do this" in note for note in hopeless.notes)
    possible, *_ = sheets(needles({"full": [0, 0, 1], "topk": [0, 0, 0]}))
    assert not any("cannot do this" in note for note in possible.notes)


def test_held_out_results_are_held_against_tuned_snapkv_too() -> None:
    names = ("full", "clusterattn (mine)", "clusterattn", "snapkv", "snapkv (beside mine)")
    records = [
        record(
            bench="held-out",
            method=name,
            size=None if name == "full" else 128,
            parameters={"name": name.partition(" ")[0]},
            prompt=f"p{number}",
            scores={"log_kl": -2.0, "kl": 0.1, "agreement": 0.9},
        )
        for name in names
        for number in range(2)
    ]
    first, *_ = sheets(records)
    others = ("clusterattn", "snapkv", "snapkv (beside mine)")
    assert first.headings[3:] == ("log_kl ↓", *(f"{MINUS} {name}" for name in others))
