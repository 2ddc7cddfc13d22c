"""Any adapter that peft can read, of whatever tool, on its base model. What the adapter holds and the model has no place for, or the other way round,
is an error: peft would go on with the tensors that fit."""

import warnings
from pathlib import Path

import peft
from torch import nn

from finefit.errors import ModelError
from finefit.model.adapter_files import CONFIG

_REMEDY = "take the model that the adapter was made for; its adapter_config.json names it as base_model_name_or_path"


def with_adapter(model: nn.Module, folder: Path) -> peft.PeftModel:
    config = _config(folder)
    if config.is_prompt_learning:
        raise ModelError(
            f"{folder.name} holds {config.peft_type.value} prompts, which stand before the model's input and are no part of its weights",
            "finefit evaluates adapters of weights, such as LoRA and DoRA",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*missing adapter keys.*")
        try:
            adapted = peft.PeftModel.from_pretrained(model, folder, config=config)
        except UserWarning as missing:
            raise ModelError(
                f"the adapter in {folder.name} lacks tensors that this model needs: {_first(missing)}", _REMEDY
            ) from None
        except (
            RuntimeError,
            ValueError,
            OSError,
        ) as error:  # shapes or names that do not fit, a file that cannot be read
            raise ModelError(
                f"the adapter in {folder.name} does not fit this model: {_first(error)}", _REMEDY
            ) from None
    _require_all_taken(adapted, folder)
    return adapted


def _config(folder: Path) -> peft.PeftConfig:
    try:
        config: peft.PeftConfig = peft.PeftConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        problem = f"{folder / CONFIG} describes no adapter that peft can read: {_first(error)}"
        raise ModelError(problem, "`finefit doctor` shows the installed versions") from None
    return config


def _require_all_taken(adapted: peft.PeftModel, folder: Path) -> None:
    """Of LoRA in all its kinds, whose tensors are stored by the names of the layers that they adapt."""
    if adapted.active_peft_config.peft_type != peft.PeftType.LORA:
        return
    held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    stored = peft.load_peft_weights(str(folder), device="cpu")
    if left := sorted(name for name in stored if ".lora_" in name and name not in held):
        raise ModelError(
            f"the adapter in {folder.name} adapts layers that this model does not have: {', '.join(left[:3])}", _REMEDY
        )


def _first(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:300] + " ..."
