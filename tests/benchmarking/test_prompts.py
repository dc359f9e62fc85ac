import pytest

from clusterprof.benchmarking.prompts import bench_prompts
from clusterprof.data.builtin.prose import documentation_lines
from tests.tiny import tiny_tokenizer


def test_rows_are_consecutive_pieces_of_text() -> None:
    tokenizer = tiny_tokenizer()
    prompts = bench_prompts(tokenizer, rows=3, length=40)
    assert prompts.shape == (3, 40)
    first = "\n".join(documentation_lines()[0])
    assert tokenizer.decode(prompts.flatten()) == first[:120]


def test_text_starts_again_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = (("some", "lines"), ("more",))
    monkeypatch.setattr("clusterprof.benchmarking.prompts.documentation_lines", lambda: topics)
    [prompt] = bench_prompts(tiny_tokenizer(), rows=1, length=30)
    assert tiny_tokenizer().decode(prompt) == ("some\nlinesmore" * 3)[:30]
