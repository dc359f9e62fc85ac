"""Explanations for people who have not read the paper: what is measured, and how to read it."""

from dataclasses import dataclass

METHODS = {
    "full": "The full cache: nothing is dropped. What every method is held against.",
    "clusterattn": (
        "ClusterAttn (Zhang et al., ACL 2025): finds the peaks of the attention that the prompt's last tokens pay to "
        "the rest, and keeps whole runs of tokens around those above a threshold."
    ),
    "snapkv": (
        "SnapKV (Li et al., NeurIPS 2024): smooths the same attention over a few neighbouring tokens and keeps the "
        "tokens with the highest result."
    ),
    "topk": "Top-k: keeps the tokens with the highest attention one by one, without regard to their neighbours.",
    "streaming_llm": (
        "StreamingLLM (Xiao et al., ICLR 2024): keeps the first few tokens and the most recent ones, whatever they say."
    ),
    "h2o": (
        "H2O (Zhang et al., NeurIPS 2023): keeps recent tokens, and those that all tokens of the prompt together "
        "looked at most."
    ),
    "kmeans": "K-means: groups tokens by position and attention, and keeps the groups with the most attention.",
    "dbscan": "DBSCAN: the same with density-based clusters, which leave scattered tokens out.",
    "ngram": "N-gram: keeps whole words, those with the most attention first, together with neighbouring words.",
}


@dataclass(frozen=True)
class Explained:
    """A benchmark's name for people, and what it asks."""

    title: str
    question: str


_BENCHES = {
    "needle": Explained(
        "Needle in a haystack",
        "One sentence is hidden in a long text, and the model is asked about it. Does it still find the sentence, "
        "wherever it stands and however long the text is? Accuracy is the share of prompts whose answer has the fact "
        "in it; ROUGE-1 (0 to 1) is how many words the answer shares with the hidden sentence.",
    ),
    "lines": Explained(
        "LongEval lines",
        "The prompt is a long list of lines that look alike, each with a number, and the model is asked for the number "
        "of one of them. This is harder than a needle, since every line is a wrong answer of the right form. Accuracy "
        "is the share of right numbers.",
    ),
    "longbench": Explained(
        "LongBench",
        "Sixteen tasks on long documents: questions about one or several, summaries, examples to follow, counting and "
        "finding paragraphs, code to continue. Each has a score of its own from 0 to 100 (words or lines shared with "
        "the reference, or the share of right answers). A group is the mean of its tasks, and the overall score the "
        "mean of all tasks, each counting the same.",
    ),
    "perplexity": Explained(
        "Perplexity of the reference answers",
        "How surprising the right answer is to the model when it has the compressed prompt before it. The loss is the "
        "mean surprise per token in nats; the perplexity, its exponential, is like the number of tokens the model "
        "hesitates between. The answer's first token does not count: it comes from reading the whole prompt, so no "
        "compression changes it. Lower is better, and the full cache is the level to reach.",
    ),
    "hit-rate": Explained(
        "Hit rate",
        "Methods that look at the end of the prompt decide once, before the first word of the answer, what to keep. "
        "Of the tokens that matter at each later step, which share had been marked by then? 1 means that nothing which "
        "turned out to matter was overlooked. The share of the prompt that is marked belongs to it: marking everything "
        "would hit everything.",
    ),
    "fit": Explained(
        "Fit",
        "How close attention and next tokens with the compressed cache are to those with the full one, while both read "
        "the full cache's answer. The cosine similarity compares attention head by head at the positions that were "
        "kept; the KL divergence and the agreement compare what the model would say next. Cosine similarity is meant "
        "for choosing parameters within a method, KL divergence and agreement for comparing methods.",
    ),
    "held-out": Explained(
        "Held-out samples",
        "How tuned profiles do on prompts of their own dataset that no search has seen, beside untuned methods at the "
        "same size. KL divergence and agreement say how close the next tokens stay to the full cache's; where the "
        "dataset has answers, their score says whether they are still right.",
    ),
    "ablation": Explained(
        "Ablation",
        "What each parameter of a method does. theta is the attention below which a peak counts as noise; num_block is "
        "how finely the prompt is searched for peaks; n is how many neighbouring words are kept together.",
    ),
    "samples": Explained(
        "Samples",
        "Answers to the same prompts side by side: what would have been right, what the model says with its full "
        "cache, and what it says with each compressed one.",
    ),
}


def explained(bench: str) -> Explained:
    """Return a benchmark's explanation; one that is not known has its name only."""
    return _BENCHES.get(bench, Explained(bench, ""))
