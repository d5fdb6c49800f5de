"""The end of a sweep: choices, the profile's YAML, the simulator's, figures, report, and a check
against a real run. Puts the parts together; computes little itself."""

import copy
import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from dualpace.errors import ConfigError
from dualpace.runtime.plan import Plan
from dualpace.runtime.profile import figures, report, simulated
from dualpace.runtime.profile.check import Checked, check
from dualpace.runtime.profile.result import Choices, Result, choose, of_kind
from dualpace.runtime.profile.sweep import Sweep
from dualpace.runtime.simulate.cost import CostModel
from dualpace.runtime.simulate.times import step_times
from dualpace.settings.compose import conf_dir
from dualpace.settings.machine import Fingerprint, model_shape
from dualpace.settings.resolve import resolve
from dualpace.settings.schema import ProfileHwConfig

log = logging.getLogger(__name__)


def finish(sweep: Sweep) -> dict[str, Any]:
    """Writes everything and returns the JSON line. ConfigError while points are missing."""
    results = all_results(sweep)
    settings = sweep.settings
    choices = choose(results, settings, sweep.spec.num_layers)
    out = Path(settings.out or conf_dir()).absolute()
    pictures = Path(settings.figures).absolute() if settings.figures else sweep.folder
    data = profile(sweep, results, choices)
    file = write_yaml(out / "measured" / f"{sweep.name}.yaml", header(sweep), data)
    plan = serving_plan(sweep.config, file, sweep)
    costs = simulated.simulated(sweep.name, results, choices, sweep.spec, plan)
    cost_file = write_yaml(
        out / "simulated" / f"{sweep.name}.yaml", header(sweep), simulated.as_yaml(costs)
    )
    data["step_times"] = step_times(CostModel(costs), choices.routing.chosen).points()
    write_yaml(file, header(sweep), data)
    checked = check(plan, costs, sweep) if settings.check else None
    if checked is not None:
        data["check"] = checked.to_json()
        write_yaml(file, header(sweep), data)
    title = f"{sweep.fingerprint['cpu']}, GPU: {sweep.fingerprint['gpu']}; {sweep.name}"
    drawn = figures.draw(choices, results, title, pictures)
    page = report.write(pictures / "report.html", sweep.name, data, choices, checked)
    show(choices, checked)
    return {
        "profile": str(file),
        "simulated": str(cost_file),
        "settings": choices.settings(),
        "figures": [str(path) for path in drawn],
        "report": str(page),
        "check": data.get("check"),
    }


def all_results(sweep: Sweep) -> list[Result]:
    found = {point.name: sweep.result(point) for point in sweep.everything}
    missing = [name for name, result in found.items() if result is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} points are not measured yet ({', '.join(missing)}): run without "
            f"profile.point to measure them."
        )
    return [result for result in found.values() if result is not None]


def profile(sweep: Sweep, results: list[Result], choices: Choices) -> dict[str, Any]:
    """What goes into the measured profile: settings first, then why and where from."""
    routing, settings = choices.routing, sweep.settings
    p, f = routing.chosen
    best = routing.best_pair
    dates = sorted(result["provenance"]["date"] for result in results)
    return {
        "name": sweep.name,
        "settings": choices.settings(),
        "fingerprint": sweep.fingerprint,
        "measured": {
            **results[0]["provenance"],
            "date": dates[-1],
            "begun": dates[0],
            "points": len(results),
            "seconds": round(sum(result["seconds"] for result in results), 1),
            "model_source": sweep.config.model.source,
            "model_shape": model_shape(sweep.spec),
            "layers_run": results[0]["layers"],
            "warmups": settings.warmups,
            "invocations": settings.invocations,
            "repeats": settings.repeats,
            "max_seconds": settings.max_seconds,
            "temperature": settings.temperature,
            "assist_mode": sweep.plan.assist.mode,
        },
        "routing": {
            "gpu_weight": settings.gpu_weight,
            "epsilon": settings.epsilon,
            "batch_sizes": list(routing.table),
            "scores_ms": {
                name.value: [round(row[name], 4) for row in routing.table.values()]
                for name in next(iter(routing.table.values()))
            },
            "chosen": {"P": p, "F": f, "score_ms": round(routing.pair_scores[p, f], 4)},
            "exact_minimum": {
                "P": best[0],
                "F": best[1],
                "score_ms": round(routing.pair_scores[best], 4),
            },
            "full_table": {size: name.value for size, name in routing.best_routes.items()},
            "full_table_score_ms": round(routing.table_score, 4),
            "regret_of_chosen": round(routing.regret_of((p, f)), 5),
            "regret_of_exact_minimum": round(routing.regret_of(best), 5),
            "wait_ms": {k.name: round(v, 4) for k, v in routing.calibration.wait.items()},
            "overhead_ms": {k.name: round(v, 4) for k, v in routing.calibration.overhead.items()},
            "primitives_ms": {
                size: {
                    "post_attention": round(row.post_attention, 4),
                    "post_layer": round(row.post_layer, 4),
                    "write": round(row.write, 5),
                    "read": round(row.read, 5),
                    "write_final": round(row.write_final, 5),
                    **{f"gpu_{k.name.lower()}": round(v, 4) for k, v in row.assist.items()},
                }
                for size, row in routing.primitives.items()
            },
        },
        "beside": {
            rows: {name: round(value, 4) for name, value in values.items()}
            for rows, values in of_kind(results, "beside").items()
        },
        "tokens": {
            "num_tokens": list(choices.tokens.means),
            "throughput": [round(v) for v in choices.tokens.means.values()],
            "smoothed": [round(v) for v in choices.tokens.smooth.values()],
            "plateau": round(choices.tokens.plateau),
        },
        "cpu_batch": {
            "points": [[b, c, round(rate)] for b, c, rate in choices.cpu.grid],
            "share_of_peak": {b: round(share, 4) for b, share in choices.cpu.shares.items()},
        },
    }


def serving_plan(config: ProfileHwConfig, file: Path, sweep: Sweep) -> Plan:
    """The plan that serving with the new profile has; a refusal here would be a defect."""
    config = copy.deepcopy(config)
    config.hw.profile = str(file)
    return resolve(config, sweep.hardware)


def header(sweep: Sweep) -> str:
    here: Fingerprint = sweep.fingerprint
    return (
        f"# Measured by scripts/profile_hw.py with {sweep.config.model.source} on {here['cpu']}, "
        f"GPU {here['gpu']}.\n"
    )


def write_yaml(file: Path, first_line: str, data: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(first_line + OmegaConf.to_yaml(OmegaConf.create(data)))
    return file


def show(choices: Choices, checked: Checked | None) -> None:
    """The decisions, for people."""
    routing = choices.routing
    p, f = routing.chosen
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("thresholds (P, F)", f"({p}, {f})", f"score {routing.pair_scores[p, f]:.3f} ms")
    regret = routing.regret_of((p, f))
    table.add_row("full table", "", f"score {routing.table_score:.3f} ms, regret {regret:.3%}")
    table.add_row("GPU token limit", str(choices.tokens.limit), "")
    table.add_row("CPU batch limit", str(choices.cpu.limit), "")
    if checked is not None:
        table.add_row("simulated run", f"{checked.error:+.1%}", "of the real throughput")
    Console(stderr=True).print(table)
