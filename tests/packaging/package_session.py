"""Drafts with the native extension, for an environment that has the package's wheel.

Run ``python package_session.py``. The program prints what it has drafted as JSON.
"""

from __future__ import annotations

import json

from rollout_worker.drafting import SuffixIndex, _native


def main() -> None:
    """Add a rollout to an index, and draft its continuation."""
    index = SuffixIndex()
    added = index.add("problem", [("rollout", 1, [5, 6, 7, 8])])
    handle = index.open("problem", [1, 2, 3])
    index.extend(handle, [5, 6])
    print(json.dumps({"location": _native.__file__, "added": added, "draft": list(index.draft(handle, 2).tokens)}))


if __name__ == "__main__":
    main()
