"""Histories are changed in some threads while others draft."""

from __future__ import annotations

import threading
from itertools import count, pairwise

import numpy as np

from rollout_worker.drafting import SuffixIndex

# Each problem and generation has its own token, so that a draft shows from which rollouts it was made.
PROBLEMS = 4
GENERATIONS = 60


def token(problem: int, generation: int) -> int:
    return 1000 * problem + generation


def test_drafts_while_history_changes() -> None:
    """Each draft sees one consistent state: complete batches of the right problem.

    A batch holds rollouts of one generation. The writer adds it and then drops the older one, so at most two
    generations exist, and a draft may use either.
    """
    index = SuffixIndex(depth=16)
    done = threading.Event()
    errors: list[BaseException] = []

    def publish(problem: int, generation: int) -> None:
        text = np.full(200, token(problem, generation), dtype=np.uint32)
        index.add(f"p{problem}", [(f"{generation}/{i}", generation, text) for i in range(4)])

    def write(problem: int) -> None:
        try:
            for generation in range(1, GENERATIONS):
                publish(problem, generation)
                index.drop_before(f"p{problem}", generation)
                if generation % 7 == 0:
                    index.drop_rollout(f"p{problem}", f"{generation}/2")
            index.add(f"p{problem}", [("last", GENERATIONS, [token(problem, GENERATIONS)] * 20)])
        except BaseException as error:
            errors.append(error)

    def draft() -> None:
        try:
            latest = [0] * PROBLEMS
            while not done.is_set():
                handles = [index.open(f"p{problem}", sources=("history",)) for problem in range(PROBLEMS)]
                for _ in range(5):
                    drafts = index.draft_batch(handles, [6] * PROBLEMS)
                    for problem, drafted in enumerate(drafts):
                        assert {"history"} == set(drafted.sources)
                        assert 1 == len(set(drafted.tokens))
                        generation = drafted.tokens[0] - 1000 * problem
                        assert latest[problem] - 1 <= generation <= GENERATIONS
                        latest[problem] = max(latest[problem], generation)
                for problem, handle in enumerate(handles):
                    index.extend(handle, [token(problem, latest[problem])] * 3)
                    index.draft(handle, 3)
                    index.close(handle)
        except BaseException as error:
            errors.append(error)

    for problem in range(PROBLEMS):  # before the first draft, which would be empty without history
        publish(problem, 0)
    writers = [threading.Thread(target=write, args=(problem,)) for problem in range(PROBLEMS)]
    readers = [threading.Thread(target=draft) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    if errors:
        raise errors[0]
    for problem in range(PROBLEMS):
        handle = index.open(f"p{problem}")
        assert [token(problem, GENERATIONS - 1)] * 3 == index.draft(handle, 3).tokens
        index.drop_before(f"p{problem}", GENERATIONS)
        assert [token(problem, GENERATIONS)] * 3 == index.draft(handle, 3).tokens
        index.drop_problem(f"p{problem}")
        index.close(handle)
    assert 0 == index.bytes()


def test_a_batch_added_by_many_threads_is_added_once() -> None:
    index = SuffixIndex()
    batch = [(str(i), 0, [i] * 50) for i in range(40)]
    added: list[int] = []
    threads = [threading.Thread(target=lambda: added.append(index.add("p", batch))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 40 == sum(added)
    assert 40 * 50 == index.tokens("p")


def test_drafts_do_not_wait_for_a_long_build() -> None:
    """A segment is built without the GIL and without a lock that drafts need."""
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 2, 3])])
    handle = index.open("p")
    text = np.random.default_rng(0).integers(0, 50, 1_500_000).astype(np.uint32)
    built = threading.Event()

    def build() -> None:
        index.add("p", [("b", 1, text)])
        built.set()

    thread = threading.Thread(target=build)
    thread.start()
    during = 0
    while not built.wait(0.001):
        assert index.draft(handle, 3).tokens in ([1, 2, 3], [int(token) for token in text[:3]])
        during += 1
    thread.join()
    assert during > 20
    assert [int(token) for token in text[:3]] == index.draft(handle, 3).tokens


def test_siblings_draft_from_texts_that_grow_in_other_threads() -> None:
    """Requests of one problem are extended and drafted in several threads. Every draft is a part of the text."""
    index = SuffixIndex(threads=2)
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.integers(0, 5000, 3000)]
    neighbors = set(pairwise(text))
    errors: list[BaseException] = []

    def generate(seed: int) -> None:
        try:
            steps = np.random.default_rng(seed)
            handles = [index.open("p", text[:50], sources=("siblings", "self")) for _ in range(10)]
            position = 50
            while position < len(text) - 10:
                step = int(steps.integers(1, 8))
                index.extend_batch(handles, [text[position : position + step]] * len(handles))
                position += step
                for drafted in index.draft_batch(handles, [6] * len(handles)):
                    before = [text[position - 1], *drafted.tokens]
                    assert set(zip(before, drafted.tokens, strict=False)) <= neighbors
            for handle in handles:
                index.close(handle)
        except BaseException as error:
            errors.append(error)

    def change_history() -> None:
        try:
            for number in range(60):
                index.add("p", [(str(number), number, text[: 20 * number + 1])])
                index.drop_before("p", number - 3)
            index.drop_problem("p")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(3)] + [
        threading.Thread(target=change_history)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert 0 == index.bytes()


def test_steps_while_histories_and_requests_change() -> None:
    """Steps with drafting ahead run beside changes of the history, and beside calls for the same requests."""
    index = SuffixIndex(threads=2, draft_ahead=True, pool_tokens=2000, max_bytes=400_000)
    rng = np.random.default_rng(0)
    done = threading.Event()
    errors: list[BaseException] = []

    def change() -> None:
        try:
            texts = np.random.default_rng(1)
            for number in count():
                if done.is_set():
                    break
                problem = f"p{number % 3}"
                index.add(problem, [(str(number), number, texts.integers(0, 5, 60).astype(np.uint32))])
                index.drop_before(problem, number - 12)
                index.look_ups()
                index.bytes()
        except BaseException as error:
            errors.append(error)

    def call(handles: list[int]) -> None:
        try:
            while not done.is_set():
                for handle in handles:
                    index.extend(handle, [1])
                    index.draft(handle, 3)
                    index.occurrences(handle)
        except BaseException as error:
            errors.append(error)

    shared = [index.open("p0", [1, 2, 3]) for _ in range(2)]
    threads = [threading.Thread(target=change), threading.Thread(target=call, args=(shared,))]
    for thread in threads:
        thread.start()
    handles = shared + [index.open(f"p{number % 3}") for number in range(10)]
    token_ids, num_tokens = np.zeros((12, 200_000), np.int32), np.zeros(12, np.int32)
    drafts, lengths = np.zeros((12, 4), np.int64), np.zeros(12, np.int32)
    batch = index.new_batch(token_ids, drafts, lengths)
    for _ in range(100):
        batch.plan(np.array(handles), np.full(12, 4), np.zeros(12), np.zeros(12), np.zeros(1))
        for place, handle in enumerate(handles):
            # Another thread may extend the first two requests before the step.
            num_tokens[place] = index.num_tokens(handle) + 1
            token_ids[place, num_tokens[place] - 1] = rng.integers(0, 5)
        batch.step(num_tokens, np.arange(12), np.arange(12), np.zeros(12, int))
        assert set(drafts.ravel().tolist()) <= {0, 1, 2, 3, 4}
        index.close(handles.pop())
        handles.append(index.open("p1", [4] * 300))  # which the background thread indexes
    done.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert sum(index.look_ups()) >= 100 * 10
