"""A real node on this machine: containerd, kubelet, kube-proxy, a bridge for the pods, and a DNS server for Services.

It requires root and cgroup v1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from kubernetes import client

from rollout_api.ports import free_port
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.control_plane import START_TIMEOUT_S
from tests.support.waiting import wait_for

NAME = "node1"
ADDRESS = "10.89.0.1"
"""Address of the bridge, which is also that of the node and of the API server."""
_NET = "10.89.0.0/24"
_BRIDGE = "das0"
_CGROUPS = Path("/sys/fs/cgroup")
_SYSCTLS = (
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "net.ipv4.ip_forward",
    "net.ipv4.conf.all.route_localnet",
)
"""Kernel parameters that the kubelet, kube-proxy and the bridge plugin change. They are restored at the end."""
_POD_DELETION_TIMEOUT_S = 40.0


def create_bridge() -> None:
    """Create the bridge, which must exist before the API server can listen on its address.

    Raises:
        PermissionError: if the caller is not root.
        OSError: if this machine has no cgroup v1 hierarchies.
    """
    if os.geteuid():
        raise PermissionError("A real node requires root. Alternatively, set KUBECONFIG to use another cluster.")
    if not (_CGROUPS / "memory" / "cgroup.procs").exists():
        raise OSError("Kubernetes 1.20 requires cgroup v1, which this machine lacks. Set KUBECONFIG to use a cluster.")
    if subprocess.run(["ip", "link", "show", _BRIDGE], capture_output=True).returncode:
        subprocess.run(["ip", "link", "add", _BRIDGE, "type", "bridge"], check=True)
        subprocess.run(["ip", "addr", "add", f"{ADDRESS}/24", "dev", _BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", _BRIDGE, "up"], check=True)


class Node:
    """The processes of a node."""

    def __init__(self, control_plane: CompleteControlPlane, archives: Path) -> None:
        """Prepare the only node of a control plane.

        Args:
            control_plane: the control plane.
            archives: directory with the archives of the images that pods may use.
        """
        self._control_plane, self._archives = control_plane, archives
        self._root = control_plane.binaries / "root"
        self._directory = control_plane.directory / NAME
        self._original_sysctls: dict[str, str] = {}
        self._namespace: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._variables = self._environment()

    # Settings of containerd, kubelet and kube-proxy

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
                "x509": {"clientCAFile": self._control_plane.pki_file("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self._control_plane.pki_file(f"{NAME}.crt"),
            "tlsPrivateKeyFile": self._control_plane.pki_file(f"{NAME}.key"),
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

    def _create_cgroups(self) -> None:
        for hierarchy in _CGROUPS.iterdir():
            if (hierarchy / "cgroup.procs").exists() and hierarchy.name != "unified":
                (hierarchy / f"{_BRIDGE}-{NAME}").mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # A new group has none, and so could run no process.
            (_CGROUPS / "cpuset" / f"{_BRIDGE}-{NAME}" / name).write_text((_CGROUPS / "cpuset" / name).read_text())

    def _enter(self) -> list[str]:
        assert self._namespace is not None
        return [shutil.which("nsenter") or "nsenter", "-t", str(self._namespace.pid), "-m"]

    def _create_mount_namespace(self) -> None:
        """Create a mount namespace, so that logs and network namespaces of pods do not remain on the machine."""
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
            raise OSError("This machine does not permit mount namespaces.")

    # Processes

    def start_containerd(self) -> None:
        """Start containerd, which does not need the control plane, and import the images."""
        for name in _SYSCTLS:
            self._original_sysctls[name] = subprocess.run(
                ["sysctl", "-n", name], capture_output=True, text=True
            ).stdout.strip()
        self._write_settings()
        self._create_cgroups()
        self._create_mount_namespace()
        self._control_plane.start_process(
            "containerd",
            *self._enter(),
            str(self._root / "usr/bin/containerd"),
            "-c",
            str(self._directory / "containerd.toml"),
            environment=self._variables,
        )
        wait_for(
            lambda: self.ctr("version", check=False).returncode == 0, START_TIMEOUT_S, "containerd does not start."
        )
        archives = sorted(self._archives.glob("*.tar"), key=lambda archive: archive.stat().st_size, reverse=True)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda archive: self.ctr("images", "import", str(archive)), archives))

    def start(self) -> None:
        """Start the other processes of the node, and wait until it is ready."""
        self._control_plane.create_certificate(
            NAME, f"/O=system:nodes/CN=system:node:{NAME}", f"IP:{ADDRESS},IP:127.0.0.1,DNS:{NAME}"
        )
        self._control_plane.create_certificate("kube-proxy", "/CN=system:kube-proxy")
        for name in (NAME, "kube-proxy"):
            self._control_plane.write_kubeconfig(name)
        self._control_plane.start_process(
            "kubelet",
            *self._enter(),
            str(self._control_plane.binaries / "bin/kubelet"),
            f"--config={self._directory / 'kubelet.yaml'}",
            f"--kubeconfig={self._control_plane.directory / NAME}.kubeconfig",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            f"--root-dir={self._directory / 'kubelet'}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self._socket}",
            f"--cert-dir={self._directory}",
            environment=self._variables,
        )
        self._control_plane.start_process(
            "kube-proxy",
            str(self._control_plane.binaries / "bin/kube-proxy"),
            f"--kubeconfig={self._control_plane.directory}/kube-proxy.kubeconfig",
            f"--hostname-override={NAME}",
            "--proxy-mode=iptables",
            "--cluster-cidr=10.88.0.0/14",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            f"--healthz-bind-address=127.0.0.1:{free_port()}",
            f"--metrics-bind-address=127.0.0.1:{free_port()}",
            environment=self._variables,
        )
        self._start_dns_server()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the node is ready."""
        core = client.CoreV1Api(self._control_plane.client())

        def is_ready() -> bool:
            for part in ("containerd", "kubelet", "kube-proxy"):
                if not self._control_plane.is_running(part):
                    raise RuntimeError((self._control_plane.directory / "log" / f"{part}.log").read_text()[-3000:])
            nodes = [node for node in core.list_node().items if node.metadata.name == NAME]
            conditions = [condition for node in nodes for condition in node.status.conditions or ()]
            return any(condition.type == "Ready" and condition.status == "True" for condition in conditions)

        wait_for(is_ready, START_TIMEOUT_S, "The node does not become ready.")

    def kill_kubelet(self) -> None:
        """Kill the kubelet; the containers keep running."""
        self._control_plane.kill_process("kubelet")

    def start_kubelet(self) -> None:
        """Start the kubelet again, and wait until the node is ready."""
        self._control_plane.start_process("kubelet")
        self.wait_until_ready()

    def ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the client of containerd."""
        command = [str(self._root / "usr/bin/ctr"), "-a", str(self._socket), "-n", "k8s.io", *arguments]
        process = subprocess.run(command, capture_output=True, text=True, env=self._variables)
        if check and process.returncode:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {process.stderr}")
        return process

    def _start_dns_server(self) -> None:
        """Start dnsmasq in place of the cluster's DNS: it resolves the names of all Services."""
        hosts = self._directory / "hosts"
        hosts.touch()
        self._control_plane.start_process(
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
        core = client.CoreV1Api(self._control_plane.client())

        def update_hosts() -> None:
            while not self._stopping.wait(0.5):
                try:
                    services = core.list_service_for_all_namespaces(_request_timeout=5).items
                except Exception:  # A test may have killed the API server.
                    continue
                text = "".join(map(_hosts_line, services))
                if text != hosts.read_text():
                    hosts.write_text(text)
                    self._control_plane.signal_process("dnsmasq", signal.SIGHUP)

        threading.Thread(target=update_hosts, name="dns", daemon=True).start()

    def stop(self) -> None:
        """Terminate all processes and remove everything that the node has left on this machine."""
        self._stopping.set()
        with contextlib.suppress(Exception):  # A test may have left the API server dead.
            self._delete_pods()
        self._control_plane.terminate_process("kubelet")
        for _ in range(10):
            tasks = self._tasks()
            if not tasks:
                break
            for task in tasks:
                self.ctr("tasks", "kill", "-s", "KILL", task, check=False)
                self.ctr("tasks", "rm", "-f", task, check=False)
            time.sleep(0.3)
        subprocess.run(["pkill", "-f", f"containerd-shim-runc-v2 .*-address {self._socket}"])
        for part in ("containerd", "kube-proxy", "dnsmasq"):
            self._control_plane.terminate_process(part)
        clean = [str(self._control_plane.binaries / "bin/kube-proxy"), "--cleanup"]
        subprocess.run(clean, env=self._variables, capture_output=True)
        if self._namespace is not None:
            self._namespace.kill()
            self._namespace.wait()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((path for path in mounts if path.startswith(f"{self._directory}/")), reverse=True):
            subprocess.run(["umount", "-l", mount])
        links = subprocess.run(["ip", "-o", "link", "show", "master", _BRIDGE], capture_output=True, text=True).stdout
        for line in links.splitlines():
            subprocess.run(["ip", "link", "del", line.split(":")[1].split("@")[0].strip()])
        subprocess.run(["ip", "link", "del", _BRIDGE])
        for group in _CGROUPS.glob(f"*/{_BRIDGE}-{NAME}"):
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                _remove_cgroup(folder)
            _remove_cgroup(group)
        for name, value in self._original_sysctls.items():
            subprocess.run(["sysctl", "-q", "-w", f"{name}={value}"], capture_output=True)
        # The unpacked images consist of so many files that their removal can take more than a minute.
        subprocess.Popen(["rm", "-rf", str(self._directory / "containerd")], start_new_session=True)

    def _delete_pods(self) -> None:
        """Delete all pods, so that the kubelet removes their mounts and network interfaces, and wait for their end."""
        self._control_plane.kill_process("controller-manager")  # It would create some of the pods again.
        core = client.CoreV1Api(self._control_plane.client())
        for namespace in core.list_namespace().items:
            core.delete_collection_namespaced_pod(namespace.metadata.name, grace_period_seconds=1)
        # Kubelet 1.20 sometimes fails to report a pod's end to the API server, so this waits for the processes instead.
        wait_for(lambda: not self._tasks(), _POD_DELETION_TIMEOUT_S)

    def _tasks(self) -> list[str]:
        """Return the ids of all running containers and sandboxes."""
        return self.ctr("tasks", "ls", "-q", check=False).stdout.split()


def _hosts_line(service: client.V1Service) -> str:
    """Return the line of the hosts file for a Service, or an empty string if it has no address."""
    address, metadata = service.spec.cluster_ip, service.metadata
    if address in (None, "", "None"):
        return ""
    return f"{address} {metadata.name}.{metadata.namespace}.svc.cluster.local\n"


def _remove_cgroup(cgroup: Path) -> None:
    try:
        cgroup.rmdir()
    except OSError:  # The kernel has not removed all processes yet.
        time.sleep(0.1)
