"""Write the tables of docs/performance.md from the benchmarks' results: ``python -m scripts.performance_docs``."""

from __future__ import annotations

import json
from typing import Any

from scripts.repository import ROOT, with_blocks

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
SIMULATED = {
    "none": "plain vLLM",
    "ngram": "vLLM's n-grams",
    "arctic-inference": "vLLM's suffix decoding (V1)",
    "vllm-suffix": "vLLM's suffix speculator (V2)",
    "das-classes-threshold": "DAS, with a survival threshold",
    "tlt": "TLT's rule, with drafts from the history",
    "srt": "SRT",
    "seer": "Seer",
    "das-rollout": "**das-rollout**",
    "clairvoyant": "bound for these drafts: only accepted tokens are verified",
}
"""Method of the simulation → its name on the page."""
SETTINGS = [(trace, engines) for trace in ("rg", "taubench", "humaneval") for engines in (1, 8)]
TRACES = {"rg": "math", "taubench": "agents", "humaneval": "programs"}


def figures(name: str, peer: str | None = None) -> dict[str, float]:
    """Return the figures of a result by their names; with *peer*, only those that are relative to it."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return {figure["name"]: figure["value"] for figure in found if peer is None or figure["peer"] == peer}


def speeds(name: str, model: str, batches: tuple[int, ...]) -> list[str]:
    """Return rows with the speeds of each mode relative to plain vLLM."""
    values = figures(name)
    rows = []
    for batch in batches:

        def speed(mode: str, batch: int = batch) -> str:
            found = [
                value for key, value in values.items() if key.startswith(f"speed of {mode}, batch {batch}, median")
            ]
            return f"{found[0]:.2f}" if found else "–"

        bound = values.get(f"speed of das, batch {batch}, lower bound")
        lower = "–" if bound is None else f"{bound:.2f}"
        rows.append(f"| {model}, {batch} | {speed('ngram')} | {speed('suffix')} | **{speed('das')}** | {lower} |")
    return rows


def measured() -> str:
    """Return the table of real engines."""
    rows = speeds("rollout-tiny", "3M parameters", (1, 8, 64))
    rows += speeds("rollout-267m", "267M parameters", (1, 4, 8))
    rows += speeds("rollout-7b-h100", "7B, H100", (16, 128))
    head = "| Model, rollouts at a time | vLLM's n-grams | vLLM's suffix decoding | das-rollout | lower bound |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def simulated() -> str:
    """Return the table of simulated makespans."""
    values = figures("rollout-bench", peer="none")
    head = "| | " + " | ".join(f"{TRACES[trace]}, {engines}" for trace, engines in SETTINGS) + " |"
    lines = [head, "|---|" + "---|" * len(SETTINGS)]
    for method, name in SIMULATED.items():
        cells = []
        for trace, engines in SETTINGS:
            key = f"makespan of {method} (simulated), {trace}, 7b-h100, 128 over {engines}"
            cells.append("1.00" if method == "none" else f"{values[key]:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


BLOCKS = {"measured": measured, "simulated": simulated}


def document(page: str) -> str:
    """Return the page with its tables written anew."""
    return with_blocks(page, "scripts/performance_docs.py", {name: table() for name, table in BLOCKS.items()})


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
