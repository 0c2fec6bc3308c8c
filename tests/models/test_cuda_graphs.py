"""CUDA graphs: what they keep, and on a GPU that replays read it."""

import contextlib
import gc
import weakref

import pytest
import torch

from sordino.models.cuda_graphs import CapturedGraph


class Quiet:
    """Stands for streams and graphs on a machine without a GPU."""

    def __init__(self, *args):
        pass

    def wait_stream(self, other):
        pass

    def replay(self):
        pass


@pytest.fixture
def no_gpu(monkeypatch):
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Quiet)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **words: contextlib.nullcontext())
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)


def test_a_graph_keeps_what_its_function_reads(no_gpu):
    """A graph that forgets its function (the mutant) frees tensors that a replay reads."""

    def captured():
        known = torch.ones(3)
        return CapturedGraph(lambda t: known + t, (torch.zeros(3),)), weakref.ref(known)

    graph, known = captured()
    gc.collect()
    assert known() is not None
    del graph._function
    gc.collect()
    assert known() is None


def test_no_garbage_is_collected_during_a_capture(no_gpu):
    enabled = []
    CapturedGraph(lambda t: enabled.append(gc.isenabled()) or t, (torch.zeros(3),))
    assert enabled == [True, False], "the first call is no capture"
    assert gc.isenabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_older_graph_in_garbage_does_not_end_a_capture():
    def captured(often):
        def f(t):
            for _ in range(often):  # objects that a collection counts
                kept.append([len(kept)])
            return t + 1

        return CapturedGraph(f, (torch.zeros(1000, device="cuda"),), autograd=False)

    kept = []
    for _ in range(5):
        circle = [captured(0)]
        circle.append(circle)
        del circle
        graph = captured(5000)
        assert torch.equal(graph((torch.ones(1000, device="cuda"),)), torch.full((1000,), 2.0, device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_read_the_same_numbers_on_a_gpu():
    def captured():
        known = torch.arange(1000.0, device="cuda")
        return CapturedGraph(lambda t: known + t, (torch.zeros(1000, device="cuda"),), autograd=False)

    graph = captured()
    others = [torch.full((1000,), -1.0, device="cuda") for _ in range(50)]  # take what is free
    assert torch.equal(graph((torch.ones(1000, device="cuda"),)), torch.arange(1000.0, device="cuda") + 1)
    assert len(others) == 50
