"""Variants of low-rank adapters in which a round trains one of the factors A and B: `alternating` and `fedsvd`.

Every method with one stage whose clients store nothing serves them. Its rules, of clients and of the server, run
unchanged on the part of theta that is trained; the rest is frozen for the round. A record's gradient is that of the
part: it is clipped, noised and sent alone, so the sensitivity of a release is the clip, and neither noise nor message
covers frozen entries.

Alternating: stages of some rounds train B and A in turns, B first, because A has no gradient while B is 0. The head is
trained in all of them. Each factor has its own state of the server's rule.

FedSVD (Lee et al. 2025, arXiv 2505.12805): clients train B and the head. After each round the server re-factors B A so
that A has orthonormal rows (`rules.adapters`). The server reads only the model, which is released, so this is
post-processing.
"""

from __future__ import annotations

from sordino.core import Independent, Kind, Method, Query, Stage, forget, itself, keep, nothing
from sordino.errors import SordinoError, check_known
from sordino.methods.parts import part_local
from sordino.models.pretrained import LORA_VARIANTS
from sordino.rules.adapters import DOWN, UP, part_rule

SERVED = (Kind.GRADIENT, Kind.COUNT, Kind.DELTA)
MOST_STAGES = 256


def with_adapters(method: Method, variant: str, rounds: int, every: int = 1) -> Method:
    """The method, for a model with low-rank adapters of which each round trains one factor.

    Args:
        method: A method of one stage with independent noise, which asks for gradients and whose clients store nothing.
        variant: `alternating` or `fedsvd`. `lora` and `freeze-a` return the method unchanged: there, the model says
            what is trained.
        rounds: Of the run.
        every: Of `alternating`: so many rounds train B, then as many A, and so on.

    Returns:
        The method.

    Raises:
        SordinoError: The method does not serve the variant, or `every` is out of its range.

    Example:
        >>> from sordino.methods import build
        >>> [stage.rounds for stage in with_adapters(build("dp-fedadam"), "alternating", rounds=5, every=2).stages]
        [2, 2, None]
    """
    check_known("lora_variant", variant, LORA_VARIANTS)
    if variant in ("lora", "freeze-a"):
        return method
    stage = _served(method, variant)
    stages = (_fedsvd(stage),) if variant == "fedsvd" else _alternating(stage, rounds, every)
    return method._replace(stages=stages, registered=None if method.by_hand else (stages, method.proves))


def _fedsvd(stage: Stage) -> Stage:
    """B and the head are trained; the server re-factors."""
    return stage._replace(local=part_local(stage.local, DOWN), rule=part_rule(stage.rule, DOWN, refactor=True))


def _alternating(stage: Stage, rounds: int, every: int) -> tuple[Stage, ...]:
    """B, A, B and so on, with the head."""
    number = -(-rounds // every) if every >= 1 else 0
    if not 1 <= number <= MOST_STAGES:
        raise SordinoError(
            f"lora_every: {every} divides {rounds} rounds into {number} stages; it must be at least 1, and there may "
            f"be {MOST_STAGES} stages at most."
        )
    lengths = [every] * (number - 1) + [rounds - every * (number - 1)]
    stages = []
    for k, length in enumerate(lengths):
        frozen, done, total = UP if k % 2 else DOWN, sum(lengths[k % 2 : k : 2]), sum(lengths[k % 2 :: 2])
        rule = part_rule(stage.rule, frozen, before=k, done=done, total=total)
        turn = stage.with_part(length / rounds)  # a share of the budget is that of all rounds
        last = k == number - 1
        stages.append(turn._replace(local=part_local(stage.local, frozen), rule=rule, rounds=None if last else length))
    return tuple(stages)


def _served(method: Method, variant: str) -> Stage:
    """The only stage of a method that serves the variants."""
    first = method.stages[0]
    local, kinds = first.local, {query.kind for query in first.queries}

    def fresh(query: Query) -> bool:
        return query.noise is None or query.noise == Independent()

    rules = (
        (len(method.stages) == 1 and first.rounds is None, "has several stages"),
        (local.init is forget and local.update_memory is keep, "has clients that store what they sent"),
        (local.prepare is nothing and kinds <= set(SERVED), "asks for more than gradients"),
        (all(map(fresh, first.queries)), "has noise that goes on from round to round"),
        (first.rule.model is itself, "hands out a mean of models, whose factors do not fit together (tail)"),
    )
    if wrong := [what for fine, what in rules if not fine]:
        raise SordinoError(
            f"lora_variant: {variant} trains a part of the adapters in each round, and {method.name} {wrong[0]}; use "
            "freeze-a or lora, or a method such as dp-fedadam, dp-fedavg or dp-fedadamw."
        )
    return first
