"""Renders the Helm chart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "charts" / "das-rollout"
HELM = Path(sys.executable).with_name("helm")
_POD_SETTINGS: dict[str, Any] = {
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"team": "rl"},
    "podAnnotations": {"note": "x"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "nameOverride": "rollouts",
        "commonLabels": {"cost-center": "17"},
        "image": {"operator": f"registry.example/operator@sha256:{'0' * 64}", "pullSecrets": [{"name": "registry"}]},
        "operator": {**_POD_SETTINGS, "replicas": 3, "image": "registry.example/operator:1"},
        "redis": {**_POD_SETTINGS, "storageClassName": "fast", "namespaces": ["team-a"]},
        "redisUsers": {**_POD_SETTINGS, "byDefault": False},
        "history": {**_POD_SETTINGS, "replicas": 2},
        "monitoring": {"podMonitor": True, "alerts": True, "dashboard": True, "labels": {"release": "prometheus"}},
        "rbac": {"aggregateRoles": True},
    },
    "ServiceMonitors": {"monitoring": {"serviceMonitor": True}, "fullnameOverride": "rollouts"},
    "some namespaces": {"operator": {"namespaces": ["a", "b"], "readNodes": True}},
    "selected namespaces": {
        "operator": {"namespaceSelector": {"team": "a", "rollouts.example/enabled": "true"}},
        "admissionPolicy": {"restrictPodTemplates": True},
    },
    "the release's namespace": {"operator": {"namespaces": ["rl"]}, "redis": {"storage": ""}},
    "own password": {
        "redis": {"adminSecret": {"name": "redis", "keys": {"url": "u", "password": "p", "userKey": "k"}}},
        "redisUsers": {"enabled": False},
    },
    "external Redis with users": {
        "redis": {"bundled": False, "adminSecret": {"name": "redis"}, "ca": {"configMap": "ca", "key": "root.pem"}}
    },
    "external Redis without users": {
        "redis": {"bundled": False, "ca": {"secret": "redis-ca"}},
        "history": {"redis": {"existingSecret": "redis"}},
    },
    "restricted pod templates": {
        "admissionPolicy": {"restrictPodTemplates": True, "exemptNamespaces": ["trusted"]},
        "commonLabels": {"cost-center": "17"},
    },
    "status token": {"statusToken": {"existingSecret": "status", "key": "t"}, "monitoring": {"podMonitor": True}},
    "limited egress": {"networkPolicies": {"egress": {"enabled": True, "jobs": [{"ports": [{"port": 443}]}]}}},
    "limited egress to an external Redis": {
        "redis": {"bundled": False, "adminSecret": {"name": "redis"}},
        "networkPolicies": {
            "egress": {
                "enabled": True,
                "redis": [{"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 6380}]}],
            }
        },
    },
    "production": yaml.safe_load((CHART / "production-values.yaml").read_text()),
    "minimum": {
        "redis": {"bundled": False},
        "history": {"enabled": False},
        "networkPolicies": {"enabled": False},
        "operator": {"replicas": 1, "podDisruptionBudget": False},
    },
}
"""Values that together use all parts of the templates."""


def render_chart(
    namespace: str, *, chart: Path = CHART, release: str = "das", apis: tuple[str, ...] = (), **values: Any
) -> list[dict[str, Any]]:
    """Return the objects that an installation of the chart consists of.

    Args:
        namespace: namespace of the release.
        chart: folder or package of the chart.
        release: name of the release.
        apis: groups and versions that the cluster serves in addition to Kubernetes' own.
        **values: values of the chart.

    Raises:
        RuntimeError: with Helm's message, if it cannot render the chart with these values.
    """
    command = [str(HELM), "template", release, str(chart), "--namespace", namespace, "--values", "-"]
    command += [f"--api-versions={api}" for api in apis]
    process = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr)
    # The loader in C takes a tenth of the time, which is for the CRD.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(process.stdout, loader) if manifest]
