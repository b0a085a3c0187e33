"""Compares the likeliest token with a sampled one as a draft, at each position of recorded rollouts.

    python -m benchmarks.sampled_drafts --trace benchmarks/data/tiny-grpo.jsonl.gz --json FILE

The drafter knows a distribution q over a few tokens, and the model has a distribution p. The likeliest token k of q is
accepted with probability p(k). A token that is sampled from q, and accepted with probability min(1, p/q), is accepted
with probability Σ min(p, q), and the output distribution is that of the model as well. Both are computed from the real
p of the checkpoint that sampled the rollout (:mod:`benchmarks.record_training` keeps them), at temperature 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.figures import Figure, report
from benchmarks.traces import Trajectory, by_problem, checkpoints, read_trace
from rollout_worker.drafting import SuffixIndex

Floats = npt.NDArray[np.float64]

_BINS = 20
MIN_PROBABILITIES = (0.0, 0.1, 0.3, 0.5)
"""Positions count as drafted if the calibrated probability of the likeliest token is at least this."""
MIN_GAIN = 1.05
"""Acceptance of the better of the two, relative to the likeliest token, from which sampling is worth building."""


class Positions(NamedTuple):
    """Positions at which the drafter knows candidates; arrays of shape (positions,)."""

    predicted: Floats
    """Calibrated probability of the likeliest token."""
    top_share: Floats
    """The likeliest token's share of q."""
    likeliest: Floats
    """Probability p(k) that the likeliest token is accepted."""
    sampled: Floats
    """Probability Σ min(p, q) that a sampled token is accepted."""


def positions_of(index: SuffixIndex, rollout: Trajectory, probabilities: Floats) -> Iterator[tuple[float, ...]]:
    """Yield the fields of :class:`Positions` for one rollout, which is followed token by token.

    Args:
        index: holds the history.
        rollout: a rollout of one turn.
        probabilities: the model's p at each position of the response, shape (tokens, vocabulary).
    """
    tokens = rollout.segments[0].tokens
    handle = index.open(rollout.problem, rollout.prompt)
    for position, token in enumerate(tokens):
        index.draft(handle, 1)
        found = index.alternatives(handle)
        if found and found[0]:
            alternatives = found[0]
            q = np.array([one.mixed for one in alternatives])
            q /= q.sum()
            p = probabilities[position, [one.token for one in alternatives]]
            best = int(np.argmax([one.calibrated for one in alternatives]))
            yield (alternatives[best].calibrated, float(q[best]), float(p[best]), float(np.minimum(p, q).sum()))
        index.extend(handle, [int(token)])
    index.close(handle)


class Checkpoint:
    """A checkpoint of the tiny model."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def probabilities(self, rollout: Trajectory) -> Floats:
        """Return p at each position of a response, shape (tokens, vocabulary)."""
        tokens = rollout.segments[0].tokens
        text = torch.from_numpy(np.concatenate([rollout.prompt, tokens]).astype(np.int64))[None]
        logits = self._model(input_ids=text, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
        return np.asarray(logits.double().softmax(-1).numpy())


def examine(trajectories: Sequence[Trajectory], directory: Path, samples: int) -> dict[str, Positions]:
    """Return the positions of each version but the first, drafted from the rollouts of all earlier versions."""
    index = SuffixIndex()
    positions = {}
    for number, name in enumerate(checkpoints(trajectories)):
        rollouts = [one for one in trajectories if one.checkpoint == name]
        if number:
            checkpoint = Checkpoint(directory / name)
            rows = [
                row
                for group in by_problem(rollouts).values()
                for rollout in group[:samples]
                for row in positions_of(index, rollout, checkpoint.probabilities(rollout))
            ]
            positions[name] = Positions(*np.array(rows).T)
        for problem, group in by_problem(rollouts).items():
            texts = [(f"{name}/{one.sample}", number, one.segments[0].tokens) for one in group]
            index.add(problem, texts)
        index.wait_idle()
    return positions


def _bins(positions: Positions) -> npt.NDArray[np.int64]:
    predicted = np.minimum((positions.predicted * _BINS).astype(np.int64), _BINS - 1)
    share = np.minimum((positions.top_share * _BINS).astype(np.int64), _BINS - 1)
    return np.asarray(predicted * _BINS + share)


def choice(known: Positions, new: Positions) -> npt.NDArray[np.bool_]:
    """Return where to sample, from what can be known before: which of the two was better in similar positions.

    Args:
        known: positions of earlier versions, from which the choice is learned.
        new: the positions to decide about.
    """
    gains = np.bincount(_bins(known), known.sampled - known.likeliest, minlength=_BINS * _BINS)
    return np.asarray(gains[_bins(new)] > 0)


def joined(parts: Sequence[Positions]) -> Positions:
    """Return the positions of several versions."""
    return Positions(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def figures_of(positions: dict[str, Positions]) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return the figures of the last version that was examined, and rows for each version and threshold."""
    names = list(positions)
    rows = []
    for number, name in enumerate(names[1:], 1):
        known, new = joined([positions[other] for other in names[:number]]), positions[name]
        samples = choice(known, new)
        for minimum in MIN_PROBABILITIES:
            drafted = new.predicted >= minimum
            likeliest, sampled = new.likeliest[drafted], new.sampled[drafted]
            rows.append(
                {
                    "version": name,
                    "min_probability": minimum,
                    "positions": int(drafted.sum()),
                    "likeliest": float(likeliest.mean()),
                    "sampled": float(sampled.mean()),
                    "chosen": float(np.where(samples[drafted], sampled, likeliest).mean()),
                    "better": float(np.maximum(sampled, likeliest).mean()),
                    "sampled_share": float(samples[drafted].mean()),
                }
            )
    figures = []
    for minimum in MIN_PROBABILITIES:
        chosen = [row for row in rows if row["min_probability"] == minimum]
        weights = np.array([row["positions"] for row in chosen], float)
        means = {
            key: float(np.average([row[key] for row in chosen], weights=weights))
            for key in ("likeliest", "sampled", "chosen", "better")
        }
        where = f"positions with a predicted probability of at least {minimum:g}"
        figures.append(Figure(f"acceptance of the likeliest token, {where}", means["likeliest"], "", "", ">=", None))
        for key, words in (
            ("sampled", "a sampled token"),
            ("chosen", "the one that was better in similar positions"),
            ("better", "the better one, which cannot be known"),
        ):
            target = MIN_GAIN if key == "chosen" else None
            gain = means[key] / means["likeliest"]
            figures.append(Figure(f"acceptance of {words}, {where}", gain, "x", "likeliest token", ">=", target))
    return figures, rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="trace of benchmarks.record_training")
    parser.add_argument("--checkpoints", type=Path, default=Path(".rollout/record_training"), help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=16, help="rollouts of each problem and version [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # Responses are so short that more threads only wait for each other.
    try:
        trajectories = read_trace(options.trace, None)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    figures, rows = figures_of(examine(trajectories, options.checkpoints, options.samples))
    report(options.json, figures, trace=options.trace.name, rows=rows)


if __name__ == "__main__":
    main()
