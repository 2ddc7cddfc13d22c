"""One option for every choice, so that what is counted comes out as wanted over all of them: lengths, words and rules of made pairs.

Each option adds to some counts. The cost is the sum of squared distances of the counts from their targets; choices are revised one by one,
each for the least cost given all others, until none changes.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

Counts = Mapping[Hashable, float]

_MOST_SWEEPS = 8


def balance(
    choices: Sequence[Sequence[Counts]], *, targets: Counts, weights: Counts, chance: random.Random
) -> list[int]:
    """The index of the option taken in each choice. A count without a target is to be zero; one without a weight does not matter."""
    choices = [[_weighed(option, weights) for option in options] for options in choices]
    taken = [chance.randrange(len(options)) for options in choices]
    off: defaultdict[Hashable, float] = defaultdict(float, {name: -target for name, target in targets.items()})
    for options, at in zip(choices, taken, strict=True):
        _add(off, options[at], 1)
    for _ in range(_MOST_SWEEPS):
        changed = False
        for choice, options in enumerate(choices):
            _add(off, options[taken[choice]], -1)
            best = min(range(len(options)), key=lambda at: (_cost(off, options[at], weights), at != taken[choice]))
            changed |= best != taken[choice]
            taken[choice] = best
            _add(off, options[best], 1)
        if not changed:
            break
    return taken


def _weighed(option: Counts, weights: Counts) -> Counts:
    return {name: count for name, count in option.items() if name in weights}


def _add(off: defaultdict[Hashable, float], option: Counts, sign: int) -> None:
    for name, count in option.items():
        off[name] += sign * count


def _cost(off: Mapping[Hashable, float], option: Counts, weights: Counts) -> float:
    """What the option adds to the sum of squares."""
    return sum(weights[name] * count * (2 * off[name] + count) for name, count in option.items())
