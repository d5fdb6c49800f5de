"""A bar on stderr while a run goes on: answers, failures, tokens a second; none off a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualpace.runtime.bench.metrics import RequestRecord


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Call what this gives with each record as it comes."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    # Few refreshes: the client shares its core with the bar.
    with Progress(
        *columns, console=console, disable=not console.is_terminal, refresh_per_second=2
    ) as bar:
        task = bar.add_task("requests", total=total, note="")
        start_s, tokens, failed = time.monotonic(), 0, 0

        def advance(record: RequestRecord) -> None:
            nonlocal tokens, failed
            tokens += record.num_tokens
            failed += not record.completed
            pace = tokens / max(time.monotonic() - start_s, 1e-9)
            note = f"{pace:.0f} tokens/s" + (f", {failed} failed" if failed else "")
            bar.update(task, advance=1, note=note)

        yield advance
