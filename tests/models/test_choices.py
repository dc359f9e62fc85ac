import sys
from types import ModuleType

import pytest
import torch

from clusterprof.errors import ModelError
from clusterprof.models import choose_attention, default_model
from clusterprof.models.choices import choose_device, choose_dtype, flash_attention_available
from tests.tiny import tiny_llama

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")
FLASH, FLASH_3 = "flash_attention_2", "flash_attention_3"


@pytest.mark.parametrize("device", [CPU, CUDA, MPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flash_available", [False, True])
def test_attention_of_every_machine(device: torch.device, dtype: torch.dtype, flash_available: bool) -> None:
    def choose(attn: str) -> str:
        return choose_attention(attn, device=device, dtype=dtype, flash_available=flash_available)

    assert choose("sdpa") == "sdpa"
    assert choose("eager") == "eager"
    if device is CUDA and dtype is not torch.float32 and flash_available:
        assert choose("auto") == choose(FLASH) == FLASH
        assert choose(FLASH_3) == FLASH_3
    else:
        assert choose("auto") == "sdpa"
        for flash in (FLASH, FLASH_3):
            with pytest.raises(ModelError, match=f"{flash} needs .*--attn auto"):
                choose(flash)


@pytest.mark.parametrize(
    ("attn", "device", "dtype", "flash_available", "obstacle"),
    [
        (FLASH, CPU, torch.bfloat16, True, "a CUDA device, and the device is cpu"),
        (FLASH_3, MPS, torch.bfloat16, True, "a CUDA device, and the device is mps"),
        (FLASH, CUDA, torch.float32, True, "float16 or bfloat16, and the dtype is float32"),
        (FLASH_3, CUDA, torch.float32, True, "float16 or bfloat16, and the dtype is float32"),
        (FLASH, CUDA, torch.float16, False, r"the package flash-attn >= 2\.3\.3, and none can be imported"),
        (FLASH_3, CUDA, torch.float16, False, "the package flash-attn-3, and none can be imported"),
    ],
)
def test_flash_attention_that_cannot_be_had_says_which_condition(
    attn: str, device: torch.device, dtype: torch.dtype, flash_available: bool, obstacle: str
) -> None:
    with pytest.raises(ModelError, match=f"{attn} needs {obstacle}"):
        choose_attention(attn, device=device, dtype=dtype, flash_available=flash_available)


def test_unknown_attention_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match="attn is 'flash'; it must be one of auto, sdpa, eager, flash_attention_2, flash_attention_3",
    ):
        choose_attention("flash", device=CPU, dtype=torch.float32, flash_available=False)


@pytest.mark.parametrize(
    ("attn", "package", "check"),
    [
        ("auto", "flash_attn", "is_flash_attn_greater_or_equal"),
        (FLASH, "flash_attn", "is_flash_attn_greater_or_equal"),
        (FLASH_3, "flash_attn_interface", "is_flash_attn_3_available"),
    ],
)
@pytest.mark.parametrize(("accepted", "imports", "available"), [(0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_flash_attention_must_be_accepted_and_import(
    monkeypatch: pytest.MonkeyPatch,
    attn: str,
    package: str,
    check: str,
    accepted: bool,
    imports: bool,
    available: bool,
) -> None:
    # The other one is as the machine has it: what is asked is asked of the right one.
    monkeypatch.setattr(f"transformers.utils.import_utils.{check}", lambda *version: accepted)
    # None in sys.modules makes the import fail, as a build for another torch does.
    monkeypatch.setitem(sys.modules, package, ModuleType(package) if imports else None)
    assert flash_attention_available(attn) == available


@pytest.mark.parametrize(
    ("asked", "device", "checkpoint", "expected"),
    [
        ("auto", CPU, "float16", torch.float32),
        ("auto", CPU, "float32", torch.float32),
        ("auto", CUDA, "float16", torch.float16),
        ("auto", CUDA, "bfloat16", torch.bfloat16),
        ("auto", CUDA, "float32", torch.bfloat16),
        ("auto", CUDA, None, torch.bfloat16),
        ("auto", MPS, "float16", torch.float16),
        ("float32", CUDA, "float16", torch.float32),
        ("bfloat16", CPU, "float32", torch.bfloat16),
        ("float16", CPU, "float32", torch.float16),
    ],
)
def test_dtype(asked: str, device: torch.device, checkpoint: str | None, expected: torch.dtype) -> None:
    config = tiny_llama().config
    config.dtype = checkpoint
    assert choose_dtype(asked, device=device, config=config) == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(
        ModelError, match="dtype is 'int8'; it must be one of auto, float32, bfloat16, float16"
    ):
        choose_dtype("int8", device=CPU, config=tiny_llama().config)


@pytest.mark.parametrize(
    ("asked", "cuda_devices", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("cpu", 1, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, asked: str, cuda_devices: int, expected: str) -> None:
    set_cuda_devices(monkeypatch, cuda_devices)
    assert choose_device(asked) == torch.device(expected)


@pytest.mark.parametrize(
    ("asked", "cuda_devices", "message"),
    [
        ("cuda", 0, "device is 'cuda' and torch sees 0 CUDA devices; use --device auto"),
        ("cuda:2", 2, "device is 'cuda:2' and torch sees 2 CUDA devices"),
        ("mps", 0, "torch has no MPS"),
        ("gpu", 0, "device is 'gpu'; it must be auto, cpu, cuda, cuda:N or mps"),
        ("meta", 0, "device is 'meta'; it must be auto"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, cuda_devices: int, message: str
) -> None:
    set_cuda_devices(monkeypatch, cuda_devices)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(ModelError, match=message):
        choose_device(asked)


def test_the_default_model_follows_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cuda_devices(monkeypatch, 0)
    assert default_model() == "builtin"
    set_cuda_devices(monkeypatch, 1)
    assert default_model() == "mistralai/Mistral-7B-Instruct-v0.2"


def set_cuda_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
