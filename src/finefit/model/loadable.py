"""Whether a worker will be able to load a model, decided from the headers of its files on the meta device. transformers
renames and joins the tensors as it does with real weights, but no weight is read."""

from collections.abc import Iterable, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import get_checkpoint_shard_files

from finefit.artifacts.forecasts import LoadProof
from finefit.errors import MissingPackage, ModelError
from finefit.facts.files import (
    FETCH_AGAIN,
    INDEX,
    RESTORE,
    WEIGHTS,
    Tensor,
    WeightFile,
    find_weight_files,
    read_config,
    read_stored_json,
    read_weight_file,
    reading_model,
)
from finefit.model.adapter import require_fitting_adapter
from finefit.model.load import make_trainable
from finefit.model.quantised import PackedWeights, packed_layers, packed_weights, require_trainable
from finefit.model.saved_weights import frozen_weights_of
from finefit.spec.models import Lora, Subset, Tuning
from finefit.vision import FAMILIES, auto_class

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_INTEGERS |= {"U8": torch.uint8, "BOOL": torch.bool}
_ENCODERS = (
    *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm"),
    *("roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
SEEING_AHEAD = ("big_bird", "cpmant", "megatron-bert", "moshi", "prophetnet", "rembert", "roformer", "xlm", "xlnet")
"""Model types whose tokens depend on later ones, or on how many there are, as decoders too."""
_DRAFTING = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types that draft tokens from the hidden states of another model."""
_SHOWN = 3


def require_known_type(config: Mapping[str, Any]) -> None:
    """`config`: the contents of a config.json."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        what = "no model_type" if kind is None else f"the model_type {kind!r}"
        problem = f"the model's config has {what}, so its architecture is unknown"
        raise ModelError(problem, "take the config.json that belongs to the model")
    if kind not in CONFIG_MAPPING:
        problem = f"transformers {transformers.__version__} has no model type {kind}, so its layers are unknown"
        raise ModelError(problem, "pip install --upgrade transformers, in case it is newer, or name another model")


def require_causal(config: PretrainedConfig) -> None:
    """Raises a short error; transformers would list all of its classes."""
    if type(config) not in auto_class(config)._model_mapping:
        families = ", ".join(FAMILIES)
        if type(config) in transformers.AutoModelForImageTextToText._model_mapping:
            problem = f"{config.model_type} takes images, and finefit has no module that makes its batches"
            raise ModelError(problem, f"name a vision-language model of type {families}")
        problem = f"transformers has no causal language model of type {config.model_type}, and finefit trains no other"
        raise ModelError(problem, f"name a causal language model, or a vision-language model of type {families}")
    if config.model_type in _ENCODERS and not config.is_decoder:
        problem = f"{config.model_type} is an encoder: each token would see the one that it has to predict"
        raise ModelError(problem, "use a causal language model")
    if config.model_type in SEEING_AHEAD:
        problem = f"{config.model_type} reads later tokens too, so it would see what it has to predict"
        raise ModelError(problem, "use a causal language model")
    if config.model_type in _DRAFTING:
        problem = f"{config.model_type} only drafts tokens for another model, whose hidden states it reads"
        raise ModelError(problem, "name the model that it drafts for")


def prove_loadable(folder: Path, tuning: Tuning | None, name: str, base: Path) -> LoadProof:
    """Raises what a worker would raise. `name` is recorded as the base of an adapter; `base` is the folder that the
    path of an adapter to continue from is relative to. `tuning` is None for a model that is not trained."""
    try:
        return _proved(folder, tuning, name, base)
    except ModelError as error:
        if isinstance(error.__context__, ImportError):
            raise MissingPackage(error.problem, error.remedy) from None
        raise


def _proved(folder: Path, tuning: Tuning | None, name: str, base: Path) -> LoadProof:
    values = read_config(folder)
    require_known_type(values)
    with reading_model(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder)
    require_causal(config)
    packed = packed_weights(values)
    if tuning is not None:
        require_trainable(packed, tuning)
    names = find_weight_files(folder)
    if names != (WEIGHTS,):
        with reading_model(folder / INDEX, FETCH_AGAIN):
            get_checkpoint_shard_files(str(folder), str(folder / INDEX))
    files = [read_weight_file(folder / file) for file in names]
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    dense = {} if packed is None else _unpacked(folder, files, packed)
    parts = tuple(f"{name}." for name in dense) + tuple(f"{name}_format" for name in dense)
    scales = {f"{name.removesuffix('weight')}SCB" for name in dense}
    plain = {name: tensor for name, tensor in stored.items() if name not in scales and not name.startswith(parts)}
    model = _load_headers(folder, config, plain | dense)
    if packed is not None and len(dense) != (expected := len(packed_layers(model, packed))):
        what = (
            f"its quantization_config describes {expected} layers in {packed.bits} bits, the weights have {len(dense)}"
        )
        raise ModelError(f"{folder}: {what}", "take config.json and weights from the same model")
    if (folder / "generation_config.json").is_file():
        with reading_model(folder / "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    if tuning is not None:
        with torch.device("meta"):
            trained = make_trainable(model, tuning, name=name)
        if isinstance(tuning, Lora) and tuning.adapter is not None:
            require_fitting_adapter(trained, base / tuning.adapter)
        if isinstance(tuning, Subset):
            frozen_weights_of(trained, folder)
    return LoadProof(num_tensors=sum(len(file.tensors) for file in files))


def _unpacked(folder: Path, files: Iterable[WeightFile], packed: PackedWeights) -> dict[str, Tensor]:
    """The headers that packed weights would have without packing. bitsandbytes stores the scales of 8-bit weights as
    SCB beside the weight; for 4 bits it stores the shape of the weight, in JSON, too."""
    found: dict[str, Tensor] = {}
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    mark = "SCB" if packed.bits == 8 else f"weight.quant_state.bitsandbytes__{packed.kind}"
    holders = {name: file for file in files for name in file.tensors if name.endswith(f".{mark}")}
    for name, holder in holders.items():
        weight = f"{name.removesuffix(mark)}weight"
        if weight not in stored:
            raise ModelError(
                f"{folder} has no weights for {weight}", "the model's files are incomplete; download it again"
            )
        shape, is_whole = stored[weight].shape, stored[weight].dtype == "I8"
        if packed.bits == 4:
            with reading_model(f"{holder.path}: {name}"):
                shape = tuple(map(int, read_stored_json(holder, name)["shape"]))
            is_whole = stored[weight].dtype == "U8" and prod(stored[weight].shape) == -(-prod(shape) // 2)
            is_whole &= {f"{weight}.absmax", f"{weight}.quant_map"} <= stored.keys()
        if not is_whole:
            problem = f"{folder}: {weight} is not {packed.kind} of the shape {list(shape)} with its scales"
            raise ModelError(problem, RESTORE)
        found[weight] = Tensor(dtype="BF16", shape=shape, data_offsets=(0, 0))
    return found


def _load_headers(folder: Path, config: PretrainedConfig, stored: Mapping[str, Tensor]) -> PreTrainedModel:
    dtypes = _FLOATS | _INTEGERS
    if packed := [name for name, tensor in stored.items() if tensor.dtype not in dtypes]:
        problem = f"{folder}: {_few(packed)} is stored as {stored[packed[0]].dtype}, but its config has no "
        raise ModelError(f"{problem}quantization_config", "take the config.json that belongs to these weights")
    tensors = {name: torch.empty(t.shape, dtype=dtypes[t.dtype], device="meta") for name, t in stored.items()}
    with reading_model(folder), torch.device("meta"):
        config.__dict__.pop("quantization_config", None)  # the tensors stand for unpacked ones
        built = auto_class(config).from_config(config)
        model, report = type(built).from_pretrained(
            None,
            config=built.config,  # of its language model alone, where the model's own also describes others
            state_dict=tensors,
            device_map={"": "meta"},
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if missing := sorted(report["missing_keys"]):
        problem = f"{folder} has no weights for {_few(missing)}"
        raise ModelError(problem, "the model's files are incomplete; download it again")
    if odd := sorted(report["mismatched_keys"], key=str):
        name, theirs, ours = odd[0]
        what = f"{name} has the shape {list(theirs)} in the weights and {list(ours)} by config.json"
        problem = f"{folder}: the weights are not those that its config describes: {what}"
        raise ModelError(problem, "take config.json and weights from the same model")
    parameters = {name for name, _ in model.named_parameters()}
    if whole := [name for name, tensor in stored.items() if name in parameters and tensor.dtype not in _FLOATS]:
        problem = f"{folder}: {_few(whole)} is stored as {stored[whole[0]].dtype}, which is not a dtype of weights"
        raise ModelError(problem, RESTORE)
    found: PreTrainedModel = model
    return found


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(islice(names, _SHOWN)) + more
