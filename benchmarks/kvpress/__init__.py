"""Side by side with kvpress: the same prompts and the same number of kept tokens, each in its own environment."""
