"""Validates manifests against the API schemas of the supported releases of Kubernetes."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

RELEASES = [f"1.{minor}" for minor in range(29, 38)]
"""The releases of which kubernetes-validate has the schemas, from the first that the CRD's rules need."""
FIRST_RELEASES = dict.fromkeys(("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"), "1.30")
"""The first releases with kinds that only some values of the chart create."""
NOT_BUILT_IN = ("CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "PrometheusRule")
"""Kinds that kubernetes-validate does not know. The API server checks the CRD when a test installs it."""


def check_schemas(manifests: list[dict[str, Any]], release: str) -> None:
    """Raise ValidationError for the first manifest that does not fit the schemas of a release."""
    for manifest in manifests:
        first = FIRST_RELEASES.get(manifest["kind"], RELEASES[0])
        if manifest["kind"] not in NOT_BUILT_IN and RELEASES.index(release) >= RELEASES.index(first):
            kubernetes_validate.validate(manifest, release, strict=True)
