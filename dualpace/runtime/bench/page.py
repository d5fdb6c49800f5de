"""A results page in Markdown: what ran where, each point, sustained rates and their ratios beside
the paper's, and where the host tier helps. Knows only the keys of results."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dualpace.runtime.bench import paper, versus
from dualpace.runtime.bench.sustain import (
    TARGETS,
    TENTHS,
    Result,
    Sweep,
    Target,
    crossed,
    sweeps,
)

_COLUMNS = (
    ("offered 1/s", "rate", 1.0, "g"),
    ("requests/s", "request_throughput", 1.0, ".2f"),
    ("output tokens/s", "output_throughput", 1.0, ".0f"),
    ("s/token", "mean_normalized_latency_s_per_token", 1.0, ".4f"),
    ("P99 TTFT s", "p99_ttft_ms", 1e-3, ".3f"),
    ("ITL P50 ms", "median_itl_ms", 1.0, ".1f"),
    ("ITL P99 ms", "p99_itl_ms", 1.0, ".1f"),
    ("P99 TPOT ms", "p99_tpot_ms", 1.0, ".1f"),
    ("failed", "failed", 1.0, "d"),
)


def page(results: Sequence[Result], title: str, figures: Iterable[str] = ()) -> str:
    """The page's text; `figures` are image files relative to it."""
    plain = [r for r in results if r["rate"] != "inf"]
    parts = [f"# {title}", *provenance(results)]
    for group in by_place(results):
        first = group[0]
        parts += [f"## {first['workload']} on {first['profile']}", lengths(group)]
        parts.append(points(group))
        found = [sweep for sweep in sweeps(plain) if in_group(sweep, first)]
        parts += [*sustained(found), *against(found)]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def write_page(results: Sequence[Result], figures: Iterable[Path], file: Path, title: str) -> None:
    """`figures` lie in the page's folder."""
    images = [figure.name for figure in figures if figure.suffix == ".png"]
    file.write_text(page(results, title, images))


def in_group(sweep: Sweep, result: Result) -> bool:
    return (sweep.profile, sweep.workload) == (result["profile"], result["workload"])


def by_place(results: Sequence[Result]) -> list[list[Result]]:
    """Groups with the same machine, model and workload, in the order in which they appear."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["profile"], result["workload"]), []).append(result)
    return list(groups.values())


def provenance(results: Sequence[Result]) -> list[str]:
    """Kind, machine, versions and commands, each said once."""
    rows = []
    for result in results:
        machine = result.get("machine") or {}
        place = ", ".join(str(machine[key]) for key in ("cpu", "system") if key in machine)
        kind = result.get("kind", "-")
        # A measured server that does not tell its version is not ours.
        known = None if kind == "measured" else machine.get("dualpace")
        served = result.get("server_version") or known or "-"
        profile = result.get("server_profile") or "-"
        rows.append((result["policy"], served, kind, place or "-", profile))
    head = ("policy or server", "version", "kind", "machine", "measured profile in use")
    parts = [table(head, dict.fromkeys(rows))]
    commands = dict.fromkeys(r["command"] for r in results if r.get("command"))
    if commands:
        parts.append("Run again with:")
        parts.append("```sh\n" + "\n".join(commands) + "\n```")
    return parts


def lengths(results: Sequence[Result]) -> str:
    counts = sorted({r["num_requests"] for r in results})
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    largest = max(results, key=lambda r: int(r["num_requests"]))
    return (
        f"{count} requests a point, {largest['prompt_mean']:.0f} prompt and "
        f"{largest['output_mean']:.0f} output tokens on average, seed {largest['seed']}."
    )


def points(results: Sequence[Result]) -> str:
    rows = []
    for result in sorted(results, key=lambda r: (name(r), float(r["rate"]))):
        made = max(result["total_output_tokens"], 1)
        share = 100 * result["cpu_resident_tokens"] / made
        rows.append((name(result), *(cell(result, *c[1:]) for c in _COLUMNS), f"{share:.0f} %"))
    return table(("policy", *(c[0] for c in _COLUMNS), "host tokens"), rows)


def cell(result: Result, key: str, scale: float, form: str) -> str:
    value = result[key]
    return value if isinstance(value, str) else format(value * scale if scale != 1 else value, form)


def name(result: Result) -> str:
    return str(result["variant"] or result["policy"])


def sustained(found: Sequence[Sweep]) -> list[str]:
    """Rates at the targets, how many times each other's rate the first policy sustains and what the
    paper says of that; then the tighter targets, where any is crossed."""
    if not any(len(sweep.results) > 1 for sweep in found):
        return []
    parts = [rates(found, TARGETS, with_paper=True)]
    if text := paper.note(found[0].workload):
        parts.append(text)
    if tighter := crossed(found, TENTHS):
        parts.append(rates(found, tighter))
    bounds = "the target still holds at the highest rate, or holds at none"
    return [*parts, f"Interpolated between measured rates; `>` and `<`: {bounds}."]


def rates(found: Sequence[Sweep], targets: Sequence[Target], with_paper: bool = False) -> str:
    head = ("sustained 1/s at", *(target[0] for target in targets), "most completed")
    rows = [
        (sweep.name, *(sweep.said(*t[1:]) for t in targets), f"{sweep.capacity:.2f}")
        for sweep in found
    ]
    ours, *others = found
    for other in others:
        ratios = (ratio(ours.sustains(*t[1:])[0], other.sustains(*t[1:])[0]) for t in targets)
        most = ratio(ours.capacity, other.capacity)
        rows.append((f"{ours.name} / {other.name}", *ratios, most))
        if with_paper and ours.name == "dualpace":
            rows += papers_row(ours.workload, other.name, targets)
    return table(head, rows)


def papers_row(workload: str, other: str, targets: Sequence[Target]) -> list[tuple[str, ...]]:
    gains = [paper.gains(workload, other, target[0]) for target in targets]
    if not any(gains):
        return []
    cells = (" / ".join(f"{g:g}" for g in each) + " x" if each else "-" for each in gains)
    return [(f"*the paper's, over {paper.called(other)}*", *cells, "-")]


def against(found: Sequence[Sweep]) -> list[str]:
    """`dualpace` beside the policy or server without a host tier, rate by rate, then in words."""
    by_name = {sweep.name: sweep for sweep in found}
    base = next((by_name[name] for name in paper.GPU_ONLY if name in by_name), None)
    if base is None or "dualpace" not in by_name:
        return []
    ours = by_name["dualpace"]
    changes = versus.rows(ours, base)
    if not changes:
        return []
    head = ("offered 1/s", *(measure.name for measure in versus.MEASURES), "host tokens")
    return [
        f"### Where the host tier helps and where it does not: dualpace against {base.name}",
        table(head, changes),
        "\n".join(f"- {line}" for line in versus.statement(ours, base)),
        f"Within {100 * versus.SAME:.0f} % counts as the same; each point is one run.",
    ]


def ratio(ours: float | None, other: float | None) -> str:
    return f"{ours / other:.3f} x" if ours and other else "-"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
