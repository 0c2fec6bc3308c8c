"""Run a function of GPU tensors as CUDA graphs: all its kernels are launched by one call."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CALLS_BEFORE_CAPTURE = 3  # plain calls per shape: they choose kernels, and a rare shape is not worth a graph
GRAPHS_PER_CACHE = 8


class GraphCache:
    """One graph per combination of input shapes. All graphs share memory, because only one runs at a time.

    The function must not read any number back to the CPU. Its random numbers equal those of a plain call: a replay
    reads the seed and the offset of torch's generator and advances it.
    """

    def __init__(self) -> None:
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._pool: Any = None

    def __call__(self, f: Callable[..., Tensor], inputs: Sequence[Tensor | None], *rest: Hashable) -> Tensor:
        """f(*inputs, *rest), by a graph once this combination of shapes was seen often enough.

        Args:
            f: The function; always the same for one cache.
            inputs: Its tensor arguments, whose values may change between calls.
            rest: Its other arguments, which belong to the graph.

        Returns:
            The function's value.
        """
        key = (*(None if t is None else (t.shape, t.dtype, t.device) for t in inputs), *rest)
        if key not in self._graphs:
            self._calls[key] += 1
            full = len(self._graphs) >= GRAPHS_PER_CACHE
            if full or self._calls[key] <= CALLS_BEFORE_CAPTURE or torch.cuda.is_current_stream_capturing():
                return f(*inputs, *rest)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = CapturedGraph(lambda *tensors: f(*tensors, *rest), inputs, self._pool)
        return self._graphs[key](inputs)


@contextmanager
def no_collection() -> Iterator[None]:
    """Meanwhile no garbage is collected: it may hold an older graph, and freeing that one would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedGraph:
    """A function captured as one CUDA graph, for inputs of one shape.

    The graph reads the memory of all tensors that the function knows, so it keeps the function.

    Args:
        f: The function. It must not read any number back to the CPU.
        inputs: Example inputs; later calls pass tensors of the same shapes.
        pool: Memory pool to share with other graphs; None for a pool of its own.
        autograd: Whether the function runs backward passes. Their garbage is collected first, which takes up to 0.3 s.
    """

    def __init__(
        self, f: Callable[..., Tensor], inputs: Sequence[Tensor | None], pool: Any = None, *, autograd: bool = True
    ) -> None:
        self._function = f  # a replay reads what it knows: freed, that memory would soon hold other numbers
        self._inputs = [None if t is None else t.detach().clone() for t in inputs]
        device = next(t.device for t in inputs if t is not None)
        rng_state = torch.cuda.get_rng_state(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            f(*self._inputs)  # compiles kernels and creates what the stream needs
        torch.cuda.current_stream(device).wait_stream(stream)
        if autograd:
            gc.collect()  # frees tensors that autograd holds in cycles and that belong to other streams
        self._graph = torch.cuda.CUDAGraph()
        # Autograd runs in a thread of its own, which may make calls that are forbidden in this one.
        capture = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with no_collection(), capture:
            self._output = f(*self._inputs)
        torch.cuda.set_rng_state(rng_state, device)  # as if nothing had been drawn

    def __call__(self, inputs: Sequence[Tensor | None]) -> Tensor:
        """The function's value for these inputs."""
        for static, new in zip(self._inputs, inputs, strict=True):
            if static is not None and new is not None:
                static.copy_(new)
        self._graph.replay()
        return self._output.clone()
