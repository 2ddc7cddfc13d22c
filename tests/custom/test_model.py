"""Models of a user's own: built by their file, adapted where it allows, saved and put back, and told by file and line
where they fail."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from finefit.custom.model import (
    CustomFamily,
    build_custom,
    custom_family_of,
    load_custom,
    load_custom_for_answers,
    load_custom_weights,
)
from finefit.errors import ModelError, SpecError
from finefit.model.family import save_weights
from finefit.model.load import counts, make_trainable
from finefit.model.resolve_model import (
    custom_fingerprint,
    custom_source,
    custom_source_in,
    read_stub,
    resolve_model,
    weight_files,
)
from finefit.model.saved_weights import restore_weights
from finefit.objective.batch import CustomRow
from finefit.spec.models import CustomModel, FolderModel, Full, Lora, Subset
from tests.conftest import make_tokenizer
from tests.custom_models import CODE, CONFIG

TIED = CODE.replace(
    "dropped\n        self.layers", "dropped\n        self.head.weight = self.words.weight\n        self.layers"
)


def make_own(folder: Path, code: str = CODE, **changes: Any) -> CustomModel:
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    return CustomModel(
        kind="custom",
        file="my_model.py",
        config=CONFIG,
        tokenizer=FolderModel(kind="folder", path="tokenizer"),
        **changes,
    )


def loaded(folder: Path, code: str = CODE, *, seed: int = 3) -> nn.Module:
    return load_custom(make_own(folder, code), folder, device="cpu", dtype=torch.float32, seed=seed)


def own(model: nn.Module) -> CustomFamily:
    found = custom_family_of(model)
    assert found is not None
    return found


def rows(count: int = 1, length: int = 6) -> list[CustomRow]:
    supervised = np.arange(length) >= 3
    return [CustomRow(tokens=np.arange(at, at + length), supervised=supervised, seed=at) for at in range(count)]


# building


def test_weights_are_drawn_by_the_seed_alone_and_the_callers_random_numbers_go_on(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = loaded(tmp_path)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    torch.manual_seed(2)
    again, other = loaded(tmp_path), loaded(tmp_path, seed=4)
    assert torch.equal(first.get_parameter("head.weight"), again.get_parameter("head.weight"))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))


def test_a_twin_on_the_meta_device_makes_the_same_inputs_as_the_model(tmp_path: Path) -> None:
    model = own(loaded(tmp_path))
    twin = own(build_custom(custom_source(make_own(tmp_path), tmp_path), device="meta"))
    assert all(p.is_meta for p in twin.module.parameters())
    here, there = model.inputs(rows(3)), twin.inputs(rows(3))
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert (model.count(here), twin.count(there)) == (9, 9)


def test_parameters_are_kept_in_halves_and_buffers_as_the_file_makes_them(tmp_path: Path) -> None:
    code = CODE.replace("self.layers = ", "self.register_buffer('turns', torch.arange(4) / 3)\n        self.layers = ")
    model = load_custom(make_own(tmp_path, code), tmp_path, device="cpu", dtype=torch.bfloat16, seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_buffer("turns").dtype == torch.float32


def test_a_config_stands_for_the_file_and_leads_back_to_it(tmp_path: Path) -> None:
    found = custom_source(make_own(tmp_path), tmp_path)
    assert custom_source_in(found.as_config()) == found
    assert found.as_config()["vocab_size"] == CONFIG["vocab_size"]
    assert custom_source_in({"model_type": "llama"}) is None
    assert found.notice == f"runs code of yours: my_model.py (sha256 {found.sha256[:12]})"


def test_a_file_that_changed_since_it_was_looked_at_is_not_run(tmp_path: Path) -> None:
    found = custom_source(make_own(tmp_path), tmp_path)
    make_own(tmp_path, CODE + "\n# more\n")
    with pytest.raises(ModelError, match=r"my_model.py has changed while it was being used"):
        build_custom(found, device="meta")


def test_the_model_is_known_by_code_config_tokenizer_and_weights(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    first = resolve_model(make_own(tmp_path), tmp_path).fingerprint
    assert resolve_model(make_own(tmp_path), tmp_path).fingerprint == first
    others = [
        resolve_model(make_own(tmp_path).model_copy(update={"config": CONFIG | {"width": 8}}), tmp_path).fingerprint,
        resolve_model(make_own(tmp_path).model_copy(update={"entry": "Speaker"}), tmp_path).fingerprint,
        *(resolve_model(make_own(tmp_path, weights=f"{name}.safetensors"), tmp_path).fingerprint for name in "ab"),
        resolve_model(make_own(tmp_path, CODE + "# more"), tmp_path).fingerprint,
    ]
    make_tokenizer(chat=False).save_pretrained(tmp_path / "other")
    others.append(custom_fingerprint(custom_source(make_own(tmp_path), tmp_path), tmp_path / "other", None))
    assert len({first, *others}) == 7


def test_an_outline_needs_neither_weights_nor_a_run_of_the_file(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    known = read_stub(make_own(tmp_path, "raise SystemExit(7)", weights="not there"), tmp_path)
    assert known.tokenizer == tmp_path / "tokenizer"
    assert known.config["model_type"] == "finefit_custom"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.file: there is no file my_model.py"):
        custom_source(
            CustomModel(kind="custom", file="my_model.py", tokenizer=FolderModel(kind="folder", path="t")), tmp_path
        )
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ModelError, match=r"model.tokenizer: .* holds no tokenizer"):
        resolve_model(make_own(tmp_path), tmp_path)
    with pytest.raises(ModelError, match=r"model.weights: there is nothing at"):
        weight_files(tmp_path / "none")


# what goes wrong in the file

_LAYERS = "        self.layers = "
_BUILD = "return Speaker(**config)"
FAULTS = {
    "syntax": ("def build(config:\n    pass", r"my_model.py:1 failed in import: SyntaxError"),
    "import": ("import torch\nimport no_such_package\n", r"my_model.py:2 failed in import: ModuleNotFoundError"),
    "entry": (CODE.replace("def build(", "def make("), r"model.entry: my_model.py has no function build; it has make"),
    "signature": (
        CODE.replace("def build(config)", "def build(config, more)"),
        r"\(config, more\), .* one argument",
    ),
    "no_module": ("def build(config):\n    return 3", r"my_model.py has a build that returned 3; return an nn.Module"),
    "raises": (
        "def build(config):\n    return config['no']",
        r"y:2 failed in build\(config\): KeyError: 'no'",
    ),
    "card": (CODE.replace(_BUILD, f"{_BUILD}.cuda()"), r"my_model.py:\d+ failed in build"),
    "members": (
        "from torch import nn\ndef build(config):\n    return nn.Linear(2, 2)",
        r"no inputs; it has no count; it has no loss; it has no adaptable",
    ),
    "arguments": (
        CODE.replace("def loss(self, inputs)", "def loss(self, inputs, more)"),
        r"loss\(inputs, more\) is called",
    ),
    "lost": (CODE.replace('("qkv", "out")', '("qkv", "gone")'), r"adaptable names blocks.0.gone, blocks.1.gone, and"),
    "no_linear": (CODE.replace('("qkv", "out")', '("qkv", "norm")'), r"adaptable names blocks.0.norm, a LayerNorm"),
    "item": (CODE.replace(_BUILD, f"{_BUILD} if torch.ones(1).item() else 0"), r"my_model.py:\d+ failed in build"),
    "towers": (
        CODE.replace(_LAYERS, f"        self.towers = {{'vision': ('gone',)}}\n{_LAYERS}"),
        r"towers names gone, and",
    ),
    "views": (CODE.replace(_LAYERS, f"        self.views = 'two'\n{_LAYERS}"), r"views is 'two': a number of images"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_file_is_told_by_name_and_line(fault: str, tmp_path: Path) -> None:
    code, words = FAULTS[fault]
    assert code != CODE
    with pytest.raises(SpecError if fault == "entry" else ModelError, match=words) as told:
        build_custom(custom_source(make_own(tmp_path, code), tmp_path), device="meta")
    assert told.value.remedy


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [("card", "build and inputs run without a GPU"), ("item", "a rehearsal has shapes but no values")],
)
def test_what_asks_for_a_card_or_a_value_is_told_that_there_is_none(fault: str, remedy: str, tmp_path: Path) -> None:
    if fault == "card" and torch.cuda.is_available():
        pytest.skip("a card is here")
    with pytest.raises(ModelError) as told:
        build_custom(custom_source(make_own(tmp_path, FAULTS[fault][0]), tmp_path), device="meta")
    assert told.value.remedy.startswith(remedy)


INPUTS = {
    "return 3": r"has an inputs that returned 3; return a dict of tensors",
    "return {}": r"has an inputs that returned {}; return a dict of tensors",
    "return {'x': [1]}": r"return a dict of tensors",
    "return {'x': torch.ones(1, requires_grad=True)}": r"has an inputs whose x requires a gradient",
    "return {'x': torch.ones(1, device='meta')}": r"has an inputs whose x is on meta",
    "return rows[9]": r"my_model.py:\d+ failed in inputs: IndexError",
    "return {'x': torch.ones(1).cuda()}": r"my_model.py:\d+ failed in inputs",
}


@pytest.mark.parametrize("statement", INPUTS)
def test_inputs_that_cannot_be_taken_are_refused(statement: str, tmp_path: Path) -> None:
    begin = "    def inputs(self, rows):\n"
    model = own(loaded(tmp_path, CODE.replace(begin, f"{begin}        {statement}\n")))
    with pytest.raises(ModelError, match=INPUTS[statement]):
        model.inputs(rows())


@pytest.mark.parametrize("given", ["0", "-1", "1.0", "True", "inputs['ids'].sum()"])
def test_a_count_is_a_whole_number_of_at_least_one(given: str, tmp_path: Path) -> None:
    counted = "        return int((inputs"
    model = own(loaded(tmp_path, CODE.replace(counted, f"        return {given}\n{counted}")))
    with pytest.raises(
        ModelError, match=r"my_model.py has a count that returned .*; return a whole number of at least 1"
    ):
        model.count(model.inputs(rows()))


def _returning(given: str) -> str:
    """The code with this in place of its loss, `total`."""
    code = CODE.replace("        return cross_entropy(", "        total = cross_entropy(")
    return code.replace('reduction="sum")', f'reduction="sum")\n        return {given}')


RETURNS = [
    "total, {'more': object()}",
    "{'loss': total, 'hidden': object()}",
    "type('Output', (), {'loss': total, 'logits': object()})()",
    "[total]",
]


@pytest.mark.parametrize("given", RETURNS)
def test_of_all_that_a_model_returns_the_sum_alone_is_taken(given: str, tmp_path: Path) -> None:
    plain, model = own(loaded(tmp_path)), own(loaded(tmp_path, _returning(given)))
    inputs = model.inputs(rows(2))
    found = model.loss(inputs)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, plain.loss(inputs))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("3.0", r"has a loss that returned 3.0; return a tensor"),
        ("{'total': total}", r"has a loss that returned .*; return a tensor"),
        ("()", r"has a loss that returned \(\)"),
        ("total.repeat(2)", r"has a loss of shape \(2,\)"),
        ("total.long()", r"has a loss of shape \(\) in torch.int64"),
    ],
)
def test_a_loss_is_a_scalar(given: str, words: str, tmp_path: Path) -> None:
    model = own(loaded(tmp_path, _returning(given)))
    with pytest.raises(ModelError, match=words):
        model.loss(model.inputs(rows()))


@pytest.mark.parametrize("given", ["3", "[[1]]", "[[1], [2], [3]]", "[['a'], ['b']]", "[torch.ones(1), [2]]"])
def test_answers_are_lists_of_tokens_one_for_each_row(given: str, tmp_path: Path) -> None:
    begin = "        answers = []\n"
    model = own(loaded(tmp_path, CODE.replace(begin, f"        return {given}\n{begin}")))
    with pytest.raises(ModelError, match=r"has a generate that returned .* for 2 rows"):
        model.generate({}, rows=2, max_new_tokens=4, stops=frozenset())


# adapters


def targets(model: nn.Module) -> set[str]:
    return {
        name.partition(".lora_")[0].removeprefix("base_model.model.")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def test_adapters_go_to_the_adaptable_layers_and_no_others(tmp_path: Path) -> None:
    every = {f"blocks.{at}.{name}" for at in (0, 1) for name in ("qkv", "out")}
    for asked, chosen in (
        ("all-linear", every),
        (("out",), {"blocks.0.out", "blocks.1.out"}),
        (("blocks.1.qkv",), {"blocks.1.qkv"}),
    ):
        model = make_trainable(loaded(tmp_path), Lora(kind="lora", rank=2, targets=asked), name="m")  # type: ignore[arg-type]
        assert targets(model) == chosen
        assert custom_family_of(model) is not None
    for odd in ("head", "ut", "blocks"):  # not adaptable, part of a name, and what others lie in
        with pytest.raises(
            ModelError, match=rf"tuning.targets: {odd} matches none of the layers that my_model.py calls adaptable"
        ):
            make_trainable(loaded(tmp_path), Lora(kind="lora", targets=(odd,)), name="m")


def test_layers_may_be_named_by_tower(tmp_path: Path) -> None:
    code = CODE.replace(
        "        self.layers = ",
        "        self.towers = {'vision': ('blocks.0',), 'language': ('blocks.1', 'head')}\n        self.layers = ",
    )
    asked = Lora(kind="lora", rank=2, targets={"vision": ("qkv",), "language": "all-linear"})
    assert targets(make_trainable(loaded(tmp_path, code), asked, name="m")) == {
        "blocks.0.qkv",
        "blocks.1.qkv",
        "blocks.1.out",
    }
    with pytest.raises(ModelError, match=r"tuning.targets names the tower projector; my_model.py has vision, language"):
        make_trainable(loaded(tmp_path, code), Lora(kind="lora", targets={"projector": "all-linear"}), name="m")
    with pytest.raises(ModelError, match=r"tuning.targets.vision: gate matches none"):
        make_trainable(loaded(tmp_path, code), Lora(kind="lora", targets={"vision": ("gate",)}), name="m")


# weights


@pytest.mark.parametrize("code", [CODE, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize(
    "tuning",
    [Lora(kind="lora", rank=2), Full(kind="full"), Subset(kind="subset", trainable=("blocks.*.out",))],
    ids=lambda t: t.kind,
)
def test_a_checkpoint_puts_the_model_back_bit_for_bit(code: str, tuning: Any, tmp_path: Path) -> None:
    model = make_trainable(loaded(tmp_path, code), tuning, name="m")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * parameter.requires_grad)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(model, folder)
    again = make_trainable(loaded(tmp_path, code), tuning, name="m")
    restore_weights(again, folder)
    answering = load_custom_for_answers(
        make_own(tmp_path, code), tmp_path, folder, device="cpu", dtype=torch.float32, seed=3
    )
    inputs = own(model).inputs(rows(2))
    model.eval()
    expected = own(model).loss(inputs)
    assert torch.equal(own(again.eval()).loss(inputs), expected)
    assert torch.equal(own(answering).loss(inputs), expected)
    assert not torch.equal(own(loaded(tmp_path, code)).loss(inputs), expected)
    assert counts(model).total == counts(again).total


def test_weights_are_taken_by_name_and_shape_or_refused_by_them(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    save_weights(make_trainable(model, Full(kind="full"), name="m"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    other = loaded(tmp_path, seed=9)
    load_custom_weights(other, tmp_path / "model.safetensors")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    for changed, words in (
        ({**stored, "more": torch.ones(1)}, r"holds more, which the model does not have"),
        ({name: tensor for name, tensor in stored.items() if name != "head.bias"}, r"lacks head.bias"),
        ({**stored, "head.bias": torch.ones(3)}, r"head.bias is \(3,\) there and \(260,\) in the model"),
    ):
        save_file(changed, tmp_path / "odd.safetensors")
        with pytest.raises(ModelError, match=words):
            load_custom_weights(other, tmp_path / "odd.safetensors")
    (tmp_path / "odd.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"cannot be read"):
        load_custom_weights(other, tmp_path / "odd.safetensors")
