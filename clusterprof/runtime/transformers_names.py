"""Names that differ between the supported versions of transformers."""

from inspect import signature

from transformers.masking_utils import create_causal_mask

# What a model calls the cache it is given and gives back: `past_key_values` up to 5.23, `cache` from 5.24 on.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
