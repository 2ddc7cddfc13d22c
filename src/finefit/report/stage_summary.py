"""The summaries that finished stages leave in their records, as lines for people."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Summary = Mapping[str, Any]


def summary_lines(kind: str, summary: Summary) -> list[str]:
    """None for a training, which has a result of its own, and for a stage without a summary."""
    lines = _LINES.get(kind)
    return lines(summary) if lines is not None and summary else []


def _compare(summary: Summary) -> list[str]:
    found = [f"{task}: {_difference(one)}" for task, several in summary["tasks"].items() for one in several]
    return [summary["verdict"], *found, *(f"note: {warning}" for warning in summary["warnings"])]


def _difference(found: Summary) -> str:
    value, low, high = (_signed(found[key], found["unit"]) for key in ("value", "low", "high"))
    verdict = "not clear" if not found["is_clear"] else "better" if found["is_better"] else "worse"
    sides = f"{found['second']} against {found['first']}: {found['metric']} {value} ({low} to {high})"
    return f"{sides}, p {found['p']:.2g}, n {found['n']}: {verdict}"


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    return f"{100 * value:+.1f} points" if unit == "share" else f"{value:+.3g}"


def _evaluate(summary: Summary) -> list[str]:
    """Of each task its own metric, which is its first."""
    own = {task: metrics[0] for task, metrics in summary["metrics"].items() if metrics}
    width = max(map(len, summary["models"]))
    return [f"{name:<{width}}  {'; '.join(_scores(found, own))}" for name, found in summary["scores"].items()]


def _scores(found: Summary, own: Mapping[str, Mapping[str, str]]) -> list[str]:
    chosen = [
        ", ".join(f"{count} by {name}" for name, count in scores["answered_by"].items())
        for scores in found.values()
        if "answered_by" in scores
    ]
    return [*(_task_score(task, scores, own.get(task)) for task, scores in found.items()), *dict.fromkeys(chosen)]


def _task_score(task: str, scores: Summary, metric: Mapping[str, str] | None) -> str:
    """Some of lm-eval's metrics have no definition."""
    name, unit = (metric["name"], metric["unit"]) if metric else (next(iter(scores["metrics"])), "number")
    values = (scores["metrics"][name][key] for key in ("value", "low", "high"))
    value, low, high = ("?" if one is None else f"{one:.1%}" if unit == "share" else f"{one:.3g}" for one in values)
    label = name if name.startswith(task) else f"{task} {name}"
    return f"{label} {value} ({low} to {high}, n {scores['n']})"


def _make_pairs(summary: Summary) -> list[str]:
    splits = summary["splits"].items()
    warnings = [f"warning: {name}: {warning}" for name, split in splits for warning in split["warnings"]]
    return [line for name, split in splits for line in _pair_split(name, split)] + warnings


def _pair_split(name: str, split: Summary) -> list[str]:
    unused = split["read"] - split["used"]
    rules = ", ".join(f"{rule} {count['made']}" for rule, count in split["rules"].items())
    made = f"{name}: {split['pairs']:,} pairs of {split['used']:,} of {split['read']:,} rows"
    first = made + (f" ({rules})" if rules else "")
    if split["words_auc"] is not None:
        lengths = ", ".join(f"by the number of {measure} {auc:.2f}" for measure, auc in split["length_auc"].items())
        first += f"; sides are told apart {lengths}, by single words {split['words_auc']:.2f} (0.5 is a guess)"
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in split["unused"].items())
    return [first, f"{name}: {unused:,} rows are in no pair: {reasons}"] if unused else [first]


def _merge_adapter(summary: Summary) -> list[str]:
    size = f"{summary['base']} with its adapter: {summary['parameters']:,} parameters in {summary['dtype']}"
    limit = f"of the logits' spread (at most {summary['tolerance']:g})"
    proof = f"differs from base and adapter by {summary['difference']:.1e} {limit}"
    return [
        f"{size}, {proof}; the adapter itself by {summary['effect']:.1e}",
        "read back in plain transformers: the same logits",
        *(f"warning: {words}" for words in summary["warnings"]),
    ]


def _build_moe(summary: Summary) -> list[str]:
    names, size = summary["experts"], _billions(summary["parameters"])
    copies = [f"{copy} is a copy of {of} and was left out" for copy, of in summary["collapsed"].items()]
    if summary["merge"] == "average":
        return [f"the mean of {', '.join(names)}: {size} parameters, of the base's architecture", *copies]
    experts = f"{len(names)} experts ({', '.join(names)}), {summary['top_k']} answer each token"
    first = f"{experts}: {size} parameters, where the base has {_billions(summary['base_parameters'])}"
    left_out = [
        f"the router starts without {found['rows']} rows of {name}; the first: {found['first']}"
        for name, found in summary.get("left_out", {}).items()
    ]
    return [first, *copies, *_router(summary), *left_out, *_routes(summary), _expert_proof(summary["proof"])]


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


def _router(summary: Summary) -> list[str]:
    if summary["router"] == "select_one":
        return ["every token goes to it: a router could not reach the other experts, so they were left out"]
    if summary["top_k"] == 1:
        frozen = "the language-model loss gives such a router no gradient, so it stays as it starts"
        return [f"one expert answers each token at full weight: {frozen}"]
    return ["the router starts at random: train it"] if summary["router"] == "random" else []


def _routes(summary: Summary) -> list[str]:
    chance = 1 / len(summary["experts"])
    shares = summary.get("own") or summary.get("own_in_base")
    if not shares:
        return []
    each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if not summary.get("own"):
        nearest = f"held-out tokens nearest to their own expert in the base: {each} (by chance {chance:.0%})"
        return [f"{nearest}; {summary['routing']}"]
    means = [statistics.fmean(layer) for layer in zip(*summary["own_by_layer"].values(), strict=True)]
    first = f"held-out tokens whose first choice is their own expert: {each} (by chance {chance:.0%})"
    return [f"{first}; by layer {min(means):.0%} to {max(means):.0%}", "where they go: routing.json, routing.svg"]


def _expert_proof(proof: Mapping[str, float] | str) -> str:
    if isinstance(proof, str):
        return f"the proof that each expert alone answers as before was {proof}"
    sent = "loaded again, with all tokens sent to one expert it answers as that expert"
    return f"{sent}: logits differ by at most {max(proof.values()):.1g}"


def _gate(summary: Summary) -> list[str]:
    accuracy, held, experts = summary["accuracy"], summary["held"], summary["experts"]
    right, most = round(accuracy["value"] * accuracy["n"]), max(held, key=held.__getitem__)
    value, low, high = (_percent(accuracy[key]) for key in ("value", "low", "high"))
    always = f"always {most}: {_percent(held[most] / accuracy['n'])}"
    lines = [f"right for {right} of {accuracy['n']} held-out prompts: {value} ({low} to {high}); {always}"]
    for expert in experts:
        words = ", ".join(map(repr, summary["telling"][expert]))
        own = f"{expert}: {summary['confusion'][expert][expert]} of {held[expert]}"
        lines.append(f"{own}; the tokens that speak most for it: {words}")
    if shared := summary["shared_prompts"]:
        lines.append(f"{shared} prompts are in the rows of several experts; no choice is right for all of them")
    chosen = "one expert for the whole prompt, by which tokens it has"
    return [*lines, f"{chosen}: it sees neither their order nor a hidden state, so it is not a router"]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _python(summary: Summary) -> list[str]:
    return [f"{name}: {size['files']:,} files, {size['bytes']:,} bytes" for name, size in summary["outputs"].items()]


_LINES: dict[str, Callable[[Summary], list[str]]] = {
    "compare": _compare,
    "evaluate": _evaluate,
    "make_pairs": _make_pairs,
    "merge_adapter": _merge_adapter,
    "build_moe": _build_moe,
    "gate": _gate,
    "python": _python,
}
