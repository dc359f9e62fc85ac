"""clusterprof's side, in the current process and environment."""

from contextlib import AbstractContextManager

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.kvpress.exchange import SNAPKV, PromptRuns, Task
from benchmarks.kvpress.measure import Compressor, measure
from clusterprof import compress
from clusterprof.methods import ClusterAttn, MethodConfig, SnapKV
from clusterprof.profile import Compression
from clusterprof.runtime.transformers_names import CACHE

CLUSTERATTN = "ClusterAttn"


def measure_ours(task: Task, model: PreTrainedModel) -> list[PromptRuns]:
    """SnapKV with kvpress's settings, and ClusterAttn with the paper's values for the size."""

    def forward(tokens: Tensor, cache: DynamicCache, position: int) -> Tensor:
        # The cache itself knows the position.
        logits: Tensor = model(tokens, **{CACHE: cache}, logits_to_keep=1).logits
        return logits[:, -1]

    def compressor(method: MethodConfig) -> Compressor:
        compression = Compression(size=task.size, window=task.window, method=method)

        def context(length: int) -> AbstractContextManager[object]:
            return compress(model, compression)

        return context

    compressors = {
        SNAPKV: compressor(SnapKV(kernel_size=task.kernel_size)),
        CLUSTERATTN: compressor(ClusterAttn.paper_default(task.size)),
    }
    return measure(task, "clusterprof", model, forward, compressors)
