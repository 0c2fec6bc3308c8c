"""Operators look at the same federations in one process as the tests of the protocol do."""

from tests.federation.conftest import fast, federation, talk, three, tiny

__all__ = ["fast", "federation", "talk", "three", "tiny"]
