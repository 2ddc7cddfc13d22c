"""`finefit chat`: talk to a model in the terminal, or line by line from a script."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from finefit.cli.console import open_console, set_torch_variables

_TARGET = (
    "RUN or RUN:CHECKPOINT (best, final, a step number), PIPELINE/STAGE; a folder with a model or an adapter; "
    "FILE.gguf; hub:owner/name; embedded:smollm2-135m."
)
_SYSTEM = "The system prompt; /system changes it."
_TEMPERATURE = "0: the likeliest token each time; larger: sampled, the same for the same seed and prompt."
_DEVICE = "By default a GPU if there is one."
_BASE = "The model below an adapter, if its config does not name it."
_JSON = "One line of JSON on stdout for each answer; everything else on stderr."


def chat(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help=_TARGET)],
    system: Annotated[str, typer.Option(metavar="TEXT", help=_SYSTEM)] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help=_TEMPERATURE)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampled answers.")] = 0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help=_DEVICE)] = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help=_BASE)] = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Talk to a model, with the template and the stop tokens that it was trained with. /help lists the commands; Ctrl-C
    stops an answer, and a second one ends the chat. Without a terminal, each line of stdin is a message.

    Examples:

      finefit chat runs/orders-1

      finefit chat runs/orders-1:checkpoint-40 --system "Answer in one sentence."

      finefit chat my-model/ --temperature 0.7 --seed 1

      finefit chat model-q4_k_m.gguf

      echo "Two lamps by Friday, Ann" | finefit chat runs/orders-1 --json
    """
    console = open_console(as_json=True)
    set_torch_variables()
    with console.status("reading the model"):
        from finefit.artifacts.rundir import names_checkpoint
        from finefit.cli.chat_session import ChatSession, converse, open_screen
        from finefit.export.chat import ChatHistory, GgufSpeaker, Sampling, Speaker, open_speaker
        from finefit.export.requirements import require_as_trained
        from finefit.export.subject import open_subject
        from finefit.model.load import quiet
        from finefit.run.eval_subjects import refuse_what_has_not_run
        from finefit.run.export_target import model_folder

        quiet()
        speaker: Speaker
        if target.endswith(".gguf"):
            speaker, name = GgufSpeaker(Path(target)), Path(target).name
        else:
            refuse_what_has_not_run(target.rpartition(":")[0] if names_checkpoint(target) else target, Path("runs"))
            subject = open_subject(model_folder(target), target=target, base=base)
            require_as_trained(subject)
            speaker, name = open_speaker(subject, device=device), subject.name
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    session = ChatSession(speaker, ChatHistory(system), sampling, open_screen(as_json=as_json))
    session.introduce(name)
    converse(session)
