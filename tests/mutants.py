"""Mutation tests of the arithmetic that safety and routing rest on: the host envelope, the limits,
the rounds of both engines (Appendix A), Equation 5 and Algorithm 1.

    python -m tests.mutants

Each comparison, sum, number and choice there is changed in turn, and some fast test must then fail.
Prints every mutant with the test that caught it, ends with one line of JSON, and exits with 1 if
one lives. Files stay as they are: functions get another code object in memory.
"""

import ast
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

SCHEDULE = "tests/runtime/schedule"
GPU_ROUND_TESTS = (
    f"{SCHEDULE}/test_gpu_budgets.py",
    f"{SCHEDULE}/test_gpu_round.py",
    f"{SCHEDULE}/test_host_admission.py",
)
ENVELOPE_TESTS = (f"{SCHEDULE}/test_sizes.py", f"{SCHEDULE}/test_estimate.py")
# Module -> (functions and classes to change, tests of which one must notice).
SUBJECTS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "dualpace.block": ({"blocks_for"}, ENVELOPE_TESTS),
    "dualpace.runtime.types": ({"Request"}, ENVELOPE_TESTS),
    "dualpace.runtime.schedule.envelope": (
        {"HostEnvelope", "finish_growth", "gpu_peak", "migration_reserve"},
        ENVELOPE_TESTS,
    ),
    "dualpace.runtime.schedule.view": ({"View", "finish_peak", "next_growth"}, ENVELOPE_TESTS),
    "dualpace.runtime.schedule.limits": (
        {"Limits", "context_limit"},
        (f"{SCHEDULE}/test_sizes.py",),
    ),
    "dualpace.runtime.schedule.cpu_round": (
        {
            "cpu_round",
            "Draft",
            "preserve_running_frontier",
            "keeps_everyone",
            "admit_ready_prefix",
            "wait_or_make_room",
        },
        (f"{SCHEDULE}/test_cpu_round.py",),
    ),
    "dualpace.runtime.schedule.draft": (
        {"Draft", "idle_cpu_promise", "in_arrival_order"},
        GPU_ROUND_TESTS,
    ),
    "dualpace.runtime.schedule.host_admission": (
        {"Tiers", "ProfiledAdmission"},
        (f"{SCHEDULE}/test_host_admission.py",),
    ),
    "dualpace.runtime.schedule.gpu_round": (
        {
            "gpu_round",
            "transfer_safe_frontier",
            "reserve_future_evictions",
            "calls_home",
            "admit_decodes",
            "relieve_saturated_cpu_tier",
            "swap_in_ready_prefix",
            "use_residual_hbm",
        },
        GPU_ROUND_TESTS,
    ),
    "dualpace.runtime.schedule.evictions": (
        {
            "restore_next_token_feasibility",
            "select_victims",
            "swap_out",
            "send_those_due",
            "growth_that_fits",
            "recompute_youngest",
            "drop",
        },
        (*GPU_ROUND_TESTS, f"{SCHEDULE}/test_migrate_every.py"),
    ),
    "dualpace.runtime.schedule.prefills": (
        {
            "admit_prefills",
            "prompts",
            "fits_hbm",
            "tokens_left",
            "chunk_left",
            "continue_prompt",
            "prefill_to_gpu",
            "prefill_to_cpu",
            "add_prompt",
            "migration_with",
        },
        GPU_ROUND_TESTS,
    ),
    "dualpace.runtime.routing": ({"route"}, ("tests/runtime/test_routing.py",)),
    "dualpace.runtime.profile.fit": (
        {"fit_thresholds", "assist_calls", "score_table", "threshold_scores", "best_routes"},
        ("tests/runtime/profile/test_fit.py",),
    ),
}
# Mutants that do what the original does.
EQUIVALENT = {
    ("fit.fit_thresholds", "best > 0 -> best >= 0"),  # a share of 0 is 0
    # The usual case is passed over, and the general one decides the same.
    ("cpu_round.keeps_everyone", "len(running) <= draft.max_rows -> len(running) < draft.max_rows"),
    ("cpu_round.keeps_everyone", "growth <= draft.free -> growth < draft.free"),
    (
        "cpu_round.keeps_everyone",
        "view.envelope.growth > draft.slack -> view.envelope.growth >= draft.slack",
    ),
    # Nothing is short: no victim is looked for.
    ("evictions.restore_next_token_feasibility", "short > 0 -> short >= 0 (2)"),
    (
        "draft.in_arrival_order",
        "queue[place - 1].order > request.order -> queue[place - 1].order >= request.order",
    ),  # no two are equal
    # The loop below asks again before it drops anybody.
    ("cpu_round.wait_or_make_room", "head.finish_growth <= slack -> head.finish_growth < slack"),
    ("cpu_round.wait_or_make_room", "head.next_growth <= free -> head.next_growth < free"),
}

COMPARISONS: dict[type, tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CHOICES = {"min": "max", "max": "min"}


@dataclass(frozen=True)
class Mutant:
    """One function with one change."""

    module: ModuleType
    function: str  # qualified name
    change: str
    code: CodeType

    @property
    def name(self) -> tuple[str, str]:
        """Where, and what."""
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}", self.change


def mutants(module: ModuleType, subjects: set[str]) -> Iterator[Mutant]:
    """Every mutant of the named functions and of the named classes' methods."""
    file = inspect.getfile(module)
    tree = ast.parse(inspect.getsource(module))
    for top in tree.body:
        if isinstance(top, ast.FunctionDef | ast.ClassDef) and top.name in subjects:
            prefix, members = ("", [top]) if isinstance(top, ast.FunctionDef) else (
                f"{top.name}.", top.body
            )  # fmt: skip
            for function in members:
                if isinstance(function, ast.FunctionDef):
                    name = prefix + function.name
                    seen: Counter[str] = Counter()
                    for change in changes(function):
                        seen[change] += 1
                        text = change if seen[change] == 1 else f"{change} ({seen[change]})"
                        code = find_code(compile(tree, file, "exec"), name)
                        yield Mutant(module, name, text, code)


def changes(function: ast.FunctionDef) -> Iterator[str]:
    """Changes the function in place, one way after the other, and says how; undone at the end."""
    for node in [node for part in function.body for node in parts(part)]:
        for other in variants(node):
            before, was = ast.unparse(node), (node.__class__, node.__dict__)
            ast.copy_location(other, node)
            node.__class__, node.__dict__ = other.__class__, other.__dict__
            ast.fix_missing_locations(node)
            yield f"{before} -> {ast.unparse(node)}"
            node.__class__, node.__dict__ = was


def parts(node: ast.AST) -> Iterator[Any]:
    """The node and all under it, but for what errors say."""
    if not isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from parts(child)


def variants(node: Any) -> Iterator[ast.AST]:
    """The node with one change of its own, each way that there is."""
    match node:
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield ast.Compare(left, [*ops[:place], other(), *ops[place + 1 :]], comparators)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OPERATORS[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Call(ast.Name(name), args, keywords) if name in CHOICES:
            yield ast.Call(ast.Name(CHOICES[name], ast.Load()), args, keywords)
        case ast.Constant(int(value)) if not isinstance(value, bool):
            yield ast.Constant(value + 1)


def find_code(code: CodeType, qualified: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualified:
                return constant
            if qualified.startswith(constant.co_qualname + "."):
                return find_code(constant, qualified)
    raise LookupError(qualified)


def find_function(mutant: Mutant) -> FunctionType:
    found: Any = mutant.module
    for part in mutant.function.split("."):
        found = vars(found)[part]
    found = found.fget if isinstance(found, property) else found
    assert isinstance(found, FunctionType)
    return found


def parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def refusal(item: pytest.Item) -> str:
    """Why the hunt cannot run a test of its files; empty if it can. An autouse fixture of some
    conftest is enough."""
    hunting = tuple(file for _, files in SUBJECTS.values() for file in files)
    if not (item.nodeid.startswith(hunting) and isinstance(item, pytest.Function)):
        return ""
    fixtures = sorted({*item.fixturenames} - {"request", *parameters(item)})
    if not fixtures:
        return ""
    return (
        f"{item.nodeid} has fixtures ({', '.join(fixtures)}), and tests/mutants.py calls the tests "
        f"of its file without any: do without them, use a hook of pytest's or put the test into a "
        f"file that is not named there."
    )


class Hunt:
    """A pytest plugin: instead of running the tests once, runs them against every mutant."""

    def __init__(self) -> None:
        self.caught = 0
        self.alive: list[str] = []
        self.excused: set[tuple[str, str]] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if refused := [reason for item in session.items if (reason := refusal(item))]:
            raise pytest.UsageError(refused[0])
        unsound = [item for item in session.items if self.fails(item)]
        assert not unsound, f"fails without any change: {unsound}"
        for name, (subjects, files) in SUBJECTS.items():
            items = [item for item in session.items if item.nodeid.startswith(files)]
            for mutant in mutants(importlib.import_module(name), subjects):
                self.judge(mutant, items)
        return True

    def judge(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        function = find_function(mutant)
        original, function.__code__ = function.__code__, mutant.code
        try:
            by = next((item.nodeid for item in items if self.fails(item)), None)
        finally:
            function.__code__ = original
        where, change = mutant.name
        if by is not None:
            self.caught += 1
            print(f"{where}: {change}: {by}")
        elif mutant.name in EQUIVALENT:
            self.excused.add(mutant.name)
        else:
            self.alive.append(f"{where}: {change}")

    @staticmethod
    def fails(item: pytest.Item) -> bool:
        """Called straight: with pytest's set-up and reports around it each takes thrice as long."""
        assert isinstance(item, pytest.Function)
        try:
            item.obj(**parameters(item))
        except (Exception, pytest.fail.Exception):
            return True
        return False


def main() -> int:
    settings.register_profile(
        "hunt",
        phases=[Phase.generate],
        max_examples=50,
        derandomize=True,
        database=None,
        deadline=None,
    )
    settings.load_profile("hunt")
    files = sorted({file for _, tests in SUBJECTS.values() for file in tests})
    hunt = Hunt()
    quiet = ["-qq", "-s", "-p", "no:cacheprovider", "-p", "no:timeout"]
    if status := pytest.main([*quiet, *files], plugins=[hunt]):
        return int(status)
    for mutant in hunt.alive:
        print(f"ALIVE {mutant}")
    idle = EQUIVALENT - hunt.excused
    for where, change in sorted(idle):
        print(f"NO EXCUSE NEEDED {where}: {change}")
    print(json.dumps({"caught": hunt.caught, "alive": len(hunt.alive)}))
    return 1 if hunt.alive or idle else 0


if __name__ == "__main__":
    sys.exit(main())
