"""Checks the references themselves, against hand-worked examples and other ways to compute the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from clusterprof.runtime.transformers_names import CACHE
from tests.reference.naive_trial import greedy, naive_trial
from tests.reference.selection import select_clusterattn, select_snapkv, select_streaming_llm, select_topk

PROMPT_LENGTH = 24
LAYERS, KV_HEADS, QUERY_HEADS = 2, 2, 4


def p(values: Sequence[int]) -> list[float]:
    return [value / 1024 for value in values]


# Blocks of 4 // 2 = 2 have their centres at 1, 2, 5, 6, 9, 10; P >= 30 leaves 2, 9, 10, each of width
# 4 // 3 = 1, so one place is left. Plain: P is highest at 5 (9). Averaged over 3, the highest are
# 11 ((60 + 4) / 2 = 32), 8 ((1 + 1 + 50) / 3), 3 ((40 + 3 + 1) / 3).
GAPS = p([1, 2, 40, 3, 1, 9, 2, 1, 1, 50, 60, 4])


@pytest.mark.parametrize(("gap_pool", "expected"), [(1, [2, 5, 9, 10]), (3, [2, 9, 10, 11])])
def test_clusterattn_fills_the_gaps_by_the_pooled_importance(gap_pool: int, expected: list[int]) -> None:
    assert select_clusterattn(GAPS, budget=4, num_block=2, theta=30 / 1024, gap_pool=gap_pool) == expected


def test_clusterattn_neighbourhood_of_even_width_leans_right_and_is_clipped() -> None:
    # Blocks 0-3, 4-7, 8-9 (short): centres 0, 4, 9, of which 0 and 9 survive. Width 4 // 2 = 2 covers
    # 0, 1 and 9 (10 is outside). The last place goes to 4, the highest P left.
    importance = p([100, 1, 2, 3, 5, 1, 1, 1, 2, 90])
    assert select_clusterattn(importance, budget=4, num_block=1, theta=50 / 1024, gap_pool=1) == [0, 1, 4, 9]


def test_clusterattn_neighbourhood_of_odd_width_is_centred() -> None:
    # Blocks 0-2, 3-5, 6-8: centres 1 (2), 4 (80), 8 (1); only 4 survives; width 3 covers 3, 4, 5.
    importance = p([0, 2, 0, 0, 80, 0, 0, 0, 1])
    assert select_clusterattn(importance, budget=3, num_block=1, theta=50 / 1024) == [3, 4, 5]


def test_clusterattn_pools_over_existing_tokens_only() -> None:
    # Blocks 0-2, 3-5: centres 1 (12, dropped) and 5; width 3 covers 4 and 5. Averages over 3 at the
    # rest: 0 is 22 / 2 = 11, 1 is 31 / 3, 2 is 21 / 3, 3 is 9 / 3. Counting padding, 1 would win.
    importance = p([10, 12, 9, 0, 0, 100])
    assert select_clusterattn(importance, budget=3, num_block=1, theta=50 / 1024, gap_pool=3) == [0, 4, 5]


def test_clusterattn_pools_over_covered_tokens_too() -> None:
    # Blocks of 2: centres 1, 2, 5; only 5 survives; width 2 covers 5 alone. Averages over 3 at the
    # rest: 11, 31 / 3, 7, 3, and 4 is 100 / 3 because of its covered neighbour.
    importance = p([10, 12, 9, 0, 0, 100])
    assert select_clusterattn(importance, budget=2, num_block=1, theta=50 / 1024, gap_pool=3) == [4, 5]


def test_clusterattn_fills_the_gaps_by_the_highest_importance_nearby() -> None:
    # By averages of three the run 20, 20, 20 is ahead of the lone 50, by maxima its neighbours are.
    importance = p([0, 0, 50, 0, 0, 0, 20, 20, 20, 0])
    averaged = select_clusterattn(importance, budget=3, num_block=1, theta=1.0, gap_pool=3)
    assert averaged == [1, 2, 7]
    highest = select_clusterattn(importance, 3, num_block=1, theta=1.0, gap_pool=3, gap_pooling="max")
    assert highest == [1, 2, 3]


def test_clusterattn_default_gap_pool_is_fifteen() -> None:
    # Blocks of 1; 20 and 21 survive with width 3 // 2 = 1, so one place is left. The first position
    # whose average sees both is 14, with the window 7 to 21.
    importance = p([0] * 20 + [512, 512] + [0] * 20)
    assert select_clusterattn(importance, budget=3, num_block=3, theta=0.5) == [14, 20, 21]


def test_clusterattn_over_budget_keeps_the_highest_and_earlier_ties() -> None:
    # Blocks of 1: all five survive, width max(1, 2 // 5) = 1, so five are covered for two places.
    assert select_clusterattn(p([3, 7, 3, 7, 7]), budget=2, num_block=2, theta=0.0) == [1, 3]


def test_clusterattn_takes_the_first_of_equal_centres() -> None:
    # Blocks 0-1, 2-3, all equal: centres 0 and 2, width 1.
    assert select_clusterattn(p([4, 4, 4, 4]), budget=2, num_block=1, theta=0.0) == [0, 2]


def test_clusterattn_keeps_a_centre_that_equals_theta() -> None:
    # Blocks 0-1, 2-3: centres 0 (8, not below 8) and 3 (7, dropped); width 2 covers 0 and 1. With
    # neither left it would be the plain top two, 0 and 3.
    assert select_clusterattn(p([8, 0, 5, 7]), budget=2, num_block=1, theta=8 / 1024, gap_pool=1) == [0, 1]


def test_clusterattn_without_centres_is_one_gap() -> None:
    importance = p([5, 1, 5, 1, 5, 9])
    assert select_clusterattn(importance, budget=3, num_block=2, theta=1.0, gap_pool=1) == [0, 2, 5]
    # Means of three: 3, 11/3, 7/3, 11/3, 5, 7.
    assert select_clusterattn(importance, budget=3, num_block=2, theta=1.0, gap_pool=3) == [1, 4, 5]


@given(
    importance=st.lists(st.integers(0, 1024), max_size=60).map(p),
    budget=st.integers(1, 70),
    num_block=st.integers(1, 32),
    theta=st.integers(0, 1024).map(lambda n: n / 1024),
)
def test_clusterattn_keeps_exactly_the_budget(
    importance: list[float], budget: int, num_block: int, theta: float
) -> None:
    positions = select_clusterattn(importance, budget, num_block, theta)
    assert len(positions) == min(budget, len(importance))
    assert positions == sorted(set(positions) & set(range(len(importance))))


def test_snapkv_pools_then_takes_the_highest() -> None:
    importance = p([0, 0, 9, 0, 0, 6, 6])
    # Averages over 3: 0, 3, 3, 3, 2, 4, 6. Maxima over 3: 0, 9, 9, 9, 6, 6, 6.
    assert select_snapkv(importance, budget=3, kernel_size=3, pooling="avg") == [1, 5, 6]
    assert select_snapkv(importance, budget=4, kernel_size=3, pooling="max") == [1, 2, 3, 4]
    assert select_snapkv(importance, budget=2, kernel_size=1, pooling="avg") == [2, 5]


def test_topk_takes_the_highest_and_earlier_ties() -> None:
    assert select_topk(p([1, 3, 2, 3, 3]), budget=2) == [1, 3]
    assert select_topk(p([1, 3]), budget=5) == [0, 1]


@pytest.mark.parametrize(
    ("length", "budget", "initial_tokens", "expected"),
    [(10, 5, 2, [0, 1, 7, 8, 9]), (10, 3, 4, [0, 1, 2]), (3, 5, 2, [0, 1, 2]), (4, 2, 0, [2, 3])],
)
def test_streaming_llm_keeps_both_ends(
    length: int, budget: int, initial_tokens: int, expected: list[int]
) -> None:
    assert select_streaming_llm(length, budget, initial_tokens) == expected


@dataclass(frozen=True)
class Step:
    attention: Tensor  # (layers, query_heads, tokens so far), float64
    logits: Tensor  # (vocabulary,), float64


def masked_steps(
    model: LlamaForCausalLM, prompt: Tensor, forced_tokens: list[int], hidden: Tensor
) -> list[tuple[Step, Step]]:
    """Pair each step over the full cache with the same step when `hidden` is added to the prompt's scores."""
    full_cache, masked_cache = DynamicCache(), DynamicCache()
    steps = []
    with torch.no_grad():
        model(prompt, **{CACHE: full_cache})
        model(prompt, **{CACHE: masked_cache})
        for count, token in enumerate(forced_tokens, start=1):
            input_ids = torch.tensor([[token]])
            mask = torch.nn.functional.pad(hidden, (0, count))
            full = model(input_ids, output_attentions=True, **{CACHE: full_cache})
            masked = model(input_ids, attention_mask=mask, output_attentions=True, **{CACHE: masked_cache})
            steps.append((as_step(full.attentions, full.logits), as_step(masked.attentions, masked.logits)))
    return steps


def as_step(attentions: Sequence[Tensor], logits: Tensor) -> Step:
    return Step(torch.cat(list(attentions))[:, :, 0].double(), logits[0, 0].double())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        # Ten times the default spread: attention that is not nearly uniform, so that evicting matters.
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    return model


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.randint(1, 128, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def forced_tokens(model: LlamaForCausalLM, prompt: Tensor) -> list[int]:
    return greedy(model, prompt, steps=5, eos_ids=())


def random_kept(size: int, seed: int) -> Tensor:
    scores = torch.rand(LAYERS, KV_HEADS, PROMPT_LENGTH, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., :size].sort(-1).values


def test_greedy_equals_generate_and_stops_at_the_end_token(
    model: LlamaForCausalLM, prompt: Tensor, forced_tokens: list[int]
) -> None:
    with torch.no_grad():
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
        )
    assert generated[0, PROMPT_LENGTH:].tolist() == forced_tokens
    end = forced_tokens[2]
    assert greedy(model, prompt, 5, {end}) == forced_tokens[: forced_tokens.index(end) + 1]


def test_keeping_everything_changes_nothing(
    model: LlamaForCausalLM, prompt: Tensor, forced_tokens: list[int]
) -> None:
    kept = torch.arange(PROMPT_LENGTH).expand(LAYERS, KV_HEADS, -1)
    trial = naive_trial(model, prompt, forced_tokens, kept)
    ones = torch.ones(LAYERS, QUERY_HEADS, len(forced_tokens), dtype=torch.float64)
    torch.testing.assert_close(trial.cosine, ones, atol=1e-6, rtol=0)
    torch.testing.assert_close(trial.cosine_padded, ones, atol=1e-6, rtol=0)
    assert trial.kl.abs().max() < 1e-6
    assert trial.agreement.tolist() == [1.0] * len(forced_tokens)
    assert model.config._attn_implementation == "sdpa"


def test_kept_sets_that_differ_per_head_give_sensible_values(
    model: LlamaForCausalLM, prompt: Tensor, forced_tokens: list[int]
) -> None:
    trial = naive_trial(model, prompt, forced_tokens, random_kept(size=8, seed=2))
    assert trial.cosine.shape == trial.cosine_padded.shape == (LAYERS, QUERY_HEADS, len(forced_tokens))
    assert trial.kl.shape == trial.agreement.shape == trial.loss.shape == (len(forced_tokens),)
    assert bool((trial.cosine_padded >= 0).all())
    assert bool((trial.cosine_padded <= trial.cosine).all())
    assert bool((trial.cosine <= 1 + 1e-12).all())
    assert bool((trial.kl > 0).all())
    assert bool((trial.loss > 0).all())
    assert set(trial.agreement.tolist()) <= {0.0, 1.0}


def test_evicting_equals_masking_the_evicted_positions(
    model: LlamaForCausalLM, prompt: Tensor, forced_tokens: list[int]
) -> None:
    # One mask serves both layers, so they share their kept sets here; the heads do not.
    kept = random_kept(size=8, seed=3)[:1].expand(LAYERS, -1, -1)
    trial = naive_trial(model, prompt, forced_tokens, kept)

    hidden = torch.full((1, QUERY_HEADS, 1, PROMPT_LENGTH), -torch.inf)
    for query_head in range(QUERY_HEADS):
        hidden[0, query_head, 0, kept[0, query_head // (QUERY_HEADS // KV_HEADS)]] = 0.0
    model.set_attn_implementation("eager")
    try:
        for step, (full, masked) in enumerate(masked_steps(model, prompt, forced_tokens, hidden)):
            padded = torch.cosine_similarity(full.attention, masked.attention, dim=-1)
            torch.testing.assert_close(trial.cosine_padded[..., step], padded, atol=1e-5, rtol=0)
            visible = torch.nn.functional.pad(hidden[0, :, 0] == 0, (0, step + 1), value=True)
            cosine = torch.cosine_similarity(full.attention * visible, masked.attention, dim=-1)
            torch.testing.assert_close(trial.cosine[..., step], cosine, atol=1e-5, rtol=0)
            kl = torch.distributions.kl_divergence(
                torch.distributions.Categorical(logits=full.logits),
                torch.distributions.Categorical(logits=masked.logits),
            )
            torch.testing.assert_close(trial.kl[step], kl, atol=1e-5, rtol=1e-5)
            loss = torch.nn.functional.cross_entropy(masked.logits, full.logits.argmax())
            torch.testing.assert_close(trial.loss[step], loss, atol=1e-5, rtol=1e-5)
            assert trial.agreement[step] == (masked.logits.argmax() == full.logits.argmax())
    finally:
        model.set_attn_implementation("sdpa")
