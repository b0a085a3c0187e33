"""A real node on this machine: containerd, kubelet, kube-proxy, a bridge for pods, names for Services. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import yaml
from kubernetes import client

from tests.support.cluster.control_plane import ControlPlane, wait_for
from tests.support.ports import free_port

NAME = "node1"
ADDRESS = "10.89.0.1"
"""Of the bridge: of the node, and of the API server as pods see it."""
_NET = "10.89.0.0/24"
_BRIDGE = "das0"
_CGROUPS = Path("/sys/fs/cgroup")
# the kubelet, kube-proxy and the bridge plugin change these
_SETTINGS = (
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "net.ipv4.ip_forward",
    "net.ipv4.conf.all.route_localnet",
)


def make_bridge() -> None:
    """The address must be there before the API server listens on it."""
    if os.geteuid():
        raise PermissionError("a real node needs root; or name a cluster in KUBECONFIG")
    if not (_CGROUPS / "memory" / "cgroup.procs").exists():
        raise OSError("Kubernetes 1.20 needs cgroup v1 hierarchies, which are not there; name a cluster in KUBECONFIG")
    if subprocess.run(["ip", "link", "show", _BRIDGE], capture_output=True).returncode:
        subprocess.run(["ip", "link", "add", _BRIDGE, "type", "bridge"], check=True)
        subprocess.run(["ip", "addr", "add", f"{ADDRESS}/24", "dev", _BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", _BRIDGE, "up"], check=True)


class Node:
    """One node of *plane*, with the images of *archives*."""

    def __init__(self, plane: ControlPlane, archives: Path) -> None:
        self._plane, self._archives = plane, archives
        self._root = plane.binaries / "root"
        self._directory = plane.directory / NAME
        self._before: dict[str, str] = {}
        self._namespace: subprocess.Popen[bytes] | None = None
        self._names_end = threading.Event()
        self._path = self._environment()

    # what containerd, the kubelet and kube-proxy are told

    def _environment(self) -> dict[str, str]:
        libraries = self._root / "usr/lib/x86_64-linux-gnu"
        shim = self._directory / "bin"
        shim.mkdir(parents=True)
        for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save"):
            (shim / name).symlink_to(self._root / "usr/sbin/xtables-nft-multi")
        folders = [shim, self._root / "usr/bin", self._root / "usr/sbin", os.environ["PATH"]]
        return {
            **os.environ,
            "PATH": ":".join(map(str, folders)),
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }

    @property
    def _socket(self) -> Path:
        return self._directory / "containerd.sock"

    def _write_settings(self) -> None:
        cni = self._directory / "cni"
        cni.mkdir()
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": _BRIDGE,
                    "isGateway": True,
                    "ipMasq": False,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self._directory / "addresses"),
                        "ranges": [[{"subnet": _NET, "gateway": ADDRESS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (cni / "10-pods.conflist").write_text(json.dumps(network))
        (self._directory / "containerd.toml").write_text(f"""
version = 2
root = "{self._directory}/containerd"
state = "{self._directory}/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:3.2"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{self._root}/usr/sbin/runc"
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self._root}/usr/lib/cni"
conf_dir = "{cni}"
""")
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "readOnlyPort": 0,
            "healthzBindAddress": "127.0.0.1",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": self._plane.pki("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self._plane.pki(f"{NAME}.crt"),
            "tlsPrivateKeyFile": self._plane.pki(f"{NAME}.key"),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{_BRIDGE}-{NAME}",
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "clusterDNS": [ADDRESS],
            "clusterDomain": "cluster.local",
            "nodeStatusUpdateFrequency": "4s",
            "syncFrequency": "5s",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
        }
        (self._directory / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))

    def _make_cgroups(self) -> None:
        for hierarchy in _CGROUPS.iterdir():
            if (hierarchy / "cgroup.procs").exists() and hierarchy.name != "unified":
                (hierarchy / f"{_BRIDGE}-{NAME}").mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # a new group has none
            (_CGROUPS / "cpuset" / f"{_BRIDGE}-{NAME}" / name).write_text((_CGROUPS / "cpuset" / name).read_text())

    def _enter(self) -> list[str]:
        assert self._namespace is not None
        return [shutil.which("nsenter") or "nsenter", "-t", str(self._namespace.pid), "-m"]

    def _make_namespace(self) -> None:
        """Mounts of the node's own: pods' logs and network namespaces are not left on the machine."""
        logs, netns = self._directory / "logs", self._directory / "netns"
        for folder in (logs, netns, Path("/var/log/pods"), Path("/var/log/containers"), Path("/run/netns")):
            folder.mkdir(parents=True, exist_ok=True)
        mounts = f"mount --bind {logs} /var/log/pods && mount --bind {netns} /run/netns && mount --make-rshared /"
        self._namespace = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", f"{mounts} && echo && exec sleep infinity"],
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._namespace.stdout is not None
        if not self._namespace.stdout.readline():
            raise OSError("this machine allows no mount namespaces")

    # its life

    def start(self) -> None:
        """Return when the node is Ready."""
        for name in _SETTINGS:
            self._before[name] = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()
        self._plane.certify(NAME, f"/O=system:nodes/CN=system:node:{NAME}", f"IP:{ADDRESS},IP:127.0.0.1,DNS:{NAME}")
        self._plane.certify("kube-proxy", "/CN=system:kube-proxy")
        for name in (NAME, "kube-proxy"):
            self._plane.write_kubeconfig(name)
        self._write_settings()
        self._make_cgroups()
        self._make_namespace()
        self._plane.spawn(
            "containerd",
            *self._enter(),
            str(self._root / "usr/bin/containerd"),
            "-c",
            str(self._directory / "containerd.toml"),
            environment=self._path,
        )
        wait_for(lambda: self.ctr("version", check=False).returncode == 0, 30, "containerd does not start")
        for archive in sorted(self._archives.glob("*.tar")):
            self.ctr("images", "import", str(archive))
        self._plane.spawn(
            "kubelet",
            *self._enter(),
            str(self._plane.binaries / "bin/kubelet"),
            f"--config={self._directory / 'kubelet.yaml'}",
            f"--kubeconfig={self._plane.directory / NAME}.kubeconfig",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            f"--root-dir={self._directory / 'kubelet'}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self._socket}",
            f"--cert-dir={self._directory}",
            environment=self._path,
        )
        self._plane.spawn(
            "kube-proxy",
            str(self._plane.binaries / "bin/kube-proxy"),
            f"--kubeconfig={self._plane.directory}/kube-proxy.kubeconfig",
            f"--hostname-override={NAME}",
            "--proxy-mode=iptables",
            "--cluster-cidr=10.88.0.0/14",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            f"--healthz-bind-address=127.0.0.1:{free_port()}",
            f"--metrics-bind-address=127.0.0.1:{free_port()}",
            environment=self._path,
        )
        self._serve_names()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        core = client.CoreV1Api(self._plane.client())

        def ready() -> bool:
            for part in ("containerd", "kubelet", "kube-proxy"):
                if not self._plane.alive(part):
                    raise RuntimeError((self._plane.directory / "log" / f"{part}.log").read_text()[-3000:])
            nodes = [node for node in core.list_node().items if node.metadata.name == NAME]
            conditions = [one for node in nodes for one in node.status.conditions or ()]
            return any(one.type == "Ready" and one.status == "True" for one in conditions)

        wait_for(ready, 90, "the node does not get Ready")

    def kill_kubelet(self) -> None:
        self._plane.kill("kubelet")

    def start_kubelet(self) -> None:
        self._plane.spawn("kubelet")
        self.wait_until_ready()

    def ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """containerd's own client."""
        command = [str(self._root / "usr/bin/ctr"), "-a", str(self._socket), "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._path)
        if check and done.returncode:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {done.stderr}")
        return done

    def _serve_names(self) -> None:
        """What a cluster's DNS does: every Service by its name."""
        hosts = self._directory / "hosts"
        hosts.touch()
        self._plane.spawn(
            "dnsmasq",
            shutil.which("dnsmasq") or "dnsmasq",
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            f"--addn-hosts={hosts}",
            f"--listen-address={ADDRESS}",
            "--bind-interfaces",
            "--local=/cluster.local/",
            "--user=root",
            "--conf-file=/dev/null",
            f"--pid-file={self._directory / 'dnsmasq.pid'}",
        )
        core = client.CoreV1Api(self._plane.client())

        def keep() -> None:
            while not self._names_end.wait(0.5):
                try:
                    services = core.list_service_for_all_namespaces(_request_timeout=5).items
                except Exception:  # the API server is away: tests see to that
                    continue
                lines = [
                    f"{one.spec.cluster_ip} {one.metadata.name}.{one.metadata.namespace}.svc.cluster.local\n"
                    for one in services
                    if one.spec.cluster_ip not in (None, "", "None")
                ]
                if "".join(lines) != hosts.read_text():
                    hosts.write_text("".join(lines))
                    self._plane.signal("dnsmasq", signal.SIGHUP)

        threading.Thread(target=keep, name="names", daemon=True).start()

    def stop(self) -> None:
        """Leave nothing on the machine."""
        self._names_end.set()
        with contextlib.suppress(Exception):  # a test may have left the API server dead
            self._delete_pods()
        self._plane.end("kubelet")
        for _ in range(10):
            tasks = self.ctr("tasks", "ls", "-q", check=False).stdout.split()
            if not tasks:
                break
            for task in tasks:
                self.ctr("tasks", "kill", "-s", "KILL", task, check=False)
                self.ctr("tasks", "rm", "-f", task, check=False)
            time.sleep(0.3)
        subprocess.run(["pkill", "-f", f"containerd-shim-runc-v2 .*-address {self._socket}"])
        for part in ("containerd", "kube-proxy", "dnsmasq"):
            self._plane.end(part)
        clean = [str(self._plane.binaries / "bin/kube-proxy"), "--cleanup"]
        subprocess.run(clean, env=self._path, capture_output=True)
        if self._namespace is not None:
            self._namespace.kill()
            self._namespace.wait()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self._directory}/")), reverse=True):
            subprocess.run(["umount", "-l", mount])
        links = subprocess.run(["ip", "-o", "link", "show", "master", _BRIDGE], capture_output=True, text=True).stdout
        for line in links.splitlines():
            subprocess.run(["ip", "link", "del", line.split(":")[1].split("@")[0].strip()])
        subprocess.run(["ip", "link", "del", _BRIDGE])
        for group in _CGROUPS.glob(f"*/{_BRIDGE}-{NAME}"):
            for folder in sorted((one for one in group.rglob("*") if one.is_dir()), reverse=True):
                _remove(folder)
            _remove(group)
        for name, value in self._before.items():
            subprocess.run(["sysctl", "-q", "-w", f"{name}={value}"], capture_output=True)
        shutil.rmtree(self._directory / "containerd", ignore_errors=True)

    def _delete_pods(self) -> None:
        """Let the kubelet tear down what it has set up."""
        core, apps = client.CoreV1Api(self._plane.client()), client.AppsV1Api(self._plane.client())
        for namespace in [one.metadata.name for one in core.list_namespace().items]:
            apps.delete_collection_namespaced_deployment(namespace)
            apps.delete_collection_namespaced_stateful_set(namespace)
            core.delete_collection_namespaced_pod(namespace, grace_period_seconds=1)
        deadline = time.monotonic() + 40
        while core.list_pod_for_all_namespaces().items and time.monotonic() < deadline:
            time.sleep(0.5)


def _remove(cgroup: Path) -> None:
    try:
        cgroup.rmdir()
    except OSError:
        time.sleep(0.1)
