"""What a finished stage that does not train has recorded of itself, as text."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Summary = Mapping[str, Any]


def summary_lines(kind: str, summary: Summary) -> list[str]:
    """The figures in a finished stage's record, as text. A training has a result of its own instead."""
    lines = _SUMMARY_LINES.get(kind)
    return lines(summary) if lines is not None and summary else []


def _compare_lines(summary: Summary) -> list[str]:
    lines = [summary["verdict"]]
    for task, found in ((task, found) for task, several in summary["tasks"].items() for found in several):
        ends = [found[key] for key in ("value", "low", "high")]
        is_share = found["unit"] == "share"
        value, low, high = (
            "?" if end is None else f"{100 * end:+.1f} points" if is_share else f"{end:+.3g}" for end in ends
        )
        verdict = "not clear" if not found["is_clear"] else "better" if found["is_better"] else "worse"
        sides = f"{found['second']} against {found['first']}: {found['metric']} {value} ({low} to {high})"
        lines.append(f"{task}: {sides}, p {found['p']:.2g}, n {found['n']}: {verdict}")
    return lines + [f"note: {warning}" for warning in summary["warnings"]]


def _evaluate_lines(summary: Summary) -> list[str]:
    """The first metric of each task, which is its own. Some of lm-eval's metrics have no definition."""
    own = {task: metrics[0] for task, metrics in summary["metrics"].items() if metrics}
    width = max(map(len, summary["models"]))
    lines = []
    for model, tasks in summary["scores"].items():
        parts, answered_by = [], []
        for task, scores in tasks.items():
            metric = own.get(task) or {"name": next(iter(scores["metrics"])), "unit": "number"}
            name, form = metric["name"], "{:.1%}" if metric["unit"] == "share" else "{:.3g}"
            ends = (scores["metrics"][name][key] for key in ("value", "low", "high"))
            value, low, high = ("?" if end is None else form.format(end) for end in ends)
            label = name if name.startswith(task) else f"{task} {name}"
            parts.append(f"{label} {value} ({low} to {high}, n {scores['n']})")
            if "answered_by" in scores:
                answered_by.append(", ".join(f"{count} by {one}" for one, count in scores["answered_by"].items()))
        lines.append(f"{model:<{width}}  {'; '.join([*parts, *dict.fromkeys(answered_by)])}")
    return lines


def _make_pairs_lines(summary: Summary) -> list[str]:
    lines, warnings = [], []
    for name, split in summary["splits"].items():
        rules = ", ".join(f"{rule} {count['made']}" for rule, count in split["rules"].items())
        made = f"{name}: {split['pairs']:,} pairs of {split['used']:,} of {split['read']:,} rows"
        made += f" ({rules})" if rules else ""
        if split["words_auc"] is not None:
            lengths = ", ".join(f"by the number of {measure} {auc:.2f}" for measure, auc in split["length_auc"].items())
            made += f"; sides are told apart {lengths}, by single words {split['words_auc']:.2f} (0.5 is a guess)"
        lines.append(made)
        if unused := split["read"] - split["used"]:
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in split["unused"].items())
            lines.append(f"{name}: {unused:,} rows are in no pair: {reasons}")
        warnings += [f"warning: {name}: {warning}" for warning in split["warnings"]]
    return lines + warnings


def _merge_adapter_lines(summary: Summary) -> list[str]:
    size = f"{summary['base']} with its adapter: {summary['parameters']:,} parameters in {summary['dtype']}"
    limit = f"of the logits' spread (at most {summary['tolerance']:g})"
    proof = f"differs from base and adapter by {summary['difference']:.1e} {limit}"
    return [
        f"{size}, {proof}; the adapter itself by {summary['effect']:.1e}",
        "read back in plain transformers: the same logits",
        *(f"warning: {words}" for words in summary["warnings"]),
    ]


def _export_lines(summary: Summary) -> list[str]:
    lines = []
    for one in summary["exports"]:
        said = f"{one['format']}: {one['bytes'] / 2**20:,.1f} MiB in {one['path']}, loaded by {one['loaded_by']}"
        if one["kl"] is not None:
            said += f"; KL per token {one['kl']:.2g}, {one['agreement']:.1%} of the tokens are the same"
        lines += [said, *(f"warning: {one['format']} was accepted although {why}" for why in one["problems"])]
    return lines


def _build_moe_lines(summary: Summary) -> list[str]:
    names, size = summary["experts"], _billions(summary["parameters"])
    copies = [f"{copy} is a copy of {of} and was left out" for copy, of in summary["collapsed"].items()]
    if summary["merge"] == "average":
        return [f"the mean of {', '.join(names)}: {size} parameters, of the base's architecture", *copies]
    experts = f"{len(names)} experts ({', '.join(names)}), {summary['top_k']} answer each token"
    lines = [f"{experts}: {size} parameters, where the base has {_billions(summary['base_parameters'])}", *copies]
    if summary["router"] == "select_one":
        lines.append("every token goes to it: a router could not reach the other experts, so they were left out")
    elif summary["top_k"] == 1:
        frozen = "the language-model loss gives such a router no gradient, so it keeps its initial weights"
        lines.append(f"one expert answers each token at full weight: {frozen}")
    elif summary["router"] == "random":
        lines.append("the router starts at random: train it")
    for name, found in summary.get("left_out", {}).items():
        lines.append(f"the router starts without {found['rows']} rows of {name}; the first: {found['first']}")
    lines += _routes(summary)
    proof: Mapping[str, float] | str = summary["proof"]
    if isinstance(proof, str):
        return [*lines, f"the proof that each expert alone answers as before was {proof}"]
    sent = "loaded again, with all tokens sent to one expert it answers as that expert"
    return [*lines, f"{sent}: logits differ by at most {max(proof.values()):.1g}"]


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


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


def _gate_lines(summary: Summary) -> list[str]:
    accuracy, held, experts = summary["accuracy"], summary["held"], summary["experts"]
    right, most = round(accuracy["value"] * accuracy["n"]), max(held, key=held.__getitem__)
    shares = (*(accuracy[key] for key in ("value", "low", "high")), held[most] / accuracy["n"])
    value, low, high, by_most = (f"{100 * share:.1f} %" for share in shares)
    always = f"always {most}: {by_most}"
    lines = [f"right for {right} of {accuracy['n']} held-out prompts: {value} ({low} to {high}); {always}"]
    for expert in experts:
        words = ", ".join(map(repr, summary["telling"][expert]))
        own = f"{expert}: {summary['confusion'][expert][expert]} of {held[expert]}"
        lines.append(f"{own}; the tokens that favour it most: {words}")
    if shared := summary["shared_prompts"]:
        lines.append(f"{shared} prompts are in the rows of several experts; no choice is right for all of them")
    chosen = "one expert for the whole prompt, by which tokens it has"
    return [*lines, f"{chosen}: it sees neither their order nor a hidden state, so it is not a router"]


def _python_lines(summary: Summary) -> list[str]:
    return [f"{name}: {size['files']:,} files, {size['bytes']:,} bytes" for name, size in summary["outputs"].items()]


_SUMMARY_LINES: dict[str, Callable[[Summary], list[str]]] = {
    "compare": _compare_lines,
    "evaluate": _evaluate_lines,
    "make_pairs": _make_pairs_lines,
    "merge_adapter": _merge_adapter_lines,
    "export": _export_lines,
    "build_moe": _build_moe_lines,
    "gate": _gate_lines,
    "python": _python_lines,
}
