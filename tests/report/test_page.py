import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from clusterprof.errors import DataError
from clusterprof.evaluation.records import Record
from clusterprof.methods import method_names
from clusterprof.report.answers_shown import answers_of, visible
from clusterprof.report.explanations import METHODS, explained
from clusterprof.report.page import render
from tests.evaluation.examples import ENVIRONMENT, every_run, longbench_run, record, samples_run

FEW = ("clusterattn", "snapkv")
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'


class Outline(HTMLParser):
    """A page's elements and texts; complains about what is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


@pytest.fixture(scope="module")
def page() -> str:
    return render(list(every_run(FEW).items()))


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


def one(**fields: object) -> Outline:
    return Outline(render([("run", [record(**fields)])]))


def test_every_benchmark_has_a_section_that_says_what_it_asks(outline: Outline) -> None:
    for bench in every_run(FEW):
        assert explained(bench).title in outline.text
        assert re.sub(r"\s+", " ", explained(bench).question) in outline.text


def test_it_explains_what_it_is_about(outline: Outline) -> None:
    for words in ("KV cache", "observation window", "95 % intervals", "bootstrap", "prompt by prompt"):
        assert words in outline.text.replace("\xa0", " ")


def test_the_methods_that_take_part_are_explained(outline: Outline) -> None:
    for name in ("full", "clusterattn", "snapkv", "kmeans"):
        assert METHODS[name] in outline.text
    assert METHODS["streaming_llm"] not in outline.text


def test_there_is_an_explanation_of_every_method() -> None:
    assert set(METHODS) == {"full", *method_names()}


def test_each_section_has_settings_versions_and_origins(outline: Outline) -> None:
    assert outline.tags.count("dl") == 1 + len(every_run(FEW))
    for value in ENVIRONMENT.values():
        assert outline.texts.count(value) >= len(every_run(FEW))
    for words in ("num_block 8, theta 0.002", "kernel_size 5", "its paper's values", "last 32 tokens"):
        assert words in outline.text


def test_plots_and_tables_are_there(outline: Outline) -> None:
    assert outline.tags.count("svg") == outline.tags.count("figure") == 14
    assert outline.tags.count("table") > 14
    assert "Share of right answers (higher is better)" in outline.text


def test_links_lead_to_sections(outline: Outline) -> None:
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    links = [value for tag, name, value in outline.attributes if (tag, name) == ("a", "href")]
    assert len(links) == 1 + len(every_run(FEW))
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_nothing_is_loaded(page: str, outline: Outline) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "img", "form", "base"} & set(outline.tags)
    assert outline.tags.count("style") == 1
    assert "@import" not in page
    for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
        for value in outline.values(name):
            assert value.startswith(("#", "data:image/png;base64,")), value
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    policy = next(value for value in outline.values("content") if "default-src" in value)
    assert "default-src 'none'" in policy
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]


def test_texts_from_models_and_files_are_text() -> None:
    outline = one(
        method=HOSTILE,
        parameters={"name": "snapkv", HOSTILE: HOSTILE},
        origin=HOSTILE,
        dataset=HOSTILE,
        prompt=HOSTILE,
        labels={"tokens": 10, "depth": 0.5, HOSTILE: HOSTILE},
        environment={**ENVIRONMENT, "model": HOSTILE, HOSTILE: HOSTILE},
        text=HOSTILE,
        references=(HOSTILE,),
    )
    assert not {"script", "img"} & set(outline.tags)
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]
    assert sum(HOSTILE in text for text in outline.texts) > 10


def test_names_of_files_and_benchmarks_are_text() -> None:
    outline = Outline(render([(HOSTILE, [record(bench=HOSTILE, scores={HOSTILE: 1.0})])]))
    assert "script" not in outline.tags
    assert HOSTILE in outline.text


def test_a_huge_text_is_cut() -> None:
    page = render([("run", [record(text="word " * 100_000, references=("x" * 100_000,))])])
    assert len(page) < 100_000
    assert "… (498,800 more characters)" in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two\nlines\tand a tab ", "two\nlines\tand a tab"),
        ("\u202etxet\x00\x1b[2J\r\n", r"\u202etxet\x00\x1b[2J\r"),
        ("字 größer 🙂", "字 größer 🙂"),
        ("x" * 1201, "x" * 1200 + "… (1 more characters)"),
    ],
)
def test_what_cannot_be_seen_is_shown(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_samples_stand_side_by_side(outline: Outline) -> None:
    records = list(samples_run())
    assert all(re.sub(r"\s+", " ", it.text or "") in outline.text for it in records)
    assert "What would have been right." in outline.texts


def test_answers_are_in_order_each_with_its_size_and_scores() -> None:
    from clusterprof.evaluation.groups import comparable

    (group,) = comparable(reversed(list(longbench_run(FEW))))
    answered = answers_of(group)
    assert len(answered) == 3
    texts = answered[0].texts
    assert [(it.method, it.size) for it in texts] == [
        ("full", None), ("clusterattn", 256), ("clusterattn", 512), ("snapkv", 256), ("snapkv", 512),
    ]  # fmt: skip
    assert re.fullmatch(r"score [\d.]+", texts[0].scores)
    assert answered[0].references == ("The right answer.", "Another one.")
    assert answered[0].labels == "task lcc, group code"


def test_several_models_are_apart_and_named_by_what_differs() -> None:
    other = {**ENVIRONMENT, "model": "tiny/mistral"}
    newer = {**ENVIRONMENT, "torch": "2.14.0"}
    records = [record(), record(environment=other), record(environment=newer)]
    outline = Outline(render([("run", records)]))
    assert [text for text in outline.texts if ", 2.1" in text and text.startswith("tiny")] == [
        "tiny/llama, 2.13.0", "tiny/mistral, 2.13.0", "tiny/llama, 2.14.0",
    ]  # fmt: skip
    assert "How well tiny/llama , tiny/mistral still answers" in outline.text


def test_one_model_needs_no_heading_of_its_own() -> None:
    assert one().text.count("tiny/llama") == 3


def test_settings_that_differ_by_size_are_lines_of_their_own() -> None:
    records = [record(method="clusterattn", size=size) for size in (1024, 512, 4096)]
    text = Outline(render([("run", records)])).text
    assert re.search(r"clusterattn 512, 1,024 num_block 8, theta 0.002", text)
    assert re.search(r"clusterattn 4,096 num_block 8, theta 0.0008", text)


def test_runs_are_put_together() -> None:
    outline = Outline(
        render([("a.jsonl", [record(method="full")]), ("b.jsonl", [record(), record(method="topk")])])
    )
    assert "a.jsonl (1 result), b.jsonl (2 results)" in outline.text
    assert "1 prompt of needle" in outline.text


def test_the_same_runs_make_the_same_page() -> None:
    records = list(longbench_run(("snapkv",), sizes=(256,)))
    assert render([("run", records)]) == render([("run", records)])


@pytest.mark.parametrize("runs", [[], [("run", [])]])
def test_without_results_there_is_no_page(runs: list[tuple[str, list[Record]]]) -> None:
    with pytest.raises(DataError, match="There are no results"):
        render(runs)


def test_runs_that_contradict_each_other_are_refused() -> None:
    runs = [("a", [record(scores={"accuracy": 1.0})]), ("b", [record(scores={"accuracy": 0.0})])]
    with pytest.raises(DataError, match="two different needle results"):
        render(runs)


def test_what_the_page_needs_is_loaded_only_to_make_it() -> None:
    code = "import clusterprof.report.page, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "matplotlib", "numpy", "jinja2", "scipy"}
