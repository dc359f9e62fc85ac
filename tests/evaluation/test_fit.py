import pytest
import torch

from clusterprof.errors import CompressionError
from clusterprof.evaluation import fit
from clusterprof.methods import ClusterAttn, Method, SnapKV, TopK
from clusterprof.runtime.selection import kept_positions
from tests.evaluation.subjects import spoiled
from tests.profiling.subjects import SMALL, capture, random_prompt
from tests.reference.naive_trial import naive_trial
from tests.tiny import tiny_gemma3, tiny_llama


@pytest.mark.parametrize("method", [ClusterAttn(num_block=2, theta=0.02), SnapKV(), TopK()])
def test_equals_a_naive_trial(method: Method) -> None:
    model = tiny_llama()
    found = capture(model)
    kept = kept_positions(method, found.observation, SMALL.size)
    scores, curves = fit.measure(model, found, kept)
    trial = naive_trial(model, random_prompt(), found.tokens[:-1].tolist(), kept)
    # Otherwise there would be nothing to tell apart.
    assert trial.cosine.std() > 1e-3
    assert set(scores) == {"cosine", "cosine_padded", "attention_output", "kl", "agreement", "loss", "log_kl"}
    for name, score in scores.items():
        assert score == pytest.approx(float(getattr(trial, name).mean()), abs=1e-4)
    by_head = torch.tensor(curves["cosine_by_head"], dtype=torch.float64)
    torch.testing.assert_close(by_head, trial.cosine.mean(dim=-1), atol=1e-4, rtol=0)
    assert curves["layers"] == [0, 1]


def test_rows_are_the_layers_with_full_attention() -> None:
    model = tiny_gemma3()
    found = capture(model)
    _, curves = fit.measure(model, found, kept_positions(SMALL.method, found.observation, SMALL.size))
    by_head = curves["cosine_by_head"]
    assert curves["layers"] == [1]
    assert isinstance(by_head, list)
    assert len(by_head) == 1


def test_names_the_layer_whose_attention_is_not_finite() -> None:
    model = tiny_llama()
    found = spoiled(capture(model), layer=1, part="queries")
    with pytest.raises(CompressionError, match="layer 1 is not finite"):
        fit.measure(model, found, kept_positions(SMALL.method, found.observation, SMALL.size))
