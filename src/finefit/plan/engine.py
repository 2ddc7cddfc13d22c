"""Which engine a plan means: what the spec names, or for several devices the mildest sharding that fits."""

from finefit.rehearse.shard import Sharding
from finefit.spec.schema import AutoEngine, DeepSpeed, Engine, FullyShard, Launcher, Parallel, Single, SlurmLauncher


def devices_of(engine: Engine) -> int | None:
    """Of one node; None where the card says it."""
    match engine:
        case Single():
            return 1
        case AutoEngine() | Parallel() | FullyShard() | DeepSpeed():
            return engine.devices


def nodes_of(launcher: Launcher) -> int:
    return launcher.nodes if isinstance(launcher, SlurmLauncher) else 1


def shardings_of(engine: Engine, count: int, *, can_divide: bool = True) -> tuple[Sharding, ...]:
    """The mildest first; one where the spec has decided. `can_divide`: packed weights and optimizer state in blocks cannot be."""
    match engine:
        case AutoEngine():
            return ("none",) if count == 1 else ("ddp", "fsdp2") if can_divide else ("ddp",)
        case Single():
            return ("none",)
        case Parallel():
            return ("ddp",)
        case FullyShard():
            return ("fsdp2",)
        case DeepSpeed(stage=2):
            return ("zero2",)
        case DeepSpeed():
            return ("zero3",)


def decide_engine(asked: Engine, sharding: Sharding, devices: int, *, fits: bool) -> tuple[Engine, str]:
    """What is to run, and why. `devices` of one node."""
    if not isinstance(asked, AutoEngine):
        return asked, "asked for"
    if sharding == "none":
        return Single(kind="single"), "one device"
    if sharding == "ddp":
        words = f"a whole copy fits on each of {devices} devices" if fits else "what is packed into bits cannot be divided"
        return Parallel(kind="ddp", devices=devices), words
    words = "a whole copy does not fit on one" if fits else "it needs the least, since nothing fits"
    return FullyShard(kind="fsdp2", devices=devices), words
