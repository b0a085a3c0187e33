"""Write the tables of docs/performance.md and the README's chart: ``python -m scripts.performance_docs``.

Both are made from the committed results of the benchmarks.
"""

from __future__ import annotations

import json
from typing import Any

from scripts.repository import ROOT, with_blocks

PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "images" / "speed.svg"
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
ENGINES = [
    ("rollout-tiny", "3M parameters", (1, 8, 64)),
    ("rollout-267m", "267M parameters", (1, 4, 8)),
    ("rollout-7b-h100", "7B, H100", (16, 128)),
]
"""Result, name of the model on the page, and the batch sizes that the page shows."""
MODES = {"ngram": "vLLM's n-grams", "suffix": "vLLM's suffix decoding", "das": "das-rollout"}
"""Mode of the benchmark of real engines → its name on the page."""
CHART_STYLE = """<style>
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; font-size: 13px; }
.title { font-size: 15px; font-weight: 600; } .small { font-size: 12px; fill: #59636e; } .mid { text-anchor: middle; }
.ngram { fill: #afb8c1; } .suffix { fill: #d4a72c; } .das { fill: #0969da; }
.axis { stroke: #59636e; stroke-width: 1.4; } .line { stroke: #8c959f; stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .small { fill: #9198a1; } .ngram { fill: #6e7681; } .suffix { fill: #bb8009; }
.das { fill: #4493f8; } .axis { stroke: #9198a1; } .line { stroke: #6e7681; }
}
</style>"""
TRACES = {"rg": "math", "taubench": "agents", "humaneval": "programs"}


def figures(name: str, peer: str | None = None) -> dict[str, float]:
    """Return the figures of a result by their names; with *peer*, only those that are relative to it."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return {figure["name"]: figure["value"] for figure in found if peer is None or figure["peer"] == peer}


def speed(result: str, mode: str, batch: int) -> float | None:
    """Return the median speed of a mode relative to plain vLLM, or None if it was not measured."""
    name = f"speed of {mode}, batch {batch}, median"
    return next((value for key, value in figures(result).items() if key.startswith(name)), None)


def measured() -> str:
    """Return the table of real engines."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    rows = []
    for result, model, batches in ENGINES:
        for batch in batches:
            ngram, suffix, das = (number(speed(result, mode, batch)) for mode in MODES)
            lower = number(figures(result).get(f"speed of das, batch {batch}, lower bound"))
            rows.append(f"| {model}, {batch} | {ngram} | {suffix} | **{das}** | {lower} |")
    head = "| Model, rollouts at a time | vLLM's n-grams | vLLM's suffix decoding | das-rollout | lower bound |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def chart() -> str:
    """Return the speeds of real engines as an SVG with bars, which follows the reader's color scheme."""
    width, zero, unit, bar = 760, 296, 80, 20  # pixels; *unit* is the height of a speed of 1
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 356" role="img" aria-label="Measured speeds '
        'relative to plain vLLM, as in the table of docs/performance.md.">',
        CHART_STYLE,
        '<text class="title" x="20" y="24">Measured: speed relative to plain vLLM (medians)</text>',
    ]
    for number, (mode, name) in enumerate(MODES.items()):
        x = 20 + 190 * number
        lines.append(
            f'<rect class="{mode}" x="{x}" y="36" width="12" height="12"/><text x="{x + 18}" y="47">{name}</text>'
        )
    for level in (1, 2):
        y = zero - unit * level
        label = "plain vLLM" if level == 1 else f"{level}×"
        lines.append(
            f'<path class="line" d="M20,{y} H{width - 12}"/><text class="small" x="20" y="{y - 4}">{label}</text>'
        )
    group = 0
    for result, model, batches in ENGINES:
        first = 92 + 84 * group
        for batch in batches:
            for number, mode in enumerate(MODES):
                value, x = speed(result, mode, batch), 92 + 84 * group + (bar + 2) * number
                if value is not None:
                    height = round(unit * value)
                    lines.append(f'<rect class="{mode}" x="{x}" y="{zero - height}" width="{bar}" height="{height}"/>')
                    lines.append(f'<text class="mid" x="{x + bar // 2}" y="{zero - height - 4}">{value:.1f}</text>')
            lines.append(f'<text class="small mid" x="{92 + 84 * group + 32}" y="{zero + 16}">{batch}</text>')
            group += 1
        middle = (first + 92 + 84 * (group - 1) + 64) // 2
        lines.append(f'<text class="mid" x="{middle}" y="{zero + 38}">{model}</text>')
    lines.append(f'<text class="small" x="20" y="{zero + 16}">rollouts</text>')
    lines.append(f'<path class="axis" d="M20,{zero} H{width - 12}"/>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


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
    CHART.write_text(chart())
