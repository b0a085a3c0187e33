"""``rollout history``, and ``rollout-history`` where neither Ray nor vLLM is installed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from redis.exceptions import RedisError, ResponseError
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_REDIS, EXIT_STATE
from rollout_api.protocol.keys import HistoryKeys, history_of
from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.archive import ArchiveError, export_history, import_history
from rollout_worker.history.connection import RedisUnusableError, connect_history, explain_error
from rollout_worker.history.maintenance import (
    HistoryMaintainer,
    Pass,
    Plan,
    UnknownHistoryError,
    as_old,
    known_history,
    new_token,
)
from rollout_worker.history.records import HistoryRecord, encode_record
from rollout_worker.history.server_functions import Redis
from rollout_worker.history.service import HistoryService
from rollout_worker.history.store import START, History, HistoryMismatchError, HistoryStore, Problem, histories
from rollout_worker.history_http import HistoryServer

app = typer.Typer(
    name="rollout-history",
    help="Histories of rollouts in Redis: look into them, move them, keep them within bounds.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    pretty_exceptions_enable=sys.stderr.isatty(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True)

_EXIT_FAILED = 1
_WIDTH = 160
"""Columns of a table that no terminal shows."""
_GRACE_S = 8.0
"""How long the service may take to end; Kubernetes waits for 30 s."""
_BINS = 12
_BAR = 40
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_NAMED = 5
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration; write a number and s, m, h or d, as in 30d")
    return float(match[1]) * _SECONDS[match[2]]


RedisUrl = Annotated[
    str,
    typer.Option(
        envvar=["ROLLOUT_HISTORY_REDIS_URL", "ROLLOUT_REDIS_URL"],
        show_envvar=True,
        help="Redis with the histories: redis://, redis+sentinel:// or redis+cluster://; with TLS rediss…",
    ),
]
HistoryName = Annotated[str, typer.Argument(metavar="HISTORY", help="NAMESPACE/NAME, or NAME in namespace default.")]
Retention = Annotated[
    float,
    typer.Option(parser=_duration, metavar="DURATION", help="A history unused for so long is removed: 90m, 12h, 30d."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def serve(
    redis: RedisUrl,
    port: Annotated[int, typer.Option(help="Port of /healthz, /readyz and /metrics.")] = 8080,
    retention: Retention = "30d",  # type: ignore[assignment]  # typer parses it
) -> None:
    """Keep all histories on a server within their bounds, until SIGTERM. Of several services, one does the work."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _said_plainly(redis):
        connect_history(redis).close()  # a malformed URL does not pass by itself; a server that is away does
        service = HistoryService(lambda: connect_history(redis), token=new_token(), retention=retention)
        asyncio.run(_serve(service, port))


@app.command("ls")
def list_histories(redis: RedisUrl, as_json: AsJson = False) -> None:
    """List the histories on a server."""
    with _connected(redis) as client:
        rows = [_overview(client, keys) for keys in histories(client)]
    if as_json:
        _print_json(rows)
        return
    console = _console()
    if not rows:
        console.print("There are no histories on this server.")
        return
    table = _table(
        "history", "tokenizer", "model", ">problems", ">bytes", ">cap", ">generation", ">window", "last used"
    )
    for row in rows:
        if "error" in row:
            table.add_row(row["history"], Text(row["error"], style="red"))
            continue
        table.add_row(
            row["history"],
            row["tokenizer"][:12],
            row["model"] or "–",
            f"{row['problems']:,}",
            _size(row["bytes"]),
            "–" if row["max_bytes"] is None else _size(row["max_bytes"]),
            f"{row['generation']:,}",
            f"{row['window']}" if row["horizon"] is None else f"{row['window']}, {row['horizon']} old at most",
            _ago(row["unused_seconds"]),
        )
    console.print(table)


@app.command()
def show(
    history: HistoryName,
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A problem's id.")],
    redis: RedisUrl,
    as_json: AsJson = False,
) -> None:
    """Show one problem's rollouts and how long they are."""
    with _connected(redis) as client:
        keys = _keys(history)
        store, about = known_history(client, keys)
        found = next((one for one in store.problems() if one.problem == problem), None)
        if found is None:
            raise UnknownHistoryError(_no_such_problem(keys, problem, store.problems()))
        records, rewards, corrupt = _rollouts(store, problem, about)
        of_problem, of_all = store.length_stats(problem), store.length_stats(None)
    rows = [
        {
            "rollout": record.rollout_id,
            "generation": record.generation,
            "length": len(record.tokens),
            "finish_reason": record.finish_reason,
            "cut_off": _cut_off(record),
            "reward": rewards.get(rollout_key(record.rollout_id)),
            "bytes": len(encode_record(record)),
        }
        for record in records
    ]
    length_class = str(of_problem.length_class(of_all))
    if as_json:
        known = {"history": keys.full_name, "problem": problem, "bytes": found.bytes, "corrupt": corrupt}
        _print_json({**known, "length_class": length_class, "rollouts": rows})
        return
    console = _console()
    table = _table("rollout", ">generation", ">tokens", "finish", ">reward", ">bytes")
    for row in rows:
        table.add_row(
            str(row["rollout"]),
            f"{row['generation']:,}",
            f"{row['length']:,}",
            Text(str(row["finish_reason"]), style="yellow" if row["cut_off"] else ""),
            "–" if row["reward"] is None else f"{row['reward']:.3g}",
            f"{row['bytes']:,}",
        )
    console.print(table)
    console.print(
        f"{len(rows):,} rollouts, {_size(found.bytes)} in Redis (a rollout's bytes are those it takes alone), beside "
        f"others {length_class}.",
        highlight=False,
    )
    if corrupt:
        console.print(f"[yellow]{corrupt} entries cannot be read.[/]")
    if rows:
        console.print(_count_bars([(len(record.tokens), _cut_off(record)) for record in records]))


@app.command()
def stats(history: HistoryName, redis: RedisUrl, as_json: AsJson = False) -> None:
    """Show how long a history's last rollouts are, and how well drafts from it are accepted by its age."""
    with _connected(redis) as client:
        keys = _keys(history)
        store, _ = known_history(client, keys)
        lengths, ages = store.length_stats(None), store.ages()
    quantiles = {p: lengths.quantile(p) for p in _QUANTILES} if lengths.count else {}
    bins = _shares(lengths)
    if as_json:
        _print_json(
            {
                "history": keys.full_name,
                "rollouts": lengths.count,
                "weight": lengths.weight,
                "cut_off": lengths.cut_off,
                "mean": lengths.mean,
                "longest": lengths.longest,
                "quantiles": {str(p): quantile for p, quantile in quantiles.items()},
                "histogram": [{"above": low, "to": high, "share": share} for low, high, share in bins],
                "acceptance": [
                    {"age": age, "drafted": drafted, "accepted": accepted} for age, (drafted, accepted) in ages.items()
                ],
            }
        )
        return
    console = _console()
    if not lengths.count:
        console.print(f"History {keys.full_name} has no rollouts.", highlight=False)
    else:
        console.print(
            f"The last {lengths.count:,} rollouts of {keys.full_name}, newer generations weighing more (together "
            f"{lengths.weight:,.0f}): {lengths.cut_off:.1%} cut off, mean {lengths.mean:,.0f} tokens, longest "
            f"{lengths.longest:,}.",
            highlight=False,
        )
        table = _table(*(f">{p:.0%} within" for p in quantiles))
        table.add_row(*(f"> {lengths.longest:,}" if known is None else f"{known:,.0f}" for known in quantiles.values()))
        console.print(table)
        console.print(_share_bars(bins))
    if ages:
        table = _table(">age", ">drafted", ">accepted", ">share", "")
        for age, (drafted, accepted) in ages.items():
            share = accepted / drafted if drafted else 0.0
            table.add_row(f"{age}", f"{drafted:,.0f}", f"{accepted:,.0f}", f"{share:.1%}", "█" * round(_BAR * share))
        console.print("Draft tokens by the age, in generations, of the history that they came from:")
        console.print(table)


@app.command("export")
def export_to(
    history: HistoryName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Archive to write, as in math.jsonl.zst.")],
    redis: RedisUrl,
) -> None:
    """Write a history to a file: JSON lines, compressed by zstd."""
    with _connected(redis) as client:
        done = export_history(client, _keys(history), file)
    console = _console()
    console.print(
        f"{file}: {done.records:,} rollouts of {done.problems:,} problems, {_size(done.size)}.",
        highlight=False,
        soft_wrap=True,
    )
    if done.corrupt:
        console.print(f"[yellow]{done.corrupt} entries of the history cannot be read and are not in it.[/]")


@app.command("import")
def import_from(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive that was exported.")],
    redis: RedisUrl,
    into: Annotated[
        str | None,
        typer.Option("--as", metavar="HISTORY", help="Into this history [default: the one that was exported]."),
    ] = None,
    allow_foreign_model: Annotated[
        bool, typer.Option("--allow-foreign-model", help="Also into a history of another model.")
    ] = False,
) -> None:
    """Bring a file's rollouts into a history, with generations and rewards; interrupted, repeat it to go on."""
    with _connected(redis) as client:
        keys = None if into is None else _keys(into)
        done = import_history(client, file, keys, allow_foreign_model=allow_foreign_model)
    _console().print(
        f"History {done.history}: {done.new:,} rollouts are new, {done.known:,} were there, {done.too_old:,} have left "
        f"its window; its newest generation is {done.generation:,}.",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def gc(
    redis: RedisUrl,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    retention: Retention = "30d",  # type: ignore[assignment]  # typer parses it
) -> None:
    """Bring all histories within their bounds now, whether or not a service looks after them."""
    console, failed = _console(), False
    with _connected(redis) as client:
        known = histories(client)
        for keys in known:
            keeper = HistoryMaintainer(client, keys, token=new_token(), retention=retention)
            try:
                said = _planned(keeper.plan()) if dry_run else _collected(keeper)
            except (ValueError, ResponseError) as error:
                client.ping()  # else it is not this history that fails
                failed, said = True, f"failed: {type(error).__name__}: {error}"
            console.print(f"{keys.full_name}: {said}", markup=False, highlight=False, soft_wrap=True)
    if not known:
        console.print("There are no histories on this server.")
    if failed:
        sys.exit(_EXIT_FAILED)


@app.command()
def delete(
    history: HistoryName,
    redis: RedisUrl,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a history, with all its rollouts."""
    console = _console()
    with _connected(redis) as client:
        keys = _keys(history)
        store, about = known_history(client, keys)
        row = _overview(client, keys)
        what = (
            f"History {keys.full_name}: {row['problems']:,} problems, {_size(row['bytes'])}, generation "
            f"{about.generation}, last used {_ago(row['unused_seconds'])}."
        )
        console.print(what, highlight=False, soft_wrap=True)
        if not yes:
            typer.confirm("Delete all of it?", abort=True)
        store.delete()
    console.print(f"History {keys.full_name} is deleted.", highlight=False)


async def _serve(service: HistoryService, port: int) -> None:
    """Run *service* in a thread of its own until this process is told to end."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    server = HistoryServer(service.state)
    listening = await server.start(None, port)
    errors.print(f"Serving /healthz, /readyz and /metrics on port {listening}.", highlight=False)
    # a daemon: a Redis that does not answer must not hold the end of the process up
    thread = threading.Thread(target=service.run, name="history-service", daemon=True)
    thread.start()
    await told.wait()
    service.stop()
    await asyncio.to_thread(thread.join, _GRACE_S)
    await server.stop()


def _keys(history: str) -> HistoryKeys:
    """Of ``namespace/name``, or of a name in namespace ``default``."""
    return history_of(history if "/" in history else f"default/{history}")


def _overview(client: Redis, keys: HistoryKeys) -> dict[str, Any]:
    """A row of ``ls``; of a history that cannot be read, why not."""
    try:
        plan = HistoryMaintainer(client, keys, token="", retention=None).survey()
    except (ValueError, ResponseError) as error:
        return {"history": keys.full_name, "error": f"{type(error).__name__}: {error}"}
    about = {} if plan.about is None else asdict(plan.about)
    return {
        "history": keys.full_name,
        "tokenizer": "",
        "model": "",
        "max_bytes": None,
        "generation": 0,
        "window": 0,
        "horizon": None,
        **about,
        "problems": plan.problems,
        "bytes": plan.bytes,
        "unused_seconds": plan.unused if plan.problems else None,
    }


def _no_such_problem(keys: HistoryKeys, problem: str, known: Sequence[Problem]) -> str:
    text = f"history {keys.full_name} has no problem {problem!r}; it has {len(known):,}"
    if not known:
        return text
    last = ", ".join(one.problem for one in known[: -_NAMED - 1 : -1])
    return f"{text}, those used last: {last}"


def _rollouts(store: HistoryStore, problem: str, about: History) -> tuple[list[HistoryRecord], dict[bytes, float], int]:
    """All rollouts of a problem in the window, their rewards, and how many entries cannot be read."""
    records: dict[str, HistoryRecord] = {}
    corrupt: set[str] = set()
    rewards: dict[bytes, float] = {}
    cursor, more = START, True
    while more:
        found = store.read({problem: cursor}, rewarded={problem} if cursor == START else ())[problem]
        records |= {record.rollout_id: record for record in found.records}
        corrupt.update(one.entry_id for one in found.corrupt)
        rewards |= found.rewards or {}
        cursor, more = found.cursor, found.more
    oldest = about.oldest_kept(record.generation for record in records.values())
    return [record for record in records.values() if record.generation >= oldest], rewards, len(corrupt)


def _cut_off(record: HistoryRecord) -> bool:
    return record.cut_off


def _collected(keeper: HistoryMaintainer) -> str:
    """Make passes until there is nothing left to do; what they did."""
    total = Pass(None)
    while True:
        done = keeper.run_once(unasked=True)
        total = Pass(
            done.plan,
            expired=done.expired,
            empty=total.empty + done.empty,
            trimmed=total.trimmed + done.trimmed,
            narrowed=total.narrowed + done.narrowed,
            evicted=total.evicted + done.evicted,
            evicted_bytes=total.evicted_bytes + done.evicted_bytes,
            compacted=total.compacted + done.compacted,
            failed=total.failed + done.failed,
            problems=done.problems,
            bytes=done.bytes,
        )
        if done.finished:
            break
    if total.expired and total.plan is not None:
        return f"removed, unused for {_span(total.plan.unused)}"
    parts = [
        f"{total.trimmed:,} problems trimmed to the window",
        f"{total.narrowed:,} to the byte cap",
        f"{total.evicted:,} evicted ({_size(total.evicted_bytes)})",
        f"{total.compacted:,} packed",
    ]
    if total.failed:
        parts.append(f"{total.failed:,} left alone as their keys hold something else")
    return ", ".join(parts)


def _planned(plan: Plan) -> str:
    if plan.expired:
        return f"would be removed, unused for {_span(plan.unused)}: {plan.problems:,} problems, {_size(plan.bytes)}"
    evicted = sum(one.bytes for one in plan.evicted)
    parts = [
        f"{len(plan.trimmed):,} problems would be trimmed to the window",
        f"{len(plan.narrowed):,} to the byte cap",
        f"{len(plan.evicted):,} would be evicted ({_size(evicted)})",
        f"{len(plan.compacted):,} would be packed",
    ]
    if plan.about is not None and plan.horizon != plan.about.horizon:
        now, then = (as_old(horizon) for horizon in (plan.about.horizon, plan.horizon))
        parts.append(f"rollouts of {then} would be kept, not of {now}")
    return ", ".join(parts)


def _edges(longest: int) -> list[int]:
    """Limits of at most :data:`_BINS` bins of one round width, from 0 to beyond *longest*."""
    width, decade = 1, 1
    while width * _BINS < longest:
        factor = next((factor for factor in (2, 5, 10) if factor * decade * _BINS >= longest), None)
        if factor is None:
            decade *= 10
            continue
        width = factor * decade
    return list(range(0, max(longest, 1) + width, width))


def _count_bars(lengths: Sequence[tuple[int, bool]]) -> Table:
    """How many rollouts have which length, those that were cut off apart."""
    edges = _edges(max(length for length, _ in lengths))
    bins = [[0, 0] for _ in edges[1:]]
    for length, cut_off in lengths:
        bins[max(0, (length - 1) // edges[1])][cut_off] += 1
    most = max(sum(one) for one in bins)
    table = _table(">tokens", "", ">rollouts", ">cut off (░)")
    for low, high, (ended, cut) in zip(edges, edges[1:], bins, strict=False):
        bar = Text("█" * _part(ended, most)) + Text("░" * _part(cut, most), style="yellow")
        table.add_row(f"{low:,}–{high:,}", bar, f"{ended + cut:,}", f"{cut:,}" if cut else "")
    return table


def _shares(lengths: LengthStats) -> list[tuple[int, int | None, float]]:
    """Shares of rollouts by length: above, up to (None: whatever is longer than any that was seen), share."""
    if not lengths.count:
        return []
    edges = _edges(lengths.longest)
    reached = [lengths.longer(edge) for edge in edges]
    # the first bin has rollouts of no token as well
    reached[0] = 1.0
    bins: list[tuple[int, int | None, float]] = [
        (low, high, longer - beyond)
        for low, high, longer, beyond in zip(edges, edges[1:], reached, reached[1:], strict=False)
    ]
    return [*bins, (edges[-1], None, reached[-1])] if reached[-1] else bins


def _share_bars(bins: Sequence[tuple[int, int | None, float]]) -> Table:
    most = max(share for _, _, share in bins)
    table = _table(">tokens", "", ">share")
    for low, high, share in bins:
        if high is None:
            bar = Text("░" * _part(share, most), style="yellow")
            table.add_row("longer", bar, f"{share:.1%}", "(cut off before they ended)")
        else:
            table.add_row(f"{low:,}–{high:,}", "█" * _part(share, most), f"{share:.1%}")
    return table


def _part(value: float, most: float) -> int:
    """The length of a bar; what is there is seen."""
    return max(1, round(_BAR * value / most)) if value else 0


def _table(*columns: str) -> Table:
    """A table without lines; a column whose name begins with ``>`` is flush right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _ago(seconds: float | None) -> str:
    return "–" if seconds is None else f"{_span(seconds)} ago"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def _print_json(what: Any) -> None:
    typer.echo(json.dumps(what, indent=1))


@contextmanager
def _connected(url: str) -> Iterator[Redis]:
    """A client of the Redis at *url*; what goes wrong is said in one line."""
    with _said_plainly(url):
        client = connect_history(url)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def _said_plainly(url: str) -> Iterator[None]:
    """Say what went wrong in one line and end with its exit code; what nobody foresaw keeps its traceback."""
    try:
        yield
    except (RedisUnusableError, HistoryMismatchError) as error:
        _fail(EXIT_REDIS, str(error))
    except RedisError as error:
        _fail(EXIT_REDIS, str(explain_error(error, url)))
    except UnknownHistoryError as error:
        _fail(_EXIT_FAILED, str(error))
    except ArchiveError as error:
        _fail(EXIT_STATE, str(error))
    except OSError as error:
        _fail(EXIT_STATE, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        _fail(EXIT_INTERRUPTED, "Stopped.")


def _fail(code: int, message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(code)


def main() -> None:
    """Entry point of the ``rollout-history`` command."""
    app()


if __name__ == "__main__":
    main()
