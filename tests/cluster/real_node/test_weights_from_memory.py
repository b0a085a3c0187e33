"""A trainer sends weights through the job's NetworkPolicy, which is enforced between two network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_operator.objects.names import HTTP_PORT, TRAINER_LABEL
from rollout_operator.objects.observed import ClusterInfo
from rollout_operator.objects.owned_objects import owned_objects

from tests.operator.test_pods import job_context
from tests.support.cluster.control_plane import build_kubernetes

ADDRESSES = ("10.89.7.1", "10.89.7.2")
ENGINE, TRAINER = "das-engine", "das-trainer"
PEER = """
import sys
import time
import torch
from rollout_api.weights import gloo

rank, master, gloo.GLOO_TIMEOUT_S = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
store = torch.distributed.TCPStore(master, 29400, 2, rank == 0)
group = gloo.GlooGroup(store, rank, 2)
tensor = torch.full((1000,), 7.0 if rank == 0 else 0.0)
group.broadcast(tensor)
store.add("received", int(tensor[999].item() == 7.0))
while rank == 0 and store.add("received", 0) < 2:  # the store is in this process
    time.sleep(0.01)
"""


class Machines:
    """The network of an engine's pod, and that of the trainer's pod."""

    def __init__(self, engine: str, trainer: str) -> None:
        self.trainer = trainer
        root = build_kubernetes() / "root"
        libraries = root / "usr/lib/x86_64-linux-gnu"
        self._iptables = root / "usr/sbin/xtables-nft-multi"
        self._variables = os.environ | {
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }

    def enforce(self, policy: dict[str, Any], labels: dict[str, str]) -> None:
        """Admit to the engine's network what a policy admits from a pod with these labels in the same namespace."""
        rules = ["-m conntrack --ctstate ESTABLISHED,RELATED", "-i lo", f"-p tcp --dport {HTTP_PORT}"]
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule.get("from", ()) if "ports" not in rule]
        if any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in peers):
            rules.append(f"-s {self.trainer}")
        for command in ("-F INPUT", "-P INPUT DROP", *(f"-A INPUT {rule} -j ACCEPT" for rule in rules)):
            in_network = ["ip", "netns", "exec", ENGINE, str(self._iptables), "iptables"]
            subprocess.run([*in_network, *command.split()], env=self._variables, check=True)

    def send_weights(self, timeout_s: float = 120.0) -> bool:
        """Send a tensor from the trainer, which has rank 0, to the engine; return whether it has arrived."""
        peers = [
            subprocess.Popen(
                ["ip", "netns", "exec", namespace, sys.executable, "-c", PEER, str(rank), self.trainer, str(timeout_s)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0"},
                cwd=Path(__file__).parents[3],
            )
            for rank, namespace in enumerate((TRAINER, ENGINE))
        ]
        return [0, 0] == [peer.wait() for peer in peers]


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Two networks. With gloo, the one with the greater address connects to the other."""
    engine, trainer = request.param

    def ip(command: str, *, check: bool = True) -> None:
        subprocess.run(["ip", *command.split()], check=check)

    try:
        for name in (ENGINE, TRAINER):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {ENGINE} link add eth0 type veth peer name eth0 netns {TRAINER}")
        for name, address in ((ENGINE, engine), (TRAINER, trainer)):
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
        yield Machines(engine, trainer)
    finally:
        for name in (ENGINE, TRAINER):
            ip(f"netns del {name}", check=False)


def job_policy() -> dict[str, Any]:
    made = owned_objects(job_context(), ClusterInfo(), workers=1)
    return next(one for one in made if one["kind"] == "NetworkPolicy")


@pytest.mark.parametrize("machines", [ADDRESSES, ADDRESSES[::-1]], ids=["to", "from"], indirect=True)
def test_a_trainer_with_the_label_sends_weights_whoever_connects(machines: Machines) -> None:
    machines.enforce(job_policy(), {TRAINER_LABEL: "math"})
    assert machines.send_weights()


@pytest.mark.parametrize("machines", [ADDRESSES], ids=["to"], indirect=True)
def test_other_pods_cannot_connect_to_the_engines(machines: Machines) -> None:
    machines.enforce(job_policy(), {})
    assert not machines.send_weights(timeout_s=5.0)
