import json

import torch

from clusterprof.benchmarking.run import run_bench
from clusterprof.benchmarking.settings import BenchSettings
from clusterprof.benchmarking.subjects import subjects
from clusterprof.methods import ClusterAttn, SnapKV
from clusterprof.profile import Compression
from tests.benchmarking.test_measure import PROMPTS, Listener
from tests.tiny import tiny_llama

OURS = Compression(size=24, window=8, method=ClusterAttn(num_block=2, theta=0.02))
SETTINGS = BenchSettings(tokens=(60,), batch_sizes=(2,), new_tokens=2, repeats=1)


def test_subjects_are_compressed_alike() -> None:
    full, roomy, ours, *baselines = subjects(OURS, tuned=False)
    assert (full.compression, roomy.compression) == (None, None)
    assert (full.preallocated, roomy.preallocated) == (False, True)
    assert ours.compression == OURS
    assert [subject.name for subject in baselines] == ["snapkv", "streaming_llm", "topk"]
    for subject in baselines:
        assert subject.compression is not None
        assert (subject.compression.size, subject.compression.window) == (24, 8)
        assert subject.compression.method.name == subject.name
    assert [ours.compresses(tokens) for tokens in (23, 24, 25)] == [False, False, True]
    assert not full.compresses(25)


def test_a_profile_is_called_one() -> None:
    tuned = Compression(size=24, window=8, method=SnapKV(kernel_size=15))
    assert subjects(tuned, tuned=True)[2].label == "profile (snapkv)"


def test_the_document_has_everything() -> None:
    report = run_bench(tiny_llama(), PROMPTS, subjects(OURS, tuned=False), SETTINGS, Listener(), memory=10**6)
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert document.keys() == {
        "model", "environment", "settings", "subjects", "memory_bytes",
        "prefill", "decode", "capacity", "interrupted",
    }  # fmt: skip
    assert document["model"]["architecture"] == "LlamaForCausalLM"
    assert document["model"]["context"] == 512
    assert document["model"]["weight_bytes"] > 0
    environment = document["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert (environment["device"], environment["dtype"]) == ("cpu", "float32")
    assert environment["attention_backend"] == "sdpa"
    assert document["settings"]["new_tokens"] == 2
    assert document["subjects"][2]["compression"]["method"]["num_block"] == 2
    assert len(document["prefill"]) == 5
    assert len(document["decode"]) == 6
    assert len(document["capacity"]) == 5
    assert document["decode"][0]["ratio_to_full"] == 1.0
    assert document["interrupted"] is False


def test_nothing_is_estimated_without_a_memory() -> None:
    report = run_bench(tiny_llama(), PROMPTS, subjects(OURS, tuned=False), SETTINGS, Listener())
    assert report.memory_bytes is None
    assert report.capacity == []


def test_eager_attention_has_no_longest_prompt() -> None:
    model = tiny_llama(attn_implementation="eager")
    report = run_bench(model, PROMPTS, subjects(OURS, tuned=False), SETTINGS, Listener(), memory=10**6)
    assert report.environment["attention_backend"] == "eager"
    assert all(it.longest_prompt is None for it in report.capacity)


def test_no_longest_prompt_is_beyond_the_models_context() -> None:
    model = tiny_llama()
    report = run_bench(model, PROMPTS, subjects(OURS, tuned=False), SETTINGS, Listener(), memory=10**9)
    assert {it.longest_prompt for it in report.capacity} == {model.config.max_position_embeddings}
    assert all(it.context_limits for it in report.capacity)
