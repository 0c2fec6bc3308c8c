"""Recurrent layers of PyTorch, run step by step, so that each of their matrices has the rule of a linear layer.

The kernels of `nn.RNN`, `nn.LSTM` and `nn.GRU` tell nothing of single steps, and `torch.func` does not serve them.
`unroll` replaces such layers by subclasses that compute the same in a loop over steps, with the same parameters under
the same names. The matrix of the inputs reads all steps at once. The matrix of the states reads one state per step; its
gradient is the sum over steps of g h^T, as of a linear layer whose positions are the steps. `EachStep` collects g and h
of all steps into one use of the layer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from sordino.errors import SordinoError
from sordino.models import per_example

State: TypeAlias = tuple[Tensor, ...]  # the hidden state, and the cell state of an LSTM


class EachStep:
    """A linear layer that is called once per step, and reported to the tape as one use with the steps as positions.

    Zeros that require a gradient are added to what the layer returns. Their gradient is that of all steps together.

    Args:
      layer: the layer.
      like: a tensor of the type of its outputs, examples x steps x any number.
    """

    def __init__(self, layer: nn.Linear, like: Tensor) -> None:
        self.layer, self.notes, self.inputs = layer, per_example.tape(), list[Tensor]()
        self.zeros: Tensor | None = None
        if self.notes is not None and layer in self.notes.names:
            self.zeros = like.new_zeros(*like.shape[:2], layer.out_features).requires_grad_()
            self.notes.leaves.append(self.zeros)

    def __call__(self, h: Tensor, t: int) -> Tensor:
        out = functional.linear(h, self.layer.weight, self.layer.bias)
        if self.zeros is None:
            return out
        self.inputs.append(h)
        return out + self.zeros[:, t]

    def finish(self) -> None:
        """Report the use, after the last step."""
        if self.notes is not None and self.zeros is not None:
            self.notes.hook(self.layer, (torch.stack(self.inputs, 1),), {}, self.zeros)


# ---------------------------------------------------------------------------------------------------------- one step


def rnn_step(read: Tensor, recalled: Tensor, state: State, relu: bool) -> State:
    """h = tanh(read + recalled), or relu."""
    z = read + recalled
    return (z.relu() if relu else z.tanh(),)


def lstm_step(read: Tensor, recalled: Tensor, state: State) -> State:
    """Gates i, f, g, o: c = f c + i g, h = o tanh(c)."""
    i, f, g, o = (read + recalled).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(read: Tensor, recalled: Tensor, state: State) -> State:
    """Gates r, z, n: h = (1 - z) n + z h, n = tanh(read_n + r recalled_n)."""
    (r, z, n), (r_h, z_h, n_h) = read.chunk(3, -1), recalled.chunk(3, -1)
    new = (n + (r + r_h).sigmoid() * n_h).tanh()
    z = (z + z_h).sigmoid()
    return ((1 - z) * new + z * state[0],)


# ------------------------------------------------------------------------------------------------- layers of many steps


class Stepwise(nn.RNNBase):
    """What the layers share. Their own parameters are read through `matrices`, whose weights are the same objects."""

    by_parts = True
    matrices: nn.ModuleDict

    def flatten_parameters(self) -> None:
        """Nothing to do: the fused kernel is not used."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        name = type(self).__bases__[-1].__name__
        if isinstance(input, PackedSequence) or input.dim() != 3:
            raise SordinoError(
                f"module: nn.{name} must read one padded tensor with an axis of records and an axis of steps, not "
                "packed or single sequences; pad them, and read the output at the last step of each."
            )
        x = input if self.batch_first else input.transpose(0, 1)
        starts, lasts = self._starts(x, hx), list[State]()
        for k in range(self.num_layers):
            outs = []
            for suffix in ("", "_reverse")[: 1 + self.bidirectional]:
                state = tuple(part[len(lasts)] for part in starts)
                out, last = self._run(x.flip(1) if suffix else x, f"l{k}{suffix}", state)
                outs.append(out.flip(1) if suffix else out)
                lasts.append(last)
            x = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
            if self.dropout and k + 1 < self.num_layers:
                x = functional.dropout(x, self.dropout, self.training)
        ends = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
        return x if self.batch_first else x.transpose(0, 1), ends if len(ends) > 1 else ends[0]

    def _starts(self, x: Tensor, hx: Any) -> State:
        """The first states: layers and directions x records x width."""
        if hx is not None:
            return hx if isinstance(hx, tuple) else (hx,)
        rows = self.num_layers * (1 + self.bidirectional)
        h = x.new_zeros(rows, len(x), self.proj_size or self.hidden_size)
        return (h, x.new_zeros(rows, len(x), self.hidden_size)) if self.mode == "LSTM" else (h,)

    def _run(self, x: Tensor, key: str, state: State) -> tuple[Tensor, State]:
        """One layer in one direction: the states at all steps, and the last one."""
        read = self.matrices[f"ih_{key}"](x)
        recall = EachStep(self.matrices[f"hh_{key}"], read)  # type: ignore[arg-type]
        project = EachStep(self.matrices[f"hr_{key}"], read) if self.proj_size else None  # type: ignore[arg-type]
        outs = []
        for t in range(x.shape[1]):
            state = self.step(read[:, t], recall(state[0], t), state)
            if project is not None:
                state = (project(state[0], t), *state[1:])
            outs.append(state[0])
        recall.finish()
        if project is not None:
            project.finish()
        return torch.stack(outs, 1), state

    def step(self, read: Tensor, recalled: Tensor, state: State) -> State:
        """One step of the layer's kind."""
        if self.mode == "LSTM":
            return lstm_step(read, recalled, state)
        return gru_step(read, recalled, state) if self.mode == "GRU" else rnn_step(read, recalled, state, self._relu)

    @property
    def _relu(self) -> bool:
        return self.mode == "RNN_RELU"


class StepwiseRNN(Stepwise, nn.RNN):
    """`nn.RNN`, step by step."""


class StepwiseLSTM(Stepwise, nn.LSTM):
    """`nn.LSTM`, step by step."""


class StepwiseGRU(Stepwise, nn.GRU):
    """`nn.GRU`, step by step."""


# ----------------------------------------------------------------------------------------------------- cells: one step


class StepwiseCell(nn.RNNCellBase):
    """What the cells share. A cell that is called at every step has as many uses as steps."""

    by_parts = True
    matrices: nn.ModuleDict

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if input.dim() != 2:
            name = type(self).__bases__[-1].__name__
            raise SordinoError(f"module: nn.{name} must read one row per record; give it an axis of records.")
        if hx is None:
            h = input.new_zeros(len(input), self.hidden_size)
            hx = (h, h) if isinstance(self, nn.LSTMCell) else h
        state = hx if isinstance(hx, tuple) else (hx,)
        read, recalled = self.matrices["ih"](input), self.matrices["hh"](state[0])
        if isinstance(self, nn.LSTMCell):
            return lstm_step(read, recalled, state)
        if isinstance(self, nn.GRUCell):
            return gru_step(read, recalled, state)[0]
        return rnn_step(read, recalled, state, getattr(self, "nonlinearity", "tanh") == "relu")[0]


class StepwiseRNNCell(StepwiseCell, nn.RNNCell):
    """`nn.RNNCell`, by linear layers."""


class StepwiseLSTMCell(StepwiseCell, nn.LSTMCell):
    """`nn.LSTMCell`, by linear layers."""


class StepwiseGRUCell(StepwiseCell, nn.GRUCell):
    """`nn.GRUCell`, by linear layers."""


STEPWISE: dict[type[nn.Module], type[nn.Module]] = {
    nn.RNN: StepwiseRNN,
    nn.LSTM: StepwiseLSTM,
    nn.GRU: StepwiseGRU,
    nn.RNNCell: StepwiseRNNCell,
    nn.LSTMCell: StepwiseLSTMCell,
    nn.GRUCell: StepwiseGRUCell,
}


def unroll(module: nn.Module) -> None:
    """Let the recurrent layers with trained parameters run step by step, in place. Frozen ones stay as they are.

    Args:
      module: the network. Names and order of its parameters stay the same.
    """
    for part in list(module.modules()):
        if type(part) in STEPWISE and any(p.requires_grad for p in part.parameters(recurse=False)):
            found = dict(part.named_parameters(recurse=False))
            weights = [name.removeprefix("weight_") for name in found if name.startswith("weight_")]
            matrices = {name: tied(found[f"weight_{name}"], found.get(f"bias_{name}")) for name in weights}
            part.__class__ = STEPWISE[type(part)]
            part.matrices = nn.ModuleDict(matrices)


def tied(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A linear layer whose parameters are these objects."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer
