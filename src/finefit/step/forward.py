"""Binds a model into the `Forward` that objectives call: log-probabilities of the supervised tokens.

The backbone runs once; only the supervised positions of its output reach the head. The model's own code after the
backbone (head, scaling, soft-capping) computes the logits, all at once or chunk by chunk: it is called with a stand-in
that returns the backbone's output. N supervised positions of B x T, H hidden, V vocabulary.

The objective is bound here too: training and rehearsal get it from `make_objective`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.records import Levers
from finefit.errors import ModelError, SpecError
from finefit.model.adapter import as_reference, freeze_reference
from finefit.model.attention import backbone_name, run_backbone
from finefit.model.experts import product_dtype, record_routing, routers_of, top_k_of
from finefit.model.family import Watch, family_of
from finefit.objective import losses
from finefit.objective.batch import Batch, Forward, Objective
from finefit.spec import schema
from finefit.spec.models import Lora, Tuning
from finefit.step.fused import FusedKernels
from finefit.vision import vision_forward_in, without_adapter


def bind(
    model: nn.Module,
    *,
    loss_chunk: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    is_fused: bool = False,
    kernels: FusedKernels | None = None,
    watch: Watch = lambda call: call,
) -> Forward:
    """`loss_chunk` is the number of supervised tokens that have logits at a time; None means all at once. Chunks are
    recomputed in backward; if the loss is fused and the head is frozen, their gradients are computed at once
    instead."""
    if (own := family_of(model).own_forward(autocast, watch)) is not None:
        return own
    causal = without_adapter(model)
    if backbone_name(causal) is None:
        problem = f"{type(causal).__name__} has no backbone below its head"
        raise ModelError(problem, "finefit trains transformers' causal language models")
    has_vision = vision_forward_in(causal) is not None
    context, run = autocast or nullcontext(), watch(run_backbone)
    heads: list[nn.Linear | None] = [] if is_fused else [None]

    def logits(hidden_NH: Tensor, answer: Callable[..., Any]) -> Tensor:
        return logits_after(causal, hidden_NH.unsqueeze(0), answer).squeeze(0)

    def logprobs(hidden_NH: Tensor, targets_N: Tensor, answer: Callable[..., Any]) -> Tensor:
        return -cross_entropy(logits(hidden_NH, answer).to(torch.float32), targets_N, reduction="none")

    def answered(batch: Batch) -> Tensor:
        with context:
            output = run(causal, batch)
            hidden_NH = output.last_hidden_state.flatten(0, 1).index_select(0, batch.positions_N)
            kind: Callable[..., Any] = _LanguageOutput if has_vision else type(output)
            answer = partial(kind, **{name: value for name, value in output.items() if name != "last_hidden_state"})
            del output
            if not heads:
                heads.append(_plain_head(causal, lambda hidden: logits(hidden, answer)))
            if (head := heads[0]) is not None:
                size = loss_chunk or batch.num_supervised
                return head_logprobs(hidden_NH, head, batch.targets_N, chunk=size, kernels=kernels)
            if loss_chunk is None:
                return logprobs(hidden_NH, batch.targets_N, answer)
            chunks = zip(torch.split(hidden_NH, loss_chunk), torch.split(batch.targets_N, loss_chunk), strict=True)
            return torch.cat([checkpoint(logprobs, *chunk, answer, use_reentrant=False) for chunk in chunks])

    def forward(batch: Batch) -> Tensor:
        found = answered(batch)
        # rows without images, where only vision towers are trained
        if has_vision and torch.is_grad_enabled() and not found.requires_grad:
            return found + torch.zeros((), device=found.device, requires_grad=True)
        return found

    return forward


def _plain_head(causal: nn.Module, logits: Callable[[Tensor], Tensor]) -> nn.Linear | None:
    """The head, if it is frozen and a probe's autograd graph shows that logits are its product and nothing else."""
    head = causal.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None or head.weight.requires_grad:
        return None
    probe_1H = torch.zeros(1, head.in_features, dtype=head.weight.dtype, device=head.weight.device, requires_grad=True)
    with torch.enable_grad():
        nodes = _nodes(logits(probe_1H).grad_fn)
    return head if nodes & _PRODUCTS and nodes <= _PRODUCTS | _VIEWS else None


_PRODUCTS = {"MmBackward0", "LinearBackward0"}
_VIEWS = {
    *("ViewBackward0", "UnsafeViewBackward0", "TBackward0", "SliceBackward0"),
    *("SqueezeBackward1", "UnsqueezeBackward0", "AliasBackward0", "AccumulateGrad"),
}
"""Autograd nodes between hidden states and logits that change no number."""


def _nodes(last: Any) -> set[str]:
    """Names of all autograd nodes that produced a tensor."""
    seen: dict[Any, None] = {}
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [before for before, _ in node.next_functions]
    return {node.name().rsplit("::", 1)[-1] for node in seen}


class _LanguageOutput:
    """The language tower's output in place of the backbone's; fields that only the backbone adds are None."""

    def __init__(self, **answered: Any) -> None:
        self._answered: Mapping[str, Any] = answered

    def __getattr__(self, name: str) -> Any:
        return self._answered.get(name)

    def __getitem__(self, _: int) -> Any:
        return self._answered["last_hidden_state"]


class _FixedOutput(nn.Module):
    """Takes the backbone's place and keeps its other attributes: Falcon-H1 scales its logits by one of them."""

    def __init__(self, output: Any, backbone: nn.Module) -> None:
        super().__init__()
        self.output = output
        vars(self)["backbone"] = backbone  # not a part of this module

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["backbone"], name)


def logits_after(causal: nn.Module, hidden_BTH: Tensor, answer: Callable[..., Any] = _LanguageOutput) -> Tensor:
    """The logits that the code after the backbone computes from these hidden states. `answer` wraps them as the
    backbone's output; the default is that of a vision-language model outside training."""
    name = str(backbone_name(causal))
    backbone = getattr(causal, name)
    setattr(causal, name, _FixedOutput(answer(last_hidden_state=hidden_BTH), backbone))
    try:
        found: Tensor = causal(inputs_embeds=hidden_BTH, use_cache=False).logits
    finally:
        setattr(causal, name, backbone)
    return found


def autocast_for(device: str, precision: str, *, with_cache: bool = True) -> AbstractContextManager[Any]:
    """The autocast of a precision; fp16 also needs a loss scale. `with_cache` keeps the cast of a trained weight to the
    end of a forward."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=with_cache)


def keeps_casts(tuning: Tuning, levers: Levers) -> bool:
    """False if full weights are trained and layers are recomputed, because the casts would be a second copy of all
    weights."""
    return isinstance(tuning, Lora) or levers.recompute == 0


def head_logprobs(
    hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor, *, chunk: int, kernels: FusedKernels | None
) -> Tensor:
    """Log-probabilities through a frozen head, with the gradient computed in the same pass: each chunk's logits exist
    once and are never recomputed. A token's log-probability depends on its own hidden state alone, so its derivative is
    kept instead of the logits and multiplied in backward by the weight that the objective gives the token.

    Without gradients the numbers are the same, bit for bit, because a reference is computed as the policy is."""
    if torch.is_grad_enabled() and hidden_NH.requires_grad:
        found: Tensor = _Head.apply(hidden_NH, head.weight, targets_N, chunk, kernels)  # type: ignore[no-untyped-call]
        return found
    with torch.no_grad():
        return _losses(hidden_NH, head.weight, targets_N, chunk, kernels, None).neg_()


def _losses(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    chunk: int,
    kernels: FusedKernels | None,
    derivatives_NH: Tensor | None,
) -> Tensor:
    """Losses, chunk by chunk; fills the derivatives if they are given."""
    dtype = product_dtype(hidden_NH)
    weight = weight_VH.to(dtype)
    cross_entropy_of = _cross_entropy_ if kernels is None else kernels.cross_entropy
    found = []
    for at in range(0, len(targets_N), chunk):
        part = slice(at, at + chunk)
        logits_CV = hidden_NH[part].to(dtype) @ weight.t()
        found.append(cross_entropy_of(logits_CV, targets_N[part]))
        if derivatives_NH is not None and derivatives_NH.dtype == dtype:
            torch.mm(logits_CV, weight, out=derivatives_NH[part])
        elif derivatives_NH is not None:
            derivatives_NH[part] = logits_CV @ weight
        del logits_CV
    return torch.cat(found)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, chunk: int, kernels: FusedKernels | None
    ) -> Tensor:
        derivatives_NH = torch.empty_like(hidden_NH)
        losses_N = _losses(hidden_NH, weight_VH, targets_N, chunk, kernels, derivatives_NH)
        ctx.save_for_backward(derivatives_NH)
        return losses_N.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> Any:
        (derivatives_NH,) = ctx.saved_tensors
        return derivatives_NH.mul_(-gradient_N.unsqueeze(1)), None, None, None, None


def _cross_entropy_(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Losses in fp32; overwrites the logits with their derivatives."""
    scores_CV = logits_CV.to(torch.float32)
    scale_C1 = scores_CV.logsumexp(-1, keepdim=True)
    at_C1 = targets_C.unsqueeze(1)
    losses_C = (scale_C1 - scores_CV.gather(1, at_C1)).squeeze(1)
    scores_CV.sub_(scale_C1).exp_().scatter_add_(1, at_C1, torch.full_like(scale_C1, -1.0))
    if scores_CV is not logits_CV:
        logits_CV.copy_(scores_CV)
    return losses_C


def make_objective(asked: schema.Objective, tuning: Tuning, model: nn.Module, forward: Forward) -> Objective:
    if (own := family_of(model).own_objective()) is not None:
        return own
    match asked:
        case schema.Sft():
            return losses.sft_loss
        case schema.Dpo(beta=beta):
            is_cached = is_reference_cached(asked, tuning)
            reference = losses.reference_from_batch if is_cached else starting_reference(model, forward)
            return losses.DpoLoss(beta=beta, reference=reference)
        case schema.Router(balance=balance):
            return losses.RouterLoss(balance=balance, listen=partial(record_routing, trained_routers(model)))


def trained_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a mixture, or an error that says why they cannot be trained."""
    routers = routers_of(model)
    if not routers:
        name = type(without_adapter(model)).__name__
        problem = f"objective.kind: router, and {name} has no routers: it is not a mixture of experts"
        raise SpecError(problem, "build one with a stage of kind build_moe, or set objective: {kind: sft}")
    # a router without a switch for it makes the weights of the chosen experts sum to one
    if all(top_k_of(router) == 1 and getattr(router, "norm_topk_prob", True) for router in routers.values()):
        problem = (
            "objective.kind: router, and one expert answers each token with weight one, whatever the router says, so "
            "the language-model loss gives the router no gradient"
        )
        raise SpecError(problem, "build the mixture with top_k: 2 or more, or with routing: weighted_sum")
    if not any(router.weight.requires_grad for router in routers.values()):
        name = ".".join(next(iter(routers)).rsplit(".", 2)[-2:])
        raise SpecError(
            f"objective.kind: router, and tuning trains none of the {len(routers)} routers",
            f"set tuning: {{kind: subset, trainable: [{name}]}}, or train all weights with tuning: {{kind: full}}",
        )
    return list(routers.values())


def keep_reference_copy(asked: schema.Objective, tuning: Tuning, model: nn.Module) -> None:
    """Keeps a copy of an adapter that is trained further, before a checkpoint is restored. A new adapter needs none: it
    is disabled for the reference."""
    continues = isinstance(tuning, Lora) and tuning.adapter is not None
    if isinstance(asked, schema.Dpo) and continues and not is_reference_cached(asked, tuning):
        assert isinstance(model, peft.PeftModel)
        freeze_reference(model)


def is_reference_cached(asked: schema.Objective, tuning: Tuning) -> bool:
    """Whether the reference is computed before the first step: by choice, or because training changes the starting
    weights themselves."""
    return isinstance(asked, schema.Dpo) and (asked.reference == "cached" or not isinstance(tuning, Lora))


def starting_reference(model: nn.Module, forward: Forward) -> losses.Reference:
    """The same weights without the trained adapter; there is never a second model."""

    def reference(batch: Batch) -> Tensor:
        with eval_without_grad(model), as_reference(model):
            return losses.sequence_sums(forward(batch), losses.paired_of(batch))

    return reference


@contextmanager
def eval_without_grad(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients within the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
