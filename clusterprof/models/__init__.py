"""Models: loading one with its tokenizer, the built-in one, and what identifies them."""

# None of these modules imports torch or transformers before it has to.
from clusterprof.models.builtin import BUILTIN_ID, BUILTIN_NAME, built_folder, builtin_folder
from clusterprof.models.choices import choose_attention, default_model
from clusterprof.models.describe import ModelInfo, chat_template_hash, describe_model, describe_tokenizer
from clusterprof.models.loading import load_model

__all__ = [
    "BUILTIN_ID",
    "BUILTIN_NAME",
    "ModelInfo",
    "built_folder",
    "builtin_folder",
    "chat_template_hash",
    "choose_attention",
    "default_model",
    "describe_model",
    "describe_tokenizer",
    "load_model",
]
