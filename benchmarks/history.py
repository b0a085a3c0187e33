"""Measures the history: appends, bytes in Redis, and how soon new rollouts are in a worker's index.

    python -m benchmarks.history --json FILE [--trace TRACE … --tokenizer TOKENIZER] [--scale]

Each measurement starts a real Redis server on the loopback interface. The synthetic data are problems of 64 rollouts of
2,000 tokens; three fifths of them come from a template that the rollouts of a problem share. ``--scale`` adds a
hundredth of a large history.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.index import LENGTH, templated, zipf_tokens
from benchmarks.redis_server import redis_server
from benchmarks.suffix_drafters import PEER, as_int32, suffix_tree
from benchmarks.traces import Tokens, Trajectory, load_tokenizer, read_trace
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.records import CONTEXT_TOKENS, HistoryRecord, decode_records
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS

KEYS = HistoryKeys("bench", "history")
RUN = "5a0a3cb1-5c1e-4f10-9a1d-0f4f2c1b8a77"
PROBLEMS, ROLLOUTS = 32, 64
WRITERS = (1, 4, 16)
APPEND_BATCH = 64
"""Rollouts that a relay appends in one call."""
DELTAS = 100
"""Measurements of the delta sync."""
DRAFT_TOKENS = 8
WORKER_PROBLEMS = 32
"""Problems whose rollouts a worker is running."""
INDEX_BYTES = 2**31
SYNC_TIMEOUT_S = 120.0
SCALE_DIVISOR = 100
"""The scale benchmark runs with the number of problems divided by this."""
SCALE = {"problems": 40_000, "samples": 16, "versions": 16, "tokens": 8000, "workers": 256, "problems per worker": 16}
"""The large history that the scale benchmark extrapolates to."""

Problems = Mapping[str, Sequence[HistoryRecord]]


def store_at(url: str, window: int = 16) -> HistoryStore:
    """Return the history that is measured."""
    return HistoryStore(connect(url), KEYS, window=window)


def make_record(
    problem: str, number: int, tokens: Tokens, context: Tokens | None = None, generation: int = 1
) -> HistoryRecord:
    """Return a record as a relay creates it, with a rollout id of realistic length."""
    request = zlib.crc32(f"{problem}/{generation}".encode())
    rollout_id = f"{RUN}/trainer:{generation}:{request % 1000}-{request:012x}/{number}/0"
    context = np.empty(0, np.uint32) if context is None else context
    tokens = np.asarray(tokens, dtype=np.uint32)
    return HistoryRecord(rollout_id, RUN, generation, generation, tokens, "stop", context, generation)


def synthetic(problems: int, rollouts: int, rng: np.random.Generator) -> dict[str, list[HistoryRecord]]:
    """Return problems with rollouts that share a template."""
    names = [f"{number:032x}" for number in range(problems)]
    return {
        name: [make_record(name, sample, tokens) for sample, tokens in enumerate(templated(rng, rollouts))]
        for name in names
    }


def recorded(trajectories: Sequence[Trajectory]) -> dict[str, list[HistoryRecord]]:
    """Return the turns of a trace by problem; as in a job, later turns have the tokens before them as context."""
    problems: defaultdict[str, list[HistoryRecord]] = defaultdict(list)
    for trajectory in trajectories:
        before, turns = [trajectory.prompt], 0
        for segment in trajectory.segments:
            if segment.generated:
                context = np.concatenate(before)[-CONTEXT_TOKENS:].astype(np.uint32) if turns else None
                records = problems[trajectory.problem]
                records.append(make_record(trajectory.problem, len(records), segment.tokens, context))
                turns += 1
            before.append(segment.tokens)
    return dict(problems)


def count_tokens(problems: Problems) -> int:
    """Return the tokens of all responses."""
    return sum(len(record.tokens) for records in problems.values() for record in records)


def wait_ready(sync: HistorySync) -> None:
    """Wait until the history of all announced problems is in the index.

    Raises:
        RuntimeError: if that takes longer than :data:`SYNC_TIMEOUT_S`.
    """
    if not sync.wait_ready(SYNC_TIMEOUT_S):
        raise RuntimeError(f"the history was not in the index after {SYNC_TIMEOUT_S:g} s: {sync.counters}")


def append(store: HistoryStore, problems: Problems) -> None:
    """Append all records in batches, as a relay does."""
    pairs = [(problem, record) for problem, records in problems.items() for record in records]
    for first in range(0, len(pairs), APPEND_BATCH):
        store.append_all(pairs[first : first + APPEND_BATCH])


def compact(store: HistoryStore, problems: Problems) -> None:
    """Compact all problems completely."""
    operations = MaintenanceOperations(store)
    for problem in problems:
        while operations.compact(problem):
            pass


# Appends


def _write(url: str, number: int, count: int, begin: Any, ended: Any) -> None:
    rng = np.random.default_rng(number)
    store = store_at(url)
    pairs = []
    for rollout in range(count):
        problem = f"{number}-{rollout % 8}"
        pairs.append((problem, make_record(problem, rollout, zipf_tokens(rng, LENGTH))))
    store.metadata.generation()
    begin.wait()
    for first in range(0, count, APPEND_BATCH):
        store.append_all(pairs[first : first + APPEND_BATCH])
    ended.put(time.monotonic())


def append_rate(writers: int, count: int) -> float:
    """Return the rollouts per second that *writers* processes append, with *count* rollouts of 2,000 tokens each."""
    with redis_server() as url:
        begin, ended = multiprocessing.Event(), multiprocessing.Queue()
        processes = [
            multiprocessing.Process(target=_write, args=(url, number, count, begin, ended)) for number in range(writers)
        ]
        for process in processes:
            process.start()
        while len(connect(url).client_list()) < writers:
            time.sleep(0.05)
        time.sleep(0.2)
        started = time.monotonic()
        begin.set()
        last = max(ended.get() for _ in processes)
        for process in processes:
            process.join()
    return writers * count / (last - started)


# Bytes


def bytes_in_redis(problems: Problems) -> tuple[float, float]:
    """Return the bytes per token by MEMORY USAGE of all keys of the history, before and after compaction."""
    with redis_server() as url:
        client, store = connect(url), store_at(url)
        store.metadata.open("tokenizer")
        append(store, problems)

        def usage() -> float:
            return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter(count=1000))

        before = usage()
        compact(store, problems)
        return before / count_tokens(problems), usage() / count_tokens(problems)


def codecs(problems: Problems) -> dict[str, dict[str, float]]:
    """Compare ways to encode the token ids of a problem.

    Returns:
        By codec: bytes per token, and millions of tokens decoded per second of CPU time.

    Raises:
        RuntimeError: if a codec does not restore the token ids.
    """
    count = count_tokens(problems)
    wide = any(int(record.tokens.max(initial=0)) >= 2**16 for records in problems.values() for record in records)
    dtype = np.dtype("<u4" if wide else "<u2")
    plain = [
        np.concatenate([record.tokens for record in records]).astype(dtype).tobytes() for records in problems.values()
    ]
    results = {}
    for name, (encode, decode) in _codecs(plain, dtype).items():
        encoded = [encode(data) for data in plain]
        started = time.process_time()
        decoded = [decode(data) for data in encoded]
        seconds = time.process_time() - started
        if decoded != plain:
            raise RuntimeError(f"the codec {name} does not restore what was encoded")
        results[name] = {
            "bytes per token": sum(map(len, encoded)) / count,
            "decoded, million tokens/s": count / max(seconds, 1e-9) / 1e6,
        }
    return results


_Codec = Callable[[bytes], bytes]


def _codecs(plain: Sequence[bytes], dtype: np.dtype[Any]) -> dict[str, tuple[_Codec, _Codec]]:
    """Return an encoder and a decoder by name."""
    dictionary = zstandard.train_dictionary(64 * 1024, list(plain) * max(1, 8 // len(plain)))
    return {
        "plain": (lambda data: data, lambda data: data),
        "msgpack integers": (
            lambda data: msgpack.packb(np.frombuffer(data, dtype).tolist()),
            lambda data: np.array(msgpack.unpackb(data), dtype).tobytes(),
        ),
        "bit-packed": (
            lambda data: _bit_pack(data, dtype),
            lambda data: _bit_unpack(data, dtype),
        ),
        "delta, zstd 9": (
            lambda data: zstandard.compress(_delta(data, dtype), 9),
            lambda data: _undelta(zstandard.decompress(data), dtype),
        ),
        "zlib 6": (zlib.compress, zlib.decompress),
        **{
            f"zstd {level}": (lambda data, level=level: zstandard.compress(data, level), zstandard.decompress)
            for level in (3, 9, 19)
        },
        "zstd 9, dictionary of 64 KiB": (
            zstandard.ZstdCompressor(level=9, dict_data=dictionary).compress,
            zstandard.ZstdDecompressor(dict_data=dictionary).decompress,
        ),
    }


def _bit_pack(data: bytes, dtype: Any) -> bytes:
    ids = np.frombuffer(data, dtype)
    width = max(1, int(ids.max(initial=0)).bit_length())
    bits = (ids[:, None] >> np.arange(width, dtype=ids.dtype)) & 1
    return bytes([width]) + len(ids).to_bytes(4, "little") + np.packbits(bits.astype(np.uint8)).tobytes()


def _bit_unpack(data: bytes, dtype: Any) -> bytes:
    width, count = data[0], int.from_bytes(data[1:5], "little")
    bits = np.unpackbits(np.frombuffer(data[5:], np.uint8))[: width * count].reshape(count, width)
    packed: bytes = (bits.astype(np.uint32) << np.arange(width, dtype=np.uint32)).sum(axis=1).astype(dtype).tobytes()
    return packed


def _delta(data: bytes, dtype: Any) -> bytes:
    ids = np.frombuffer(data, dtype)
    return np.diff(ids, prepend=ids[:1] * 0).tobytes()


def _undelta(data: bytes, dtype: Any) -> bytes:
    return np.cumsum(np.frombuffer(data, dtype), dtype=dtype).tobytes()


# Synchronization


class _TimedIndex(SuffixIndex):
    """An index that measures the time it spends in building."""

    def __init__(self) -> None:
        super().__init__(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        self.build_seconds = 0.0

    def add(self, problem: str, rollouts: Any) -> int:
        """Add rollouts and measure the time."""
        started = time.perf_counter()
        added = super().add(problem, rollouts)
        self.build_seconds += time.perf_counter() - started
        return added


def cold_sync(problems: Problems, *, compacted: bool) -> dict[str, float]:
    """Measure how long it takes until all problems are in a new index.

    Returns:
        The seconds from the announcement until the index is complete, and the tokens per second of decoding and
        building alone.
    """
    with redis_server() as url:
        store = store_at(url)
        store.metadata.open("tokenizer")
        append(store, problems)
        if compacted:
            compact(store, problems)
        index = _TimedIndex()
        sync = HistorySync(store_at(url), index)
        sync.start()
        started = time.perf_counter()
        sync.announce(problems)
        wait_ready(sync)
        seconds = time.perf_counter() - started
        sync.stop()
        if sync.counters.tokens != count_tokens(problems):
            raise RuntimeError(f"{sync.counters.tokens} of {count_tokens(problems)} tokens were read")
        encoded = [
            value
            for problem in problems
            for value in (
                connect(url).hvals(KEYS.blocks(problem))
                if compacted
                else [fields[b"d"] for _, fields in connect(url).xrange(KEYS.log(problem))]
            )
        ]
        started = time.perf_counter()
        for value in encoded:
            decode_records(value)
        decode_seconds = time.perf_counter() - started
    tokens_per_s = count_tokens(problems) / (decode_seconds + index.build_seconds)
    return {"seconds": seconds, "decode and build, tokens/s": tokens_per_s}


def build_peer_trees(problems: Problems) -> float:
    """Return the seconds that the peer takes to build one tree per problem from tokens in memory."""
    started = time.perf_counter()
    for records in problems.values():
        tree = suffix_tree(64)
        for number, record in enumerate(records):
            tree.extend(number, as_int32(record.tokens))
    return time.perf_counter() - started


def delta_sync(problems: Problems, rng: np.random.Generator) -> list[float]:
    """Return the seconds from each of several appends until the rollout is in the index of a worker that follows."""
    names = list(problems)
    with redis_server() as url:
        store = store_at(url)
        append(store, problems)
        index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        sync = HistorySync(store_at(url), index)
        sync.start()
        sync.announce(names)
        wait_ready(sync)
        delays = []
        for number in range(DELTAS):
            name = names[number % len(names)]
            new = make_record(name, 100_000 + number, zipf_tokens(rng, LENGTH))
            time.sleep(float(rng.random()) * 0.3)  # Append at a random moment between two polls of the worker.
            started = time.perf_counter()
            store.append(name, new)
            expected = len(problems[name]) + number // len(names) + 1
            while len(index.rollouts(name)) < expected:
                time.sleep(0.001)
            delays.append(time.perf_counter() - started)
        sync.stop()
    return delays


# Replacement of a worker


def _accepted_per_step(index: SuffixIndex, rollouts: Mapping[str, Tokens]) -> float:
    """Replay one rollout per problem, one after the other, and return the accepted draft tokens per step."""
    accepted = steps = 0
    for problem, tokens in rollouts.items():
        handle, recorded_tokens, position = index.open(problem), tokens.tolist(), 0
        while position < len(recorded_tokens):
            draft = index.draft(handle, DRAFT_TOKENS).tokens
            pairs = zip(draft, recorded_tokens[position:], strict=False)
            correct = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            index.extend(handle, recorded_tokens[position : position + correct + 1])
            position, accepted, steps = position + correct + 1, accepted + correct, steps + 1
        index.close(handle)
    return accepted / steps


def _start_worker(url: str, problems: Sequence[str]) -> tuple[float, SuffixIndex]:
    """Return the seconds until a new index holds the whole history of *problems*, and the index."""
    index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
    started = time.perf_counter()
    sync = HistorySync(store_at(url), index)
    sync.start()
    sync.announce(problems)
    wait_ready(sync)
    seconds = time.perf_counter() - started
    sync.stop()
    return seconds, index


def _run_replacement(url: str, rollouts: Mapping[str, Tokens], answer: Any) -> None:
    seconds, index = _start_worker(url, list(rollouts))
    answer.put((seconds, _accepted_per_step(index, rollouts)))


def warm_start(problems: Problems) -> dict[str, float]:
    """Measure how soon, and how well, a new worker drafts from the history of a worker that was lost.

    The last two rollouts of each problem are not in the history. The lost worker drafted for the first of them and
    adapted to it; the second is replayed after the loss.
    """
    several = ((name, records) for name, records in problems.items() if len(records) > 3)
    chosen = dict(islice(several, WORKER_PROBLEMS))
    history = {name: records[:-2] for name, records in chosen.items()}
    context = multiprocessing.get_context("spawn")
    with redis_server() as url:
        store = store_at(url)
        store.metadata.open("tokenizer")
        append(store, history)
        for name in chosen:
            MaintenanceOperations(store).compact(name)
        _, lost = _start_worker(url, list(chosen))
        _accepted_per_step(lost, {name: records[-2].tokens for name, records in chosen.items()})
        rollouts = {name: records[-1].tokens for name, records in chosen.items()}
        answer = context.Queue()
        process = context.Process(target=_run_replacement, args=(url, rollouts, answer))
        process.start()
        seconds, replaced = answer.get()
        process.join()
        empty = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        return {
            "seconds": seconds,
            "tokens": count_tokens(history),
            "accepted per step, replacement": replaced,
            "accepted per step, lost worker": _accepted_per_step(lost, rollouts),
            "accepted per step, without history": _accepted_per_step(empty, rollouts),
        }


# Scale


def scale(rng: np.random.Generator) -> dict[str, Any]:
    """Measure a hundredth of a large history.

    Every problem is sampled and compacted once per version, and a worker reads its problems at the start of each
    version.
    """
    count, window = SCALE["problems"] // SCALE_DIVISOR, SCALE["versions"]
    names = [f"{number:032x}" for number in range(count)]
    templates = [zipf_tokens(rng, SCALE["tokens"]) for _ in range(count)]
    results: dict[str, Any] = {}
    with redis_server() as url:
        client, store = connect(url), store_at(url, window)
        store.metadata.open("tokenizer", max_bytes=2**40)
        appending = compacting = syncing = 0.0
        tokens = sent = synced = 0
        index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        sync = HistorySync(store_at(url, window), index)
        sync.start()
        of_worker = names[: SCALE["problems per worker"]]

        def network() -> int:
            return int(client.info("stats")["total_net_output_bytes"])

        for version in range(1, window + 3):
            generation = store.metadata.publish(RUN, version)
            # The worker reads the rollouts of the version before, which are compacted by now.
            before, started = network(), time.perf_counter()
            sync.announce(of_worker)
            wait_ready(sync)
            if version > 2:
                syncing += time.perf_counter() - started
                sent += network() - before
                synced += 1
            sync.announce([])
            wait_ready(sync)
            rollouts: list[tuple[str, HistoryRecord]] = []
            for name, template in zip(names, templates, strict=True):
                for sample in range(SCALE["samples"]):
                    rollout = template.copy()
                    for first in rng.integers(0, len(rollout) - 60, len(rollout) // 60):
                        rollout[first : first + 24] = zipf_tokens(rng, 24)
                    rollouts.append((name, make_record(name, sample, rollout, generation=generation)))
                if len(rollouts) >= 512 or name == names[-1]:
                    started = time.perf_counter()
                    for first in range(0, len(rollouts), APPEND_BATCH):
                        store.append_all(rollouts[first : first + APPEND_BATCH], newest=generation)
                    appending += time.perf_counter() - started
                    tokens += sum(len(record.tokens) for _, record in rollouts)
                    rollouts = []
            started = time.perf_counter()
            operations = MaintenanceOperations(store)
            for name in names:
                operations.compact(name)
            compacting += time.perf_counter() - started
        sync.stop()
        stored = sum(problem.bytes for problem in store.catalog.problems())
        in_window = count * SCALE["samples"] * window * SCALE["tokens"]
        results["bytes per token of the window"] = stored / in_window
        results["bytes, whole history"] = stored * SCALE_DIVISOR
        results["resident bytes, by Redis"] = client.info("memory")["used_memory"]
        results["appended, tokens/s, one writer"] = tokens / appending
        results["compacted, tokens/s, one service"] = tokens / compacting
        results["delta of one worker per batch, bytes"] = sent / synced
        results["delta of one worker per batch, seconds"] = syncing / synced
        results["deltas of all workers per batch, bytes"] = SCALE["workers"] * sent / synced
        results["deltas of an epoch, bytes"] = SCALE["problems"] / SCALE["problems per worker"] * sent / synced
        cold = HistorySync(store_at(url, window), SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS))
        cold.start()
        before, started = network(), time.perf_counter()
        cold.announce(of_worker)
        wait_ready(cold)
        results["whole history of a new worker, seconds"] = time.perf_counter() - started
        results["whole history of a new worker, bytes"] = network() - before
        results["whole history of a new worker, tokens"] = cold.counters.tokens
        cold.stop()
        shards = [client.zcard(KEYS.last_used(shard)) for shard in range(16)]
        results["problems per shard"] = {"min": min(shards), "max": max(shards)}
    return results


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="trace files to measure as well")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, optionally gzipped; required with --trace")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement [%(default)s]")
    parser.add_argument("--scale", action="store_true", help="also measure a hundredth of a large history (minutes)")
    options = parser.parse_args()
    if options.trace and not options.tokenizer:
        parser.error("--trace requires --tokenizer")

    figures: list[Figure] = []
    details: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    problems = synthetic(PROBLEMS, ROLLOUTS, rng)
    for writers in WRITERS:
        rates = spread([append_rate(writers, 4096 // writers) for _ in range(options.rounds)])
        name = f"append rate, {writers} {'writer' if writers == 1 else 'writers'}"
        details[name] = rates
        figures.append(Figure(name, rates["median"], "rollouts/s", "", ">=", None))

    datasets: dict[str, Problems] = {"synthetic": problems}
    if options.trace:
        tokenizer = load_tokenizer(options.tokenizer)
        datasets |= {file.name.partition(".")[0]: recorded(read_trace(file, tokenizer)) for file in options.trace}
    for name, data in datasets.items():
        before, after = bytes_in_redis(data)
        target = None if name == "synthetic" else 2.0
        figures.append(Figure(f"bytes per token in Redis, {name}", after, "B", "", "<=", target))
        figures.append(Figure(f"bytes per token before compaction, {name}", before, "B", "", "<=", None))
        details[f"codecs, {name}"] = codecs(data)

    figures += _measure_cold_sync(problems, options.rounds, details)
    delays = delta_sync({name: problems[name][:8] for name in list(problems)[:16]}, rng)
    figures += [
        Figure("delta sync, median", quantile(delays, 0.5), "s", "", "<=", None),
        Figure("delta sync, p99", quantile(delays, 0.99), "s", "", "<=", None),
    ]
    for name, data in datasets.items():
        starts = [warm_start(data) for _ in range(options.rounds)]
        details[f"warm start, {name}"] = starts
        seconds = spread([start["seconds"] for start in starts])["median"]
        figures.append(Figure(f"warm start, {name}", seconds, "s", "", "<=", None))
        for peer in ("lost worker", "without history"):
            ratios = [start["accepted per step, replacement"] / start[f"accepted per step, {peer}"] for start in starts]
            ratio = spread(ratios)["median"]
            figures.append(
                Figure(f"accepted per step of a replacement, {name}", ratio, "of the peer's", peer, ">=", None)
            )
    if options.scale:
        details["scale"] = {**SCALE, "divisor": SCALE_DIVISOR, **scale(rng)}
        for name, value in details["scale"].items():
            print(f"scale: {name}: {value}")
        figures += [
            Figure(f"scale: {name}", details["scale"][name], unit, "", "<=", None)
            for name, unit in (
                ("bytes per token of the window", "B"),
                ("bytes, whole history", "B"),
                ("deltas of all workers per batch, bytes", "B"),
                ("delta of one worker per batch, seconds", "s"),
                ("whole history of a new worker, seconds", "s"),
            )
        ]
    report(options.json, figures, **details)


def _measure_cold_sync(problems: Problems, rounds: int, details: dict[str, Any]) -> list[Figure]:
    """Return the figures of the cold sync, and add its measurements to *details*."""
    compacted = [cold_sync(problems, compacted=True) for _ in range(rounds)]
    logs = [cold_sync(problems, compacted=False) for _ in range(rounds)]
    peer = [build_peer_trees(problems) for _ in range(rounds)]
    details |= {"cold sync": compacted, "cold sync, not compacted": logs, "seconds of the peer's trees": peer}
    size = f"{PROBLEMS} problems x {ROLLOUTS} rollouts x {LENGTH} tokens"
    rates = [row["decode and build, tokens/s"] for row in compacted]
    ratios = [row["seconds"] / peer_seconds for row, peer_seconds in zip(compacted, peer, strict=True)]
    return [
        Figure(f"cold sync, {size}", spread([row["seconds"] for row in compacted])["median"], "s", "", "<=", 1.5),
        Figure("decode and build", spread(rates)["median"], "tokens/s", "", ">=", 10e6),
        Figure(
            "cold sync, relative to building trees from memory",
            spread(ratios)["median"],
            "of the peer's",
            PEER,
            "<=",
            None,
        ),
        Figure("cold sync, not compacted", spread([row["seconds"] for row in logs])["median"], "s", "", "<=", None),
    ]


if __name__ == "__main__":
    main()
