"""What the history costs: appends, bytes in Redis, and how soon it is in an index.

    python -m benchmarks.history --json FILE [--trace TRACE … --tokenizer TOKENIZER] [--scale]

Redis is a real server on the loopback, started for each measurement. Synthetic are problems of 64 rollouts of 2,000
tokens, three fifths of them from a template that they share. ``--scale`` adds a hundredth of a large history.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.index import LENGTH, templated, words
from benchmarks.suffix_drafters import PEER, signed, suffix_tree
from benchmarks.traces import Tokens, Trajectory, load_tokenizer, read_trace
from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.history.connection import connect
from rollout_worker.history.records import CONTEXT_TOKENS, HistoryRecord, decode_records
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.sync import HistorySync

KEYS = HistoryKeys("bench", "history")
RUN = "5a0a3cb1-5c1e-4f10-9a1d-0f4f2c1b8a77"
PROBLEMS, ROLLOUTS = 32, 64
WRITERS = (1, 4, 16)
BATCH = 64
"""Rollouts that a relay carries at once."""
DELTAS = 100
DRAFTED = 8
AT_ONCE = 32
"""Problems of which a worker has rollouts running."""
INDEX_BYTES = 2**31
SHARE = 100
"""The scale benchmark is this part of the history in question."""
SCALE = {"problems": 40_000, "samples": 16, "versions": 16, "tokens": 8000, "workers": 256, "problems a worker": 16}

Problems = Mapping[str, Sequence[HistoryRecord]]


@contextmanager
def server() -> Iterator[str]:
    """URL of an empty Redis."""
    with tempfile.TemporaryDirectory() as directory:
        lock = os.open(Path(directory) / "lock", os.O_CREAT | os.O_RDWR)
        embedded = EmbeddedRedis(Path(directory) / "redis", keep_open=lock)
        try:
            yield embedded.start()
        finally:
            embedded.stop()
            os.close(lock)


def store_at(url: str, window: int = 16) -> HistoryStore:
    """The history that is measured."""
    return HistoryStore(connect(url), KEYS, window=window)


def record(
    problem: str, number: int, tokens: Tokens, context: Tokens | None = None, generation: int = 1
) -> HistoryRecord:
    """As a relay makes it, its id as long as real ones."""
    request = zlib.crc32(f"{problem}/{generation}".encode())
    ids = f"{RUN}/trainer:{generation}:{request % 1000}-{request:012x}/{number}/0"
    context = np.empty(0, np.uint32) if context is None else context
    tokens = np.asarray(tokens, dtype=np.uint32)
    return HistoryRecord(ids, RUN, generation, generation, tokens, "stop", context, generation)


def synthetic(problems: int, rollouts: int, rng: np.random.Generator) -> dict[str, list[HistoryRecord]]:
    """Problems with rollouts that share a template."""
    names = [f"{number:032x}" for number in range(problems)]
    return {
        name: [record(name, sample, tokens) for sample, tokens in enumerate(templated(rng, rollouts))] for name in names
    }


def recorded(trajectories: Sequence[Trajectory]) -> dict[str, list[HistoryRecord]]:
    """The turns of a trace, each with the tokens before it, as a job records them."""
    made: defaultdict[str, list[HistoryRecord]] = defaultdict(list)
    for trajectory in trajectories:
        before, turns = [trajectory.prompt], 0
        for segment in trajectory.segments:
            if segment.generated:
                context = np.concatenate(before)[-CONTEXT_TOKENS:].astype(np.uint32) if turns else None
                name = trajectory.problem
                made[name].append(record(name, len(made[name]), segment.tokens, context))
                turns += 1
            before.append(segment.tokens)
    return dict(made)


def tokens_of(problems: Problems) -> int:
    """Of all responses."""
    return sum(len(one.tokens) for records in problems.values() for one in records)


def wait_ready(sync: HistorySync) -> None:
    """Wait until all that was announced is in the index."""
    if not sync.wait_ready(120):
        raise RuntimeError(f"the history is not in the index after 120 s: {sync.counters}")


def append(store: HistoryStore, problems: Problems) -> None:
    """As a relay does it."""
    pairs = [(problem, one) for problem, records in problems.items() for one in records]
    for at in range(0, len(pairs), BATCH):
        store.append_all(pairs[at : at + BATCH])


# appends


def _write(url: str, number: int, count: int, begin: Any, ended: Any) -> None:
    rng = np.random.default_rng(number)
    store = store_at(url)
    pairs = [(f"{number}-{one % 8}", record(f"{number}-{one % 8}", one, words(rng, LENGTH))) for one in range(count)]
    store.generation()
    begin.wait()
    for at in range(0, count, BATCH):
        store.append_all(pairs[at : at + BATCH])
    ended.put(time.monotonic())


def append_rate(writers: int, count: int) -> float:
    """Rollouts of 2,000 tokens a second, by so many processes that append *count* each."""
    with server() as url:
        begin, ended = multiprocessing.Event(), multiprocessing.Queue()
        processes = [
            multiprocessing.Process(target=_write, args=(url, number, count, begin, ended)) for number in range(writers)
        ]
        for process in processes:
            process.start()
        while len(connect(url).client_list()) < writers:
            time.sleep(0.05)
        time.sleep(0.2)
        began = time.monotonic()
        begin.set()
        last = max(ended.get() for _ in processes)
        for process in processes:
            process.join()
    return writers * count / (last - began)


# bytes


def bytes_in_redis(problems: Problems) -> tuple[float, float]:
    """Bytes a token by MEMORY USAGE of all keys of the history, as appended and compacted."""
    with server() as url:
        client, store = connect(url), store_at(url)
        store.open("tokenizer")
        append(store, problems)

        def usage() -> float:
            return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter(count=1000))

        before = usage()
        for problem in problems:
            while store.compact(problem):
                pass
        return before / tokens_of(problems), usage() / tokens_of(problems)


def codecs(problems: Problems) -> dict[str, dict[str, float]]:
    """Ways to write a problem's token ids: bytes a token, and million tokens a second read."""
    count = tokens_of(problems)
    samples = [np.concatenate([one.tokens for one in records]).astype("<u2") for records in problems.values()]
    if any(int(one.tokens.max(initial=0)) >= 2**16 for records in problems.values() for one in records):
        samples = [np.concatenate([one.tokens for one in records]).astype("<u4") for records in problems.values()]
    plain = [one.tobytes() for one in samples]
    dictionary = zstandard.train_dictionary(64 * 1024, plain * max(1, 8 // len(plain)))
    ways: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "plain": (lambda data: data, lambda data: data),
        "msgpack of numbers": (
            lambda data: msgpack.packb(np.frombuffer(data, samples[0].dtype).tolist()),
            lambda data: np.array(msgpack.unpackb(data), samples[0].dtype).tobytes(),
        ),
        "bit-packed": (
            lambda data: _bit_pack(data, samples[0].dtype),
            lambda data: _bit_unpack(data, samples[0].dtype),
        ),
        "delta, zstd 9": (
            lambda data: zstandard.compress(_delta(data, samples[0].dtype), 9),
            lambda data: _undelta(zstandard.decompress(data), samples[0].dtype),
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
    found = {}
    for name, (write, read) in ways.items():
        written = [write(data) for data in plain]
        began = time.process_time()
        back = [read(data) for data in written]
        seconds = time.process_time() - began
        if back != plain:
            raise RuntimeError(f"{name} does not bring back what was written")
        found[name] = {
            "bytes a token": sum(map(len, written)) / count,
            "read, million tokens a second": count / max(seconds, 1e-9) / 1e6,
        }
    return found


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


# reading


class _Timed(SuffixIndex):
    """An index that knows how long it took to build."""

    def __init__(self) -> None:
        super().__init__(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        self.seconds = 0.0

    def add(self, problem: str, rollouts: Any) -> int:
        """As an index does."""
        began = time.perf_counter()
        added = super().add(problem, rollouts)
        self.seconds += time.perf_counter() - began
        return added


def cold_sync(problems: Problems, *, compacted: bool) -> dict[str, float]:
    """Seconds until all problems are in a new index, and tokens decoded and built a second of that."""
    with server() as url:
        store = store_at(url)
        store.open("tokenizer")
        append(store, problems)
        if compacted:
            for problem in problems:
                while store.compact(problem):
                    pass
        timed = _Timed()
        sync = HistorySync(store_at(url), timed)
        sync.start()
        began = time.perf_counter()
        sync.announce(problems, 1)
        wait_ready(sync)
        seconds = time.perf_counter() - began
        sync.stop()
        if sync.counters.tokens != tokens_of(problems):
            raise RuntimeError(f"{sync.counters.tokens} tokens came of {tokens_of(problems)}")
        data = [
            value
            for problem in problems
            for value in (
                connect(url).hvals(KEYS.blocks(problem))
                if compacted
                else [fields[b"d"] for _, fields in connect(url).xrange(KEYS.log(problem))]
            )
        ]
        began = time.perf_counter()
        for value in data:
            decode_records(value)
        decoding = time.perf_counter() - began
    return {"seconds": seconds, "decode and build, tokens/s": tokens_of(problems) / (decoding + timed.seconds)}


def peers_trees(problems: Problems) -> float:
    """Seconds in which the peer builds a tree for each problem, from tokens in memory."""
    began = time.perf_counter()
    for records in problems.values():
        tree = suffix_tree(64)
        for number, one in enumerate(records):
            tree.extend(number, signed(one.tokens))
    return time.perf_counter() - began


def delta_sync(problems: Problems, rng: np.random.Generator) -> list[float]:
    """Seconds from an append to its being in the index of a worker that follows *problems*, for each of some."""
    names = list(problems)
    with server() as url:
        store = store_at(url)
        append(store, problems)
        index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        sync = HistorySync(store_at(url), index)
        sync.start()
        sync.announce(names, 1)
        wait_ready(sync)
        delays = []
        for number in range(DELTAS):
            name = names[number % len(names)]
            one = record(name, 100_000 + number, words(rng, LENGTH))
            time.sleep(float(rng.random()) * 0.3)
            began = time.perf_counter()
            store.append(name, one)
            known = len(problems[name]) + number // len(names) + 1
            while len(index.rollouts(name)) < known:
                time.sleep(0.001)
            delays.append(time.perf_counter() - began)
        sync.stop()
    return delays


# a worker that takes another's place


def _accepted_per_step(index: SuffixIndex, rollouts: Mapping[str, Tokens]) -> float:
    """Drafted tokens that are accepted in a verification step, one rollout after the other, of each problem one."""
    accepted = steps = 0
    for problem, tokens in rollouts.items():
        handle, said, at = index.open(problem), tokens.tolist(), 0
        while at < len(said):
            draft = index.draft(handle, DRAFTED).tokens
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, said[at:], strict=False)))
            index.extend(handle, said[at : at + right + 1])
            at, accepted, steps = at + right + 1, accepted + right, steps + 1
        index.close(handle)
    return accepted / steps


def _start(url: str, problems: Sequence[str]) -> tuple[float, SuffixIndex]:
    """A worker's index, and the seconds until all history of *problems* was in it."""
    index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
    began = time.perf_counter()
    sync = HistorySync(store_at(url), index)
    sync.start()
    sync.announce(problems, 1)
    wait_ready(sync)
    seconds = time.perf_counter() - began
    sync.stop()
    return seconds, index


def _replacement(url: str, rollouts: Mapping[str, Tokens], answer: Any) -> None:
    seconds, index = _start(url, list(rollouts))
    answer.put((seconds, _accepted_per_step(index, rollouts)))


def warm_start(problems: Problems) -> dict[str, float]:
    """A worker that has drafted dies; how soon another process drafts from the history, and how well.

    Of each problem the last two rollouts are not in the history: from the first the worker has learned, the second
    comes after its death.
    """
    chosen = dict(islice(((name, records) for name, records in problems.items() if len(records) > 3), AT_ONCE))
    context = multiprocessing.get_context("spawn")
    with server() as url:
        store = store_at(url)
        store.open("tokenizer")
        append(store, {name: records[:-2] for name, records in chosen.items()})
        for name in chosen:
            store.compact(name)
        _, first = _start(url, list(chosen))
        _accepted_per_step(first, {name: records[-2].tokens for name, records in chosen.items()})
        rollouts = {name: records[-1].tokens for name, records in chosen.items()}
        answer = context.Queue()
        process = context.Process(target=_replacement, args=(url, rollouts, answer))
        process.start()
        seconds, replaced = answer.get()
        process.join()
        empty = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        return {
            "seconds": seconds,
            "tokens": tokens_of({name: records[:-2] for name, records in chosen.items()}),
            "accepted a step, replaced": replaced,
            "accepted a step, as it was": _accepted_per_step(first, rollouts),
            "accepted a step, without history": _accepted_per_step(empty, rollouts),
        }


# scale


def scale(rng: np.random.Generator) -> dict[str, Any]:
    """A hundredth of a large history: problems sampled once a version, packed, and read by a worker for the next."""
    count, window = SCALE["problems"] // SHARE, SCALE["versions"]
    templates = [words(rng, SCALE["tokens"]) for _ in range(count)]
    pages: dict[str, Any] = {}
    with server() as url:
        client, store = connect(url), store_at(url, window)
        store.open("tokenizer", max_bytes=2**40)
        appending = compacting = syncing = 0.0
        tokens = sent = synced = 0
        index = SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS)
        sync = HistorySync(store_at(url, window), index)
        sync.start()
        mine = [f"{number:032x}" for number in range(SCALE["problems a worker"])]

        def network() -> int:
            return int(client.info("stats")["total_net_output_bytes"])

        for version in range(1, window + 3):
            generation = store.publish(RUN, version)
            # an epoch begins with what the one before it has left, packed by then
            before, began = network(), time.perf_counter()
            sync.announce(mine, generation)
            wait_ready(sync)
            if version > 2:
                syncing += time.perf_counter() - began
                sent += network() - before
                synced += 1
            sync.announce([], generation)
            wait_ready(sync)
            rollouts: list[tuple[str, HistoryRecord]] = []
            for number, template in enumerate(templates):
                name = f"{number:032x}"
                for sample in range(SCALE["samples"]):
                    said = template.copy()
                    for at in rng.integers(0, len(said) - 60, len(said) // 60):
                        said[at : at + 24] = words(rng, 24)
                    rollouts.append((name, record(name, sample, said, generation=generation)))
                if len(rollouts) >= 512 or number == count - 1:
                    began = time.perf_counter()
                    for at in range(0, len(rollouts), BATCH):
                        store.append_all(rollouts[at : at + BATCH], newest=generation)
                    appending += time.perf_counter() - began
                    tokens += sum(len(one.tokens) for _, one in rollouts)
                    rollouts = []
            began = time.perf_counter()
            for number in range(count):
                store.compact(f"{number:032x}")
            compacting += time.perf_counter() - began
        sync.stop()
        known = store.problems()
        kept = sum(one.bytes for one in known)
        in_window = count * SCALE["samples"] * window * SCALE["tokens"]
        pages["bytes a token of the window"] = kept / in_window
        pages["bytes, whole history"] = kept * SHARE
        pages["resident, by Redis"] = client.info("memory")["used_memory"]
        pages["appended, tokens/s, one writer"] = tokens / appending
        pages["compacted, tokens/s, one service"] = tokens / compacting
        pages["a worker's delta for a batch, bytes"] = sent / synced
        pages["a worker's delta for a batch, seconds"] = syncing / synced
        pages["all workers' deltas for a batch, bytes"] = SCALE["workers"] * sent / synced
        pages["deltas of an epoch, bytes"] = SCALE["problems"] / SCALE["problems a worker"] * sent / synced
        cold = HistorySync(store_at(url, window), SuffixIndex(max_bytes=INDEX_BYTES, pool_tokens=POOL_TOKENS))
        cold.start()
        before, began = network(), time.perf_counter()
        cold.announce(mine, store.generation())
        wait_ready(cold)
        pages["a new worker's whole history, seconds"] = time.perf_counter() - began
        pages["a new worker's whole history, bytes"] = network() - before
        pages["a new worker's whole history, tokens"] = cold.counters.tokens
        cold.stop()
        shards = [client.zcard(KEYS.used(shard)) for shard in range(16)]
        pages["problems of a shard"] = {"least": min(shards), "most": max(shards)}
    return pages


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write")
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", action="store_true", help="simulate a hundredth of a large history (minutes)")
    options = parser.parse_args()
    if options.trace and not options.tokenizer:
        parser.error("--trace needs the --tokenizer that its text is read with")

    figures: list[Figure] = []
    details: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    problems = synthetic(PROBLEMS, ROLLOUTS, rng)
    for writers in WRITERS:
        rates = [append_rate(writers, 4096 // writers) for _ in range(options.rounds)]
        details[f"appends, {writers} writers"] = spread(rates)
        figures.append(Figure(f"appends, {writers} writers", spread(rates)["median"], "rollouts/s", "", ">=", None))

    sets: dict[str, Problems] = {"synthetic": problems}
    if options.trace:
        tokenizer = load_tokenizer(options.tokenizer)
        sets |= {file.name.partition(".")[0]: recorded(read_trace(file, tokenizer)) for file in options.trace}
    for name, data in sets.items():
        before, after = bytes_in_redis(data)
        target = None if name == "synthetic" else 2.0
        figures.append(Figure(f"bytes a token in Redis, {name}", after, "B", "", "<=", target))
        figures.append(Figure(f"bytes a token before compaction, {name}", before, "B", "", "<=", None))
        details[f"codecs, {name}"] = codecs(data)

    cold = [cold_sync(problems, compacted=True) for _ in range(options.rounds)]
    logs = [cold_sync(problems, compacted=False) for _ in range(options.rounds)]
    peer = [peers_trees(problems) for _ in range(options.rounds)]
    size = f"{PROBLEMS} problems x {ROLLOUTS} rollouts x {LENGTH} tokens"
    rate = "decode and build, tokens/s"
    figures += [
        Figure(f"cold sync, {size}", spread([one["seconds"] for one in cold])["median"], "s", "", "<=", 1.5),
        Figure("decode and build", spread([one[rate] for one in cold])["median"], "tokens/s", "", ">=", 10e6),
        Figure(
            "cold sync to an index, by building trees from memory",
            spread([ours["seconds"] / theirs for ours, theirs in zip(cold, peer, strict=True)])["median"],
            "ratio",
            PEER,
            "<=",
            None,
        ),
        Figure("cold sync, not compacted", spread([one["seconds"] for one in logs])["median"], "s", "", "<=", None),
    ]
    details |= {"cold sync": cold, "cold sync, not compacted": logs, "trees of the peer, seconds": peer}
    delays = delta_sync({name: problems[name][:8] for name in list(problems)[:16]}, rng)
    figures += [
        Figure("delta sync, median", quantile(delays, 0.5), "s", "", "<=", None),
        Figure("delta sync, p99", quantile(delays, 0.99), "s", "", "<=", None),
    ]
    for name, data in sets.items():
        started = [warm_start(data) for _ in range(options.rounds)]
        details[f"warm start, {name}"] = started
        figures += [
            Figure(f"warm start, {name}", spread([one["seconds"] for one in started])["median"], "s", "", "<=", None),
            *(
                Figure(
                    f"accepted a step by a replaced worker, by {whose}, {name}",
                    spread([one["accepted a step, replaced"] / one[f"accepted a step, {key}"] for one in started])[
                        "median"
                    ],
                    "ratio",
                    "",
                    ">=",
                    None,
                )
                for whose, key in (("the one before it", "as it was"), ("one without history", "without history"))
            ),
        ]
    if options.scale:
        details["scale"] = {**SCALE, "share": 1 / SHARE, **scale(rng)}
        for name, value in details["scale"].items():
            print(f"scale: {name}: {value}")
        figures += [
            Figure(f"scale: {name}", details["scale"][name], unit, "", "<=", None)
            for name, unit in (
                ("bytes a token of the window", "B"),
                ("bytes, whole history", "B"),
                ("all workers' deltas for a batch, bytes", "B"),
                ("a worker's delta for a batch, seconds", "s"),
                ("a new worker's whole history, seconds", "s"),
            )
        ]
    report(options.json, figures, **details)


if __name__ == "__main__":
    main()
