"""What a server may not write: into the spec of a run, and into the message of a round; for runs of three rounds."""

import numpy as np

SPEC = [  # what a server may not write into a spec, and a word of the site's own log about it
    ({"method": "dp-magic"}, "unknown"),
    ({"method": None}, "method"),
    ({"uncertified": True}, "uncertified"),
    ({"seed": 1}, "seed"),
    ({"weights": "/etc/passwd"}, "weights"),
    ({"public_stats": "/etc/passwd"}, "public_stats"),
    ({"data": "/etc/passwd"}, "data"),
    ({"data_dir": "/etc"}, "data_dir"),
    ({"label": "y"}, "label"),
    ({"test_fraction": 0.01}, "test_fraction"),
    ({"noise": 1e-6}, "noise"),
    ({"epsilon": None, "noise": 1e-6}, "noise"),
    ({"epsilon": float("nan")}, ""),
    ({"epsilon": None}, "decide"),
    ({"clients": 2}, "clients"),
    ({"partition": "iid"}, "partition"),
    ({"sizes": "equal"}, "sizes"),
    ({"evaluate_every": 1}, "evaluate_every"),
    ({"threshold": 0.5}, "threshold"),
    ({"unit": "client"}, "unit"),
    ({"trust": "trusted-server"}, "trust"),
    ({"trust": "nobody"}, ""),
    ({"rounds": None}, "decide"),
    ({"rounds": 10**6}, "most_rounds"),
    ({"normalize": None}, "decide"),
    ({"schedule_seed": None}, "decide"),
    ({"clip": float("inf")}, ""),
    ({"clip": "wide"}, ""),
    ({"stranger": 1}, "stranger"),
    ({"model": "/etc/passwd"}, "model"),
]

SIZE = 15  # of tiny federations' models: four features and a bias, three classes
NUMBERS = np.zeros(SIZE, np.float32)


def put(value):
    theta = NUMBERS.copy()
    theta[3] = value
    return theta


ROUNDS = [
    ("unknown-run", {"run": "00" * 16}, {}),
    ("unknown-run", {"run": "../../etc"}, {}),
    ("unknown-run", {"run": ["ab" * 16]}, {}),
    ("unknown-run", {"run": 7}, {}),
    ("malformed", {"run": None}, {}),
    ("changed", {"terms": "00" * 32}, {}),
    ("changed", {"terms": ["x"]}, {}),
    ("malformed", {"terms": None}, {}),
    ("order", {"t": -1}, {}),
    ("order", {"t": 3}, {}),
    ("order", {"t": 10**30}, {}),
    ("order", {"t": True}, {}),
    ("order", {"t": 0.0}, {}),
    ("order", {"t": "0"}, {}),
    ("order", {"t": [0]}, {}),
    ("malformed", {"t": None}, {}),
    ("malformed", {"extras": None}, {}),
    ("malformed", {"stranger": 1}, {}),
    ("malformed", {"extras": 0}, {}),
    ("malformed", {"extras": 10**30}, {}),
    ("malformed", {"extras": "theta"}, {}),
    ("malformed", {"extras": {"a": [[]]}}, {}),
    ("malformed", {"extras": [[[[0, 0, 0]]]]}, {"extras0": NUMBERS}),
    ("malformed", {"extras": [1, 0]}, {"extras0": NUMBERS, "extras1": NUMBERS}),
    ("malformed", {}, {"theta": None}),
    ("malformed", {}, {"theta": put(np.nan)}),
    ("malformed", {}, {"theta": put(np.inf)}),
    ("malformed", {}, {"theta": put(-np.inf)}),
    ("malformed", {}, {"theta": NUMBERS[:-1]}),
    ("malformed", {}, {"theta": np.zeros(2**20, np.float32)}),
    ("malformed", {}, {"theta": NUMBERS[None]}),
    ("malformed", {}, {"theta": np.zeros((3, SIZE), np.float32)}),
    ("malformed", {}, {"theta": NUMBERS.astype(np.float64)}),
    ("malformed", {}, {"theta": NUMBERS.astype(np.float64) + 1e300}),
    ("malformed", {}, {"theta": NUMBERS.astype(np.int64)}),
    ("malformed", {}, {"theta": NUMBERS.astype(np.uint8)}),
    ("malformed", {}, {"stranger": NUMBERS}),
    ("malformed", {}, {"extras0": NUMBERS}),
    ("malformed", {}, {"offer:south": np.zeros(4, np.uint8)}),
]

WORDS = [
    np.zeros((5, SIZE), np.float32),  # five models at once, whose answers would share one draw of noise
    np.zeros((1, SIZE), np.float32),
    np.zeros(2, np.float32),
    np.zeros(0, np.float32),
    np.zeros(2 * SIZE, np.float32),
    put(np.nan),
    put(np.inf),
    np.full(SIZE, 1e300),  # beyond what float32 holds
    np.zeros(SIZE, np.int64),
]
