"""Which engine a plan means: what the spec names, or for several devices the mildest sharding that fits."""

from finefit.errors import SpecError
from finefit.facts.cards import CardRequest
from finefit.rehearse.shard import Sharding
from finefit.spec.schema import AutoEngine, DeepSpeed, Engine, FullyShard, Launcher, Parallel, Single, SlurmLauncher


def devices_of(engine: Engine) -> int | None:
    """Of one node; None where the card says it."""
    match engine:
        case Single():
            return 1
        case AutoEngine() | Parallel() | FullyShard() | DeepSpeed():
            return engine.devices


def require_same_count(request: CardRequest, engine: Engine) -> None:
    devices = devices_of(engine)
    if request.count == 1 or devices in (None, request.count):
        return
    if isinstance(engine, Single):
        words, remedy = "engine.kind: single", "name one card, or an engine that takes several"
    else:
        words, remedy = f"engine.devices: {devices}", "name the same number in both, or in one of them"
    raise SpecError(f"card: {request.text} and {words} contradict each other", remedy)


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


def require_several(engine: Engine, count: int) -> None:
    """`count`: of the devices on all nodes."""
    if count == 1 and isinstance(engine, FullyShard | DeepSpeed):
        raise SpecError(f"engine.kind {engine.kind} divides over devices, and there is one", "set engine.kind: single")


def engine_of(sharding: Sharding, devices: int) -> Engine:
    match sharding:
        case "none":
            return Single(kind="single")
        case "ddp":
            return Parallel(kind="ddp", devices=devices)
        case "fsdp2":
            return FullyShard(kind="fsdp2", devices=devices)
        case "zero2":
            return DeepSpeed(kind="deepspeed", devices=devices, stage=2)
        case "zero3":
            return DeepSpeed(kind="deepspeed", devices=devices, stage=3)


def decide_engine(asked: Engine, sharding: Sharding, devices: int, *, fits: bool) -> tuple[Engine, str]:
    """What is to run, and why. `devices` of one node."""
    if not isinstance(asked, AutoEngine):
        return asked, "asked for"
    if sharding == "none":
        words = "one device"
    elif sharding == "ddp":
        words = (
            f"a whole copy fits on each of {devices} devices" if fits else "what is packed into bits cannot be divided"
        )
    else:
        words = "a whole copy does not fit on one" if fits else "it needs the least, since nothing fits"
    return engine_of(sharding, devices), words
