"""PyTorch on the GPU at hand, eager and compiled, measured as `trtforge bench` measures an engine.

    python torch_peer.py [MODEL ...]

MODEL is bert-base, bert-intent or resnet50; all by default. Weights and inputs are random. Needs torch, transformers and
torchvision, and nothing of trtforge, so that it runs in an environment of its own.

latency = copy in + compute + copy out, between events in one stream, from and to page-locked memory. TF32 is off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

BATCHES = (1, 8, 32)
SEQUENCE = 128
WARM_UP = 30
QUERIES = 300
INTENT = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}
Times = list[tuple[float, float]]
"""(latency, compute) in milliseconds of each query."""


def bert(**sizes: int) -> Any:
    """A BERT encoder with a pooler."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - where it is asked for

    return BertModel(BertConfig(**sizes))


def resnet50() -> Any:
    """A ResNet-50."""
    import torchvision  # noqa: PLC0415 - where it is asked for

    return torchvision.models.resnet50(weights=None)


MODELS: dict[str, Callable[[], Any]] = {
    "bert-base": bert,
    "bert-intent": lambda: bert(**INTENT),
    "resnet50": resnet50,
}


def inputs_of(name: str, batch: int, dtype: Any) -> list[Any]:
    """Page-locked inputs."""
    if name == "resnet50":
        return [torch.randn(batch, 3, 224, 224, dtype=dtype).pin_memory()]
    ids = torch.randint(0, 8000, (batch, SEQUENCE))
    return [ids.pin_memory(), torch.ones_like(ids).pin_memory()]


def measure(model: Callable[..., Any], given: list[Any]) -> Times:
    """Times of `QUERIES` queries, one after another."""
    found = []
    held: list[Any] = []
    for number in range(WARM_UP + QUERIES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record()
        moved = [tensor.cuda(non_blocking=True) for tensor in given]
        events[1].record()
        outputs = list(tensors_of(model(*moved)))
        events[2].record()
        held = held or [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in outputs]
        for target, output in zip(held, outputs, strict=True):
            target.copy_(output, non_blocking=True)
        events[3].record()
        events[3].synchronize()
        if number >= WARM_UP:
            found.append((events[0].elapsed_time(events[3]), events[1].elapsed_time(events[2])))
    return found


def tensors_of(outputs: Any) -> Iterator[Any]:
    """The tensors in what a model returns."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    else:
        yield from (one for one in outputs.to_tuple() if isinstance(one, torch.Tensor))


def row(name: str, dtype: Any, mode: str, model: Any, batch: int) -> str:
    """One line of the table."""
    times = measure(model, inputs_of(name, batch, dtype))
    latency, compute = (sorted(column) for column in zip(*times, strict=True))
    p50, p99 = latency[len(latency) // 2], latency[len(latency) - 1 - len(latency) // 100]
    figures = " | ".join(f"{value:7.3f}" for value in (p50, p99, compute[len(compute) // 2]))
    return f"| {name:<11} | {str(dtype)[6:]:<7} | {mode:<7} | {batch:>5} | {figures} |"


def main() -> None:
    """Measures and prints."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; milliseconds\n")
    print("| model       | type    | mode    | batch |     p50 |     p99 | compute |")
    print("| ----------- | ------- | ------- | ----: | ------: | ------: | ------: |")
    with torch.inference_mode():
        for name in sys.argv[1:] or MODELS:
            for dtype in (torch.float32, torch.float16):
                model = MODELS[name]().eval().cuda().to(dtype)
                for mode in ("eager", "compile"):
                    torch.compiler.reset()
                    ready = model if mode == "eager" else torch.compile(model, dynamic=False)
                    for batch in BATCHES:
                        print(row(name, dtype, mode, ready, batch), flush=True)


if __name__ == "__main__":
    main()
