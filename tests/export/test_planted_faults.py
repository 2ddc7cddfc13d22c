"""What goes wrong in exports elsewhere, planted in a merged folder: each is found before anything is published."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finefit.errors import FindingError
from finefit.export import merged, proof, transformers_outputs
from finefit.export.make import export
from finefit.export.merged import merge_base, write_merged_folder
from finefit.export.structure import adapter_problems, folder_problems
from finefit.export.subject import ExportSubject, make_probe, open_subject
from finefit.spec.exports import ExportFormat
from tests.conftest import make_tokenizer
from tests.merged_models import make_family, save_adapter
from tests.mixtures import make_mixture

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*tie_word_embeddings", "ignore:(?s).*no longer tied")
CPU = proof.Compute(device="cpu", dtype="fp32")
WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Exported:
    """A merged folder that was made rightly, and everything to spoil it with."""

    subject: ExportSubject
    folder: Path
    precision: str = "fp32"
    onto: str = "original"

    @property
    def base(self) -> Path:
        return self.subject.base

    def problems(self) -> list[str]:
        base = merge_base(self.subject, self.onto, self.folder.parent)
        return list(folder_problems(self.subject, self.folder, base, self.precision))

    def beyond(self) -> list[str]:
        """By what another program computes."""
        probe = make_probe(self.subject, 4)
        trained = proof.trained_outputs(self.subject, probe, CPU)
        model = transformers_outputs.load(self.folder, device="cpu", dtype="fp32", base=None, bits=None)
        said = transformers_outputs.outputs_of(model, probe, device="cpu", stops=probe.stop_tokens)
        return proof.beyond(proof.measure(trained, said), proof.bound_of(ExportFormat("merged", self.precision), CPU))


def save_base(folder: Path, kind: str) -> Path:
    model = make_mixture("qwen3", num_experts=3) if kind == "mixture" else make_family("llama", **TIES[kind])
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


TIES = {"untied": {"tie_word_embeddings": False}, "tied": {"tie_word_embeddings": True}}
ADAPTERS: dict[str, dict[str, Any]] = {
    "untied": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "tied": {"target_modules": ["q_proj", "v_proj"]},
    "mixture": {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    made: dict[str, Exported] = {}

    def get(kind: str) -> Exported:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            base = save_base(place / "base", kind)
            adapter = save_adapter(place / "adapter", base, **ADAPTERS[kind])
            make_tokenizer().save_pretrained(adapter)
            subject = open_subject(str(adapter))
            write_merged_folder(subject, merge_base(subject, "original", place), place / "merged", "fp32")
            made[kind] = Exported(subject, place / "merged")
        return made[kind]

    return get


def copy_of(pristine: Exported, place: Path) -> Exported:
    shutil.copytree(pristine.folder, place / "merged")
    return replace(pristine, folder=place / "merged")


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rewrite_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**values, **changes}))


def from_base(exported: Exported, *parts: str) -> None:
    """Tensors with these words in their names are the base's."""
    before = load_file(exported.base / WEIGHTS)
    assert any(part in name for part in parts for name in before)
    rewrite(
        exported.folder, lambda tensors: tensors.update({n: t for n, t in before.items() if any(p in n for p in parts)})
    )


def without(*parts: str) -> Callable[[Exported], None]:
    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if any(part in name for part in parts)]
        assert gone
        for name in gone:
            del tensors[name]

    return lambda exported: rewrite(exported.folder, change)


def merged_from(**config: Any) -> Callable[[Exported], None]:
    """The adapter read with other settings."""

    def spoil(exported: Exported) -> None:
        adapter = exported.folder.parent / "misread"
        assert exported.subject.adapter is not None
        shutil.copytree(exported.subject.adapter, adapter)
        rewrite_json(adapter / "adapter_config.json", **config)
        other = replace(exported.subject, adapter=adapter)
        base = merge_base(exported.subject, "original", exported.folder.parent)
        write_merged_folder(other, base, exported.folder, exported.precision)

    return spoil


def twice(exported: Exported) -> None:
    before = load_file(exported.base / WEIGHTS)
    rewrite(
        exported.folder, lambda found: found.update({n: 2 * t - before[n] for n, t in found.items() if "_proj" in n})
    )


def swapped(tensors: Tensors) -> None:
    names = ("model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.down_proj.weight")
    for name in names:
        one, other = name.format(0), name.format(1)
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def untied(exported: Exported) -> None:
    rewrite(exported.folder, lambda found: found.update({"lm_head.weight": torch.randn(261, 32) / 5}))
    rewrite_json(exported.folder / "config.json", tie_word_embeddings=False)


def other_vocabulary(exported: Exported) -> None:
    path = exported.folder / "tokenizer.json"
    values = json.loads(path.read_text())
    words = values["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(values))


def cut(exported: Exported) -> None:
    path = exported.folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def in_half(exported: Exported) -> None:
    rewrite(exported.folder, lambda found: found.update({name: t.half() for name, t in found.items()}))


def spoil_text(exported: Exported) -> None:
    path = exported.folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|user|>", "<|system|>") + " ")


def not_finite(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")


def scaled_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] *= 1.5


def in_config(**changes: Any) -> Callable[[Exported], None]:
    return lambda exported: rewrite_json(exported.folder / "config.json", **changes)


def in_generation_config(**changes: Any) -> Callable[[Exported], None]:
    return lambda exported: rewrite_json(exported.folder / "generation_config.json", **changes)


def removed(name: str) -> Callable[[Exported], None]:
    return lambda exported: (exported.folder / name).unlink()


def changed(change: Callable[[Tensors], None]) -> Callable[[Exported], None]:
    return lambda exported: rewrite(exported.folder, change)


FAULTS: dict[str, tuple[str, Callable[[Exported], None], bool]] = {
    "a missing expert": ("mixture", without("experts.1."), False),
    "an expert left as the base's": ("mixture", lambda e: from_base(e, "experts.1."), True),
    "all experts left as the base's": ("mixture", lambda e: from_base(e, ".experts."), True),
    "a dropped head": ("untied", without("lm_head"), False),
    "a trained head left as the base's": ("untied", lambda e: from_base(e, "lm_head"), True),
    "an adapter that is not merged": ("untied", lambda e: from_base(e, "_proj", "lm_head"), True),
    "an adapter that is merged twice": ("untied", twice, True),
    "another alpha": ("untied", merged_from(lora_alpha=16), True),
    "another scaling": ("untied", merged_from(use_rslora=True), True),
    "a layer without its delta": ("untied", lambda e: from_base(e, "layers.1.self_attn.q_proj"), True),
    "swapped layers": ("untied", changed(swapped), True),
    "a tied head untied": ("tied", untied, True),
    "a trained head tied": ("untied", in_config(tie_word_embeddings=True), False),
    "another template": ("untied", spoil_text, False),
    "another end of a turn": ("untied", in_generation_config(eos_token_id=7), False),
    "no stop tokens": ("untied", removed("generation_config.json"), False),
    "another vocabulary": ("untied", other_vocabulary, False),
    "no tokenizer": ("untied", removed("tokenizer.json"), False),
    "another precision": ("untied", in_half, False),
    "a cut file of weights": ("untied", cut, False),
    "another rope_theta": ("untied", in_config(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}), True),
    "a quantization_config": ("untied", in_config(quantization_config={"quant_method": "bitsandbytes"}), False),
    "values that are not numbers": ("untied", changed(not_finite), True),
    "a frozen tensor that is not the base's": ("untied", changed(scaled_norm), True),
}
"""The model, what is done to it, and whether another program computes something else then."""


@pytest.mark.parametrize("kind", ADAPTERS)
def test_what_was_made_rightly_has_no_fault(kind: str, pristine: Callable[[str], Exported]) -> None:
    assert pristine(kind).problems() == []
    assert pristine(kind).beyond() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, pristine: Callable[[str], Exported], tmp_path: Path) -> None:
    kind, spoil, _ = FAULTS[fault]
    exported = copy_of(pristine(kind), tmp_path)
    spoil(exported)
    assert exported.problems()


@pytest.mark.parametrize("fault", [name for name, (_, _, computes) in FAULTS.items() if computes])
def test_what_another_program_computes_shows_the_fault_alone(
    fault: str, pristine: Callable[[str], Exported], tmp_path: Path
) -> None:
    kind, spoil, _ = FAULTS[fault]
    exported = copy_of(pristine(kind), tmp_path)
    spoil(exported)
    assert exported.beyond()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_with_a_planted_fault_is_not_published(
    fault: str, pristine: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, spoil, _ = FAULTS[fault]

    def write(subject: ExportSubject, base: merged.MergeBase, out: Path, precision: str) -> None:
        write_merged_folder(subject, base, out, precision)
        spoil(Exported(subject, out, precision))

    monkeypatch.setattr(merged, "write_merged_folder", write)
    with pytest.raises(FindingError) as refused:
        export(pristine(kind).subject, [ExportFormat("merged", "fp32")], tmp_path / "out", prompts=1)
    assert refused.value.exit_code == 1
    assert "not the model that was trained" in refused.value.problem
    assert not {"out", ".staging-out"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("silent", ["original", "trained"])
def test_weights_in_4_bits_are_merged_onto_what_is_said(silent: str, tmp_path: Path) -> None:
    """Onto one form of the base, and proved as if onto the other."""
    pytest.importorskip("bitsandbytes")
    base = save_base(tmp_path / "base", "untied")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    make_tokenizer().save_pretrained(adapter)
    subject = replace(open_subject(str(adapter)), bits=4)
    write_merged_folder(subject, merge_base(subject, silent, tmp_path), tmp_path / "merged", "fp32")
    assert Exported(subject, tmp_path / "merged", onto=silent).problems() == []
    said = "trained" if silent == "original" else "original"
    assert Exported(subject, tmp_path / "merged", onto=said).problems()


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"])
def test_a_copied_adapter_is_that_of_the_training(
    file: str, pristine: Callable[[str], Exported], tmp_path: Path
) -> None:
    subject = pristine("untied").subject
    assert subject.adapter is not None
    shutil.copytree(subject.adapter, tmp_path / "copied")
    assert list(adapter_problems(subject, tmp_path / "copied")) == []
    content = (tmp_path / "copied" / file).read_bytes()
    (tmp_path / "copied" / file).write_bytes(content[:-20] + bytes(20))
    assert list(adapter_problems(subject, tmp_path / "copied"))
