"""Time of a sweep of k × τ × λ on a trace, by the number of tokens.

python benchmarks/sweep.py --tokens 50000
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from knnlm.evaluation.trace import MemoryTrace, Trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--k", type=int, default=1024)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (options.tokens, options.k)
    distances = (torch.rand(shape, generator=generator) * 100).sort(1).values.numpy()
    values = torch.randint(0, 50, shape, generator=generator, dtype=torch.int32).numpy()
    targets = np.zeros(options.tokens, np.int32)
    log_probs = np.full(options.tokens, -3.0, np.float32)
    features = np.zeros((options.tokens, 0), np.float32)
    metadata = {"tokens": options.tokens, "sources": ["random"], "documents": 1, "leaked_documents": 0}
    own = {"label": "knn", "kind": "knn", "k": options.k, "metric": "l2"}
    memory = MemoryTrace(own, {"distances": distances, "values": values}, 50)
    trace = Trace(targets, log_probs, features, targets, targets, targets, targets, [memory], metadata)
    swept = trace.sweep()
    row = {"tokens": swept.tokens, "settings": swept.perplexity.size, "threads": torch.get_num_threads()}
    print(json.dumps(row | {"seconds": round(swept.seconds, 2)}))


if __name__ == "__main__":
    main()
