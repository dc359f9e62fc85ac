import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterprof import Profile, compress
from clusterprof.models import load_model
from tests.cli.conftest import Run

PROMPT = "a lake by a reed bay, " * 8
KEYS = {
    "text",
    "prompt_tokens",
    "kept_tokens",
    "kv_bytes",
    "kv_bytes_full",
    "prefill_s",
    "decode_tokens_per_s",
    "compressed",
    "forced",
}
# Two layers, 2 KV heads of 16 numbers, keys and values, float32.
BYTES_PER_TOKEN = 2 * 2 * 16 * 2 * 4


def greedy(folder: Path, prompt: str, profile: Profile | None, query_length: int | None = None) -> str:
    """What transformers itself answers in 12 tokens."""
    model, tokenizer = load_model(str(folder))
    inputs = tokenizer(prompt, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        if profile is None:
            output = model.generate(**inputs, **options)  # type: ignore[operator]
        else:
            with compress(model, profile, query_length=query_length):
                output = model.generate(**inputs, **options)  # type: ignore[operator]
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def edited(profile: Path, folder: Path, **model: object) -> Path:
    """A copy of a profile that was made for a slightly different model."""
    document = json.loads(profile.read_text(encoding="utf-8"))
    document["model"].update(model)
    copy = folder / "edited.json"
    copy.write_text(json.dumps(document), encoding="utf-8")
    return copy


def with_query_window(profile: Path, folder: Path) -> Path:
    """A copy of a profile whose window is the prompt's question."""
    document = json.loads(profile.read_text(encoding="utf-8"))
    document["compression"]["window"] = "query"
    copy = folder / "query.json"
    copy.write_text(json.dumps(document), encoding="utf-8")
    return copy


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_json_tells_text_memory_and_speed(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", PROMPT, "--max-new-tokens", 12, "--json")
    assert finished.code == 0
    document = finished.json()
    assert document.keys() == KEYS
    assert document["text"] == greedy(model_folder, PROMPT, Profile.load(profile_file))
    assert document["prompt_tokens"] == len(PROMPT)
    assert document["kept_tokens"] == 48
    assert document["kv_bytes"] == 48 * BYTES_PER_TOKEN
    assert document["kv_bytes_full"] == len(PROMPT) * BYTES_PER_TOKEN
    assert document["prefill_s"] > 0
    assert document["decode_tokens_per_s"] > 0
    assert document["compressed"] is True
    assert document["forced"] == []


def test_compare_adds_the_full_cache(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run(
        "apply", "--profile", profile_file, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare", "--json"
    )
    full = finished.json()["full"]
    assert full.keys() == {"text", "prefill_s", "decode_tokens_per_s", "kv_bytes"}
    assert full["text"] == greedy(model_folder, PROMPT, None)
    assert full["kv_bytes"] == len(PROMPT) * BYTES_PER_TOKEN


def test_compare_shows_both_side_by_side(run: Run, profile_file: Path) -> None:
    finished = run(
        "apply", "--profile", profile_file, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare"
    )
    assert finished.code == 0
    heading = finished.out.splitlines()[1]
    assert "full cache" in heading
    assert "48 tokens kept" in heading
    assert "3.7 times smaller" in finished.out.splitlines()[-1]


def test_the_answer_alone_goes_to_stdout(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert finished.out == greedy(model_folder, PROMPT, Profile.load(profile_file)) + "\n"
    assert f"{len(PROMPT)} prompt tokens, 48 kept" in finished.err


@pytest.mark.parametrize("way", [["--prompt-file", "prompt.txt"], ["--prompt-file", "-"], ["-"]])
def test_prompts_from_files_and_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch, profile_file: Path, way: Sequence[str]
) -> None:
    Path("prompt.txt").write_bytes(b"\xef\xbb\xbf" + PROMPT.encode())
    type_in(monkeypatch, PROMPT.encode())
    finished = run("apply", "--profile", profile_file, *way, "--max-new-tokens", 1, "--json")
    assert finished.json()["prompt_tokens"] == len(PROMPT)
    # A single token says nothing about the speed of decoding.
    assert finished.json()["decode_tokens_per_s"] is None


def test_a_prompt_that_fits_is_not_compressed(run: Run, profile_file: Path, model_folder: Path) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", "a lake", "--max-new-tokens", 12, "--json")
    assert "not compressed: the prompt's 6 tokens fit in size 48" in finished.err
    document = finished.json()
    assert document["compressed"] is False
    assert document["kept_tokens"] == document["prompt_tokens"] == 6
    assert document["kv_bytes"] == document["kv_bytes_full"] == 6 * BYTES_PER_TOKEN
    assert document["text"] == greedy(model_folder, "a lake", None)


@pytest.mark.parametrize(
    "ways",
    [
        [],
        ["--prompt", "a", "--prompt-file", "b.txt"],
        ["--prompt", "a", "-"],
        ["a prompt"],
        ["--prompt", " \n"],
        ["--prompt", "a", "--max-new-tokens", "0"],
        ["--prompt", "a", "--max-new-tokens", "10000001"],
    ],
)
def test_no_prompt_or_two_is_wrong_usage(run: Run, profile_file: Path, ways: Sequence[str]) -> None:
    assert run("apply", "--profile", profile_file, *ways).code == 2


def test_a_prompt_longer_than_the_context_is_an_error(run: Run, profile_file: Path) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", "x" * 400, "--max-new-tokens", 113)
    assert finished.code == 1
    assert "400 tokens" in finished.err
    assert "context of 512" in finished.err


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff\xfe", "is not UTF-8"), (b"", "empty")]
)
def test_a_prompt_file_that_cannot_be_used(
    run: Run, profile_file: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        Path("prompt.txt").write_bytes(content)
    finished = run("apply", "--profile", profile_file, "--prompt-file", "prompt.txt")
    assert finished.code == (2 if content == b"" else 1)
    assert reason in finished.err


def test_a_prompt_that_is_not_utf_8_is_an_error(run: Run, profile_file: Path) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", "caf\udce9")
    assert finished.code == 1
    assert "--prompt-file" in finished.err


QUESTION = "which lake?"
WITH_QUESTION = f"{PROMPT}\n\n{QUESTION}"


def test_a_question_comes_after_the_prompt_whatever_the_window(
    run: Run, profile_file: Path, model_folder: Path
) -> None:
    command = ["apply", "--profile", profile_file, "--max-new-tokens", 12, "--json"]
    asked = run(*command, "--prompt", PROMPT, "--question", f" {QUESTION}\n").json()
    assert asked["prompt_tokens"] == len(WITH_QUESTION)
    assert asked["text"] == run(*command, "--prompt", WITH_QUESTION).json()["text"]
    assert asked["text"] == greedy(model_folder, WITH_QUESTION, Profile.load(profile_file))


def test_the_question_is_the_window_of_a_profile_tuned_so(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    profile = with_query_window(profile_file, tmp_path)
    Path("context.txt").write_text(PROMPT)
    command = ["apply", "--profile", profile, "--prompt-file", "context.txt", "--question", QUESTION]
    document = run(*command, "--max-new-tokens", 12, "--compare", "--json").json()
    loaded = Profile.load(profile)
    assert document["text"] == greedy(model_folder, WITH_QUESTION, loaded, len(QUESTION))
    assert document["full"]["text"] == greedy(model_folder, WITH_QUESTION, None)
    assert document["kept_tokens"] == 48
    assert document["kv_bytes"] == 48 * BYTES_PER_TOKEN
    assert document["kv_bytes_full"] == len(WITH_QUESTION) * BYTES_PER_TOKEN


def test_the_question_reaches_the_runtime_with_what_the_template_puts_after_it(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    profile_file: Path,
    model_folder: Path,
) -> None:
    chatty = tmp_path / "chatty"
    model, tokenizer = load_model(str(model_folder))
    tokenizer.chat_template = "{% for message in messages %}user: {{ message.content }} bot:{% endfor %}"
    model.save_pretrained(chatty)
    tokenizer.save_pretrained(chatty)
    lengths = []

    def spy(*args: Any, **options: Any) -> Any:
        lengths.append(options["query_length"])
        return compress(*args, **options)

    monkeypatch.setattr("clusterprof.cli._answer.compress", spy)
    command = ["apply", "--profile", with_query_window(profile_file, tmp_path), "--model", chatty, "--force"]
    command += ["--prompt", PROMPT, "--question", QUESTION, "--max-new-tokens", 1]
    assert run(*command).code == 0
    assert run(*command, "--raw").code == 0
    assert lengths == [len(QUESTION) + len(" bot:"), len(QUESTION)]


def test_a_profile_whose_window_is_the_question_asks_for_it(
    run: Run, tmp_path: Path, profile_file: Path
) -> None:
    profile = with_query_window(profile_file, tmp_path)
    finished = run("apply", "--profile", profile, "--prompt", PROMPT, "--model", "no/such/model")
    assert finished.code == 2
    said = re.sub(r"[│\s]+", " ", finished.err)
    assert "Invalid value for --question" in said
    assert "observation window is the prompt's question" in said
    assert "no/such/model" not in said


def test_a_question_that_fills_the_size_is_an_error(run: Run, tmp_path: Path, profile_file: Path) -> None:
    profile = with_query_window(profile_file, tmp_path)
    finished = run("apply", "--profile", profile, "--prompt", PROMPT, "--question", "x" * 48)
    assert finished.code == 1
    assert "The question has 48 tokens, and the profile keeps 48" in finished.err


def test_a_question_that_cannot_be_found_is_an_error(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    loud = tmp_path / "loud"
    model, tokenizer = load_model(str(model_folder))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    model.save_pretrained(loud)
    tokenizer.save_pretrained(loud)
    command = ["apply", "--profile", with_query_window(profile_file, tmp_path), "--model", loud, "--force"]
    command += ["--prompt", PROMPT, "--question", QUESTION, "--max-new-tokens", 1]
    finished = run(*command)
    assert finished.code == 1
    assert "cannot be found" in finished.err
    assert run(*command, "--raw").code == 0


@pytest.mark.parametrize(("question", "code", "reason"), [(" ", 2, "empty"), ("caf\udce9", 1, "--question")])
def test_questions_that_are_no_text(
    run: Run, profile_file: Path, question: str, code: int, reason: str
) -> None:
    finished = run("apply", "--profile", profile_file, "--prompt", PROMPT, "--question", question)
    assert finished.code == code
    assert reason in finished.err


def test_another_models_profile_is_refused_unless_forced(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    other = edited(profile_file, tmp_path, num_hidden_layers=3, tokenizer_hash="0" * 64)
    command = ["apply", "--profile", other, "--prompt", PROMPT, "--max-new-tokens", 2, "--json"]
    refused = run(*command)
    assert refused.code == 1
    assert refused.out == ""
    assert "num_hidden_layers: profile 3, model 2" in refused.err
    assert "--force" in refused.err

    forced = run(*command, "--force")
    assert forced.code == 0
    assert [difference.partition(":")[0] for difference in forced.json()["forced"]] == [
        "num_hidden_layers",
        "tokenizer_hash",
    ]
    assert "num_hidden_layers: profile 3, model 2" in forced.err


def test_a_profile_without_a_model_asks_for_one(run: Run, tmp_path: Path, profile_file: Path) -> None:
    finished = run("apply", "--profile", edited(profile_file, tmp_path, id=""), "--prompt", PROMPT)
    assert finished.code == 1
    assert "--model" in finished.err


def test_the_chat_template_is_used_unless_raw(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path
) -> None:
    chatty = tmp_path / "chatty"
    model, tokenizer = load_model(str(model_folder))
    tokenizer.chat_template = "{% for message in messages %}user: {{ message.content }}\n{% endfor %}"
    model.save_pretrained(chatty)
    tokenizer.save_pretrained(chatty)
    command = ["apply", "--profile", profile_file, "--model", chatty, "--force", "--prompt", PROMPT]
    command += ["--max-new-tokens", 1, "--json"]
    assert run(*command).json()["prompt_tokens"] == len("user: \n") + len(PROMPT)
    assert run(*command, "--raw").json()["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"stop_strings": ["a", "e"], "max_time": 1e-9},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
        {"no_repeat_ngram_size": 1, "guidance_scale": 3.0, "repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 9.0, "num_beams": 3, "min_new_tokens": 12},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_the_models_own_generation_settings_do_not_matter(
    run: Run, tmp_path: Path, profile_file: Path, model_folder: Path, settings: dict[str, object]
) -> None:
    opinionated = tmp_path / "opinionated"
    shutil.copytree(model_folder, opinionated)
    file = opinionated / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    command = ["apply", "--profile", profile_file, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare"]
    finished = run(*command, "--model", opinionated, "--force", "--json")
    assert finished.code == 0, finished.err
    document = finished.json()
    assert document["text"] == greedy(model_folder, PROMPT, Profile.load(profile_file))
    assert document["full"]["text"] == greedy(model_folder, PROMPT, None)
    assert document["kv_bytes"] == 48 * BYTES_PER_TOKEN


def test_ctrl_c_is_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch, profile_file: Path) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clusterprof.cli._answer.answer", interrupted)
    finished = run("apply", "--profile", profile_file, "--prompt", PROMPT)
    assert finished.code == 1
    assert finished.err.splitlines()[-1] == "error: Interrupted; the answer is not complete."


@pytest.mark.real_model
def test_the_example_prompt_is_answered_from_a_compressed_cache(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    profile_file: Path,
    real_model: tuple[Any, Any],
) -> None:
    document = json.loads(profile_file.read_text(encoding="utf-8"))
    document["compression"] = {
        "size": 256,
        "window": 32,
        "method": {"name": "clusterattn", "num_block": 8, "theta": 0.002},
    }
    profile = tmp_path / "paper-default.json"
    profile.write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr("clusterprof.models.load_model", lambda *args, **kwargs: real_model)
    prompt = Path(__file__).parents[2] / "examples" / "needle_prompt.txt"
    answer = run(
        "apply", "--profile", profile, "--prompt-file", prompt, "--max-new-tokens", 24, "--force", "--json"
    ).json()
    assert answer["prompt_tokens"] > 1500
    assert answer["kept_tokens"] == 256
    assert "5821947" in answer["text"]
