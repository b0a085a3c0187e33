"""Run the operator and kill it before or after its Nth change to the cluster: ``crashing_operator.py after:7 …``."""

import itertools
import os
import sys
from typing import Any

from rollout_operator.__main__ import main
from rollout_operator.api import KubernetesApi

when, _, number = sys.argv.pop(1).partition(":")
changes = itertools.count()
request = KubernetesApi.request


async def mortal(self: KubernetesApi, verb: str, *arguments: Any, **named: Any) -> Any:
    if verb == "GET":
        return await request(self, verb, *arguments, **named)
    last = next(changes) >= int(number)
    if last and when == "before":
        os._exit(9)
    try:
        return await request(self, verb, *arguments, **named)
    finally:
        if last:
            os._exit(9)


KubernetesApi.request = mortal  # type: ignore[method-assign]
main()
