"""What a model runs on when the user leaves it open: model, device, dtype, attention backend."""

from importlib import import_module
from typing import TYPE_CHECKING

from clusterprof.errors import ModelError
from clusterprof.models.builtin import BUILTIN_NAME

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_FLASH_FLOOR = "2.3.3"
# The package that each needs.
_FLASH = {"flash_attention_2": f"flash-attn >= {_FLASH_FLOOR}", "flash_attention_3": "flash-attn-3"}


def default_model() -> str:
    """Return the model to use when none is named: Mistral-7B-Instruct with CUDA, else the built-in one."""
    import torch

    return "mistralai/Mistral-7B-Instruct-v0.2" if torch.cuda.is_available() else BUILTIN_NAME


def check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a `ModelError` unless `value` is one of those allowed."""
    if value not in allowed:
        raise ModelError(f"{option} is {value!r}; it must be one of {', '.join(allowed)}.")


def choose_device(device: str) -> "torch.device":
    """Return the device: for "auto" CUDA where there is one, else the CPU.

    Raises
    ------
    ModelError
        If the device is not "auto", "cpu", "mps", "cuda" or "cuda:N", or this machine does not have it.
    """
    import torch

    cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device is {device!r}; it must be auto, cpu, cuda, cuda:N or mps.") from error
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device is {device!r}; it must be auto, cpu, cuda, cuda:N or mps.")
    count = torch.cuda.device_count() if cuda else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ModelError(f"device is {device!r} and torch sees {count} CUDA devices; use --device auto.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device is 'mps' and torch has no MPS on this machine; use --device auto.")
    return chosen


def choose_dtype(dtype: str, *, device: "torch.device", config: "PreTrainedConfig") -> "torch.dtype":
    """Return the dtype of the weights.

    For "auto" that is float32 on a CPU, where half types are several times slower, and elsewhere the
    checkpoint's half type, bfloat16 if it has none.

    Raises
    ------
    ModelError
        If `dtype` is not a name in `DTYPES`.
    """
    import torch

    check_choice("dtype", dtype, DTYPES)
    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    if device.type == "cpu":
        return torch.float32
    checkpoint = config.dtype or config.get_text_config(decoder=True).dtype
    return torch.float16 if checkpoint in (torch.float16, "float16") else torch.bfloat16


def choose_attention(
    attn: str, *, device: "torch.device", dtype: "torch.dtype", flash_available: bool
) -> str:
    """Return the attention backend, by the name that transformers has for it.

    For "auto" that is flash_attention_2 where all it needs is there (CUDA, a half dtype, a flash-attn
    package that can be imported), else sdpa. Another flash attention is used where it is asked for only.

    Parameters
    ----------
    attn
        A name in `ATTENTIONS`.
    device, dtype
        What the model will run on and in.
    flash_available
        What `flash_attention_available` says of `attn`.

    Raises
    ------
    ModelError
        If `attn` is unknown, or a flash attention was asked for and cannot be had.
    """
    import torch

    check_choice("attn", attn, ATTENTIONS)
    wanted = _wanted(attn)
    if wanted not in _FLASH:
        return wanted
    obstacle = None
    if device.type != "cuda":
        obstacle = f"a CUDA device, and the device is {device}"
    elif dtype not in (torch.float16, torch.bfloat16):
        obstacle = f"float16 or bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    elif not flash_available:
        obstacle = f"the package {_FLASH[wanted]}, and none can be imported"
    if obstacle is None:
        return wanted
    if attn != "auto":
        raise ModelError(f"{attn} needs {obstacle}; use --attn auto, or meet that.")
    return "sdpa"


def flash_attention_available(attn: str = "auto") -> bool:
    """Return whether the package of a flash attention is one that transformers accepts, and can be imported."""
    from transformers.utils.import_utils import is_flash_attn_3_available, is_flash_attn_greater_or_equal

    third = _wanted(attn) == "flash_attention_3"
    if not (is_flash_attn_3_available() if third else is_flash_attn_greater_or_equal(_FLASH_FLOOR)):
        return False
    try:
        # A build for another torch is installed all the same, and fails only here.
        import_module("flash_attn_interface" if third else "flash_attn")
    except (ImportError, OSError):
        return False
    return True


def _wanted(attn: str) -> str:
    return "flash_attention_2" if attn == "auto" else attn
