"""Node labels that identify a kind of GPU (``workers.accelerator``)."""

from __future__ import annotations

from rollout_api.manifest.rollout_job import GROUP

_FEATURE_DISCOVERY = "nvidia.com/gpu.product"
_GKE = "cloud.google.com/gke-accelerator"
_KARPENTER = "karpenter.k8s.aws/instance-gpu-name"
_OWN = f"{GROUP}/accelerator"

_LABELS: dict[str, dict[str, list[str]]] = {
    "nvidia-a100": {
        _FEATURE_DISCOVERY: [
            "NVIDIA-A100-SXM4-40GB",
            "NVIDIA-A100-SXM4-80GB",
            "NVIDIA-A100-PCIE-40GB",
            "NVIDIA-A100-80GB-PCIe",
        ],
        _GKE: ["nvidia-tesla-a100", "nvidia-a100-80gb"],
        _KARPENTER: ["a100"],
    },
    "nvidia-h100": {
        _FEATURE_DISCOVERY: ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL", "NVIDIA-H100-SXM5-80GB"],
        _GKE: ["nvidia-h100-80gb", "nvidia-h100-mega-80gb"],
        _KARPENTER: ["h100"],
    },
    "nvidia-h200": {
        _FEATURE_DISCOVERY: ["NVIDIA-H200", "NVIDIA-H200-NVL"],
        _GKE: ["nvidia-h200-141gb"],
        _KARPENTER: ["h200"],
    },
    "nvidia-b200": {
        _FEATURE_DISCOVERY: ["NVIDIA-B200"],
        _GKE: ["nvidia-b200"],
        _KARPENTER: ["b200"],
    },
}


def accelerator_labels(kind: str) -> dict[str, list[str]]:
    """Return labels with their values. A node with any of them has this kind of GPU.

    The administrator may label nodes of any kind. For some kinds, the labels that other software sets are known, too.
    """
    return {**_LABELS.get(kind, {}), _OWN: [kind]}
