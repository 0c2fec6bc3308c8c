"""The triangular factors of complete binary trees, by formulas that take no product or inverse of matrices.

Let G be the Gram matrix of a complete tree of m rounds, that is, G counts the nodes that hold two rounds. 1 is the
vector of ones. C(a) is the lower triangular matrix with C(a)^T C(a) = G + a 1 1^T. For two trees of m rounds and a
node above them, with b = 1 + a, s = 1^T G^-1 1 = m / (2m - 1) and y(a) = C(a)^-T 1:

    C(a)    =  [C(left)       0    ]     C(a)^-1  =  [C(left)^-1                     0         ]
               [b y(b) 1^T    C(b) ]                 [-b / (1 + b s) s / m 1 y(left)^T    C(b)^-1 ]

    y(a)    =  [y(left) / (1 + b s), y(b)],     where left = b / (1 + b s).

So each block below the diagonal has equal columns in C, and equal rows in its inverse. Every number is made of positive
ones by sums, products, quotients and roots, so each keeps its digits (`ERROR`). docs/proofs.md, "Trees", has the proof.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ERROR = 2.0**-44  # relative, of an entry of a factor of at most 4,096 rounds (docs/proofs.md, "Trees")


class Level(NamedTuple):
    """The blocks below the diagonal for all nodes of one level: rows of the right half, columns of the left half."""

    encoder: np.ndarray  # nodes x rows: the entry of all columns
    decoder: np.ndarray  # nodes x columns: the entry of all rows; not positive


class TreeFactors(NamedTuple):
    """C(0) and its inverse for a complete tree; `levels` from the leaves up."""

    diagonal: np.ndarray
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, height: int) -> TreeFactors:
        """The factors of a tree of 2^height rounds."""
        added = [np.zeros(1)]  # a of the formula for each node, from the root down
        for k in reversed(range(height)):
            b = 1 + added[-1]
            added.append(np.stack([b / (1 + b * _inverse_sum(k)), b], axis=1).reshape(-1))
        diagonal = np.sqrt(1 + added.pop())
        y, levels = (1 / diagonal)[:, None], []
        for k in range(height):
            b, s = 1 + added.pop()[:, None], _inverse_sum(k)
            left, right = y[::2], y[1::2]
            levels.append(Level(b * right, -(b * s / (1 + b * s) / 2**k) * left))
            y = np.concatenate([left / (1 + b * s), right], axis=1)
        return cls(diagonal, tuple(levels))

    def row_sums(self) -> np.ndarray:
        """C 1."""
        sums = self.diagonal[:, None]
        for level in self.levels:
            half = sums.shape[1]
            sums = np.concatenate([sums[::2], sums[1::2] + half * level.encoder], axis=1)
        return np.asarray(sums[0])

    def times_absolute(self, weights: np.ndarray) -> np.ndarray:
        """weights^T |C^-1| |C|."""
        inner = _times(weights, 1 / self.diagonal, [-level.decoder for level in self.levels], by_rows=False)
        return _times(inner, self.diagonal, [level.encoder for level in self.levels], by_rows=True)

    def inverse_row(self, t: int) -> np.ndarray:
        """Row t of C^-1."""
        row = np.zeros(len(self.diagonal))
        row[t] = 1 / self.diagonal[t]
        for level in self.levels:
            half = level.decoder.shape[1]
            node, inside = divmod(t, 2 * half)
            if inside >= half:
                row[2 * half * node : 2 * half * node + half] = level.decoder[node]
        return row

    def write(self, encoder: np.ndarray, decoder: np.ndarray) -> None:
        """Write C and its inverse into square matrices of zeros."""
        np.fill_diagonal(encoder, self.diagonal)
        np.fill_diagonal(decoder, 1 / self.diagonal)
        for level in self.levels:
            half = level.encoder.shape[1]
            for node, (rows, columns) in enumerate(zip(*level, strict=True)):
                left = 2 * half * node
                block = slice(left + half, left + 2 * half), slice(left, left + half)
                encoder[block], decoder[block] = rows[:, None], columns


def _inverse_sum(height: int) -> float:
    """The sum of the entries of G^-1, G of a complete tree of 2^height rounds."""
    return 1 / (2 - 0.5**height)


def _times(weights: np.ndarray, diagonal: np.ndarray, blocks: list[np.ndarray], by_rows: bool) -> np.ndarray:
    """weights^T times a matrix of these blocks, whose values are those of their rows, or of their columns."""
    result = weights * diagonal
    for values in blocks:
        nodes, half = values.shape
        right = weights.reshape(nodes, 2, half)[:, 1]
        below = (right * values).sum(1, keepdims=True) if by_rows else right.sum(1, keepdims=True) * values
        result.reshape(nodes, 2, half)[:, 0] += below
    return np.asarray(result)
