"""Loss scaling for fp16, as pure functions of its record: small gradients are lifted out of what fp16 rounds to zero, and taken down again in fp32.

A step whose gradients overflow is made again at half the scale; after many good ones the scale is tried twice as high.
"""

from finefit.artifacts.trainings import LossScale

_START = 2.0**16
_LARGEST = 2.0**24
"""Far above what any gradient bears; no scale grows without end where gradients are exactly zero."""
_GOOD_STEPS = 2000


def start(precision: str) -> LossScale | None:
    """None where nothing needs scaling: bf16 and fp32 reach down as far as each other."""
    return LossScale(scale=_START, good_steps=0) if precision == "fp16" else None


def after_good_step(scale: LossScale) -> LossScale:
    if scale.good_steps + 1 < _GOOD_STEPS:
        return LossScale(scale=scale.scale, good_steps=scale.good_steps + 1)
    return LossScale(scale=min(2 * scale.scale, _LARGEST), good_steps=0)


def after_overflow(scale: LossScale) -> LossScale:
    return LossScale(scale=max(1.0, scale.scale / 2), good_steps=0)


def can_fall(scale: LossScale) -> bool:
    """Whether an overflow may be the scale's own doing; at 1 it is the model's."""
    return scale.scale > 1
