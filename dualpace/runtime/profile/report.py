"""One page of HTML that explains each choice in numbers, figures inside.

Knows no measurements beyond what the profile holds; needs no network to be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dualpace.runtime.profile.check import Checked
from dualpace.runtime.profile.figures import LABELS
from dualpace.runtime.profile.result import Choices
from dualpace.runtime.routing import Route, route

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left;padding-left:0}
.chosen{background:#e3eff7}svg{max-width:100%;height:auto}
"""


def write(
    file: Path, name: str, data: Mapping[str, Any], choices: Choices, checked: Checked | None
) -> Path:
    """The page beside its figures; returns `file`."""
    parts = [
        f"<h1>Profile {escape(name)}</h1>",
        provenance(data),
        settings(choices),
        "<h2>Where a CPU batch runs its dense stages</h2>",
        routing(choices, data["routing"]["epsilon"]),
        beside(data.get("beside", {})),
        picture(file.parent / "figure7.svg"),
        "<h2>GPU token limit</h2>",
        tokens(choices),
        "<h2>CPU batch limit</h2>",
        cpu_batch(choices),
        picture(file.parent / "figure3.svg"),
        "<h2>The simulator under this profile</h2>",
        simulation(checked),
    ]
    body = "\n".join(parts)
    file.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Profile {escape(name)}</title>"
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )
    return file


def provenance(data: Mapping[str, Any]) -> str:
    here, made = data["fingerprint"], data["measured"]
    return (
        f"<p>{escape(str(here['cpu']))}, {here['cpu_threads']} threads for the CPU engine; GPU: "
        f"{escape(str(here['gpu']))}; {escape(made['model_source'])} in {here['dtype']} "
        f"({escape(here['model'])}). Measured until {made['date']} in {made['points']} points, "
        f"{made['seconds']:.0f} s, with W = {made['warmups']}, up to I = {made['invocations']} "
        f"invocations and R = {made['repeats']} repeats.</p>"
    )


def settings(choices: Choices) -> str:
    p, f = choices.routing.chosen
    rows = [
        ("assist.post_attention_limit (P)", p),
        ("assist.post_layer_limit (F)", f),
        ("gpu.token_limit", choices.tokens.limit),
        ("cpu.max_batch_size", choices.cpu.limit),
    ]
    return table(("setting", "value"), rows)


def routing(choices: Choices, epsilon: float) -> str:
    found = choices.routing
    pair, best = found.chosen, found.best_pair
    score, minimum = found.pair_scores[pair], found.pair_scores[best]
    rows = []
    for size, row in found.table.items():
        rows.append(
            (
                size,
                *(f"{row[name]:.3f}" for name in Route),
                LABELS[route(size, *pair)],
                LABELS[found.best_routes[size]],
            )
        )
    runners = sorted(found.pair_scores, key=lambda p: found.pair_scores[p])[:6]
    ranking = [
        (f"({p}, {f})", f"{found.pair_scores[p, f]:.3f}", f"{found.regret_of((p, f)):.2%}")
        for p, f in runners
    ]
    waits = ", ".join(
        f"{kind.name.lower().replace('_', ' ')} {found.calibration.wait[kind]:.3f} ms and "
        f"{found.calibration.overhead[kind]:.3f} ms"
        for kind in found.calibration.wait
    )
    return (
        f"<p>Scores in ms by batch size (Equation 6). {reach(choices)} The exact minimum over all "
        f"pairs is (P, F) = {best} at {minimum:.3f} ms; within {epsilon:.2%} of it, {pair} at "
        f"{score:.3f} ms asks for the fewest assists. Running each size on its own best route "
        f"would score {found.table_score:.3f} ms: over the batches "
        f"that can be formed, the chosen pair's regret is {found.regret_of(pair):.2%}, the exact "
        f"minimum's {found.regret_of(best):.2%}. Serving "
        f"adds to the device's intervals (wait q, overhead o): {waits}.</p>"
        + table(("rows", *(LABELS[name] for name in Route), "chosen", "best"), rows)
        + "<p>The best pairs and their regret against the full table:</p>"
        + table(("(P, F)", "score, ms", "regret"), ranking)
    )


def beside(points: Mapping[int, Mapping[str, float]]) -> str:
    """What assists and GPU steps cost each other, where it was measured."""
    if not points:
        return ""
    rows = [
        (
            size,
            f"{found['alone_ms']:.3f}",
            f"{found['beside_ms']:.3f}",
            f"{found['assist_ms']:.3f}",
            f"{found['assists'] / found['steps']:.2f}",
            f"{found['loss']:.2f}",
        )
        for size, found in points.items()
    ]
    head = ("rows of an assist", "GPU step alone, ms", "with assists", "an assist, ms")
    return (
        "<p>GPU decode steps while one assist follows another. The loss is the time that steps "
        "take longer, as a share of the device's time for the assists: 1 where they run between "
        "stages, less where both run at once.</p>" + table((*head, "assists a step", "loss"), rows)
    )


def reach(choices: Choices) -> str:
    """What the thresholds mean for the batches that can be formed."""
    (p, f), limit = choices.routing.chosen, choices.cpu.limit
    if f >= limit:
        return f"With at most {limit} rows a batch, F = {f} means Full-CPU always: no assist."
    pieces = []
    if f > 0:
        pieces.append(f"up to {f} rows run Full-CPU")
    if p > f:
        pieces.append(f"up to {min(p, limit)} rows Split-Final")
    if p < limit:
        pieces.append(f"larger batches, up to {limit} rows, Fused-Assist")
    return f"Of the batches that can be formed, {', '.join(pieces)}."


def tokens(choices: Choices) -> str:
    found = choices.tokens
    rows = [
        (size, f"{found.means[size]:,.0f}", f"{smooth:,.0f}", f"{smooth / found.plateau:.1%}")
        for size, smooth in found.smooth.items()
    ]
    marked = list(found.smooth).index(found.limit)
    return (
        f"<p>The plateau of the nondecreasing fit is {found.plateau:,.0f} tokens/s of one layer. "
        f"{found.limit} tokens reach {found.smooth[found.limit] / found.plateau:.1%} of it: more "
        f"optional work would only lengthen a round.</p>"
        + table(("tokens", "mean", "fit", "of the plateau"), rows, marked)
    )


def cpu_batch(choices: Choices) -> str:
    found = choices.cpu
    contexts = sorted({context for _, context, _ in found.grid})
    rates = {(b, c): rate for b, c, rate in found.grid}
    rows = [
        (
            size,
            *(f"{rates[size, c]:,.0f}" if (size, c) in rates else "" for c in contexts),
            f"{share:.1%}",
        )
        for size, share in found.shares.items()
    ]
    return (
        "<p>Decode throughput of one layer in tokens/s. The limit is the smallest batch whose mean "
        "share of each context's peak is within the tolerance of the best.</p>"
        + table(
            ("rows", *(f"context {c}" for c in contexts), "share of peak"),
            rows,
            list(found.shares).index(found.limit),
        )
    )


def simulation(checked: Checked | None) -> str:
    if checked is None:
        return "<p>No real run was made to compare with.</p>"
    load = checked.load
    engines = ", ".join(f"{name} {rate:.1f}" for name, rate in checked.real_by_engine.items())
    return (
        f"<p>{load.num_requests} requests at once, {load.prompt_len} tokens in and "
        f"{load.output_len} out each: {checked.real:.1f} output tokens/s for real ({engines}), "
        f"{checked.simulated:.1f} simulated, an error of {checked.error:+.1%}.</p>"
    )


def picture(file: Path) -> str:
    text = file.read_text()
    return text[text.index("<svg") :]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], marked: int = -1) -> str:
    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)

    lines = [
        f"<tr{' class=chosen' if i == marked else ''}>{cells(row, 'td')}</tr>"
        for i, row in enumerate(rows)
    ]
    return f"<table><tr>{cells(head, 'th')}</tr>{''.join(lines)}</table>"
