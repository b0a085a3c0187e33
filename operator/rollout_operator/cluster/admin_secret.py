"""Creates the Secret with the administrator's password of the chart's Redis server, if it does not exist.

It is run as ``python -m rollout_operator.cluster.admin_secret NAMESPACE/NAME HOST:PORT`` before rollout-redis-users
starts. The chart itself must not contain random passwords. Tools that render it without a cluster, such as Argo CD,
would change them with each synchronization. An existing Secret is neither read nor changed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.command_line import configure_logs, namespaced_name
from rollout_operator.objects import names

logger = logging.getLogger("rollout_admin_secret")

_PASSWORD_BYTES = 32


def admin_secret(namespace: str, name: str, server: str) -> dict[str, Any]:
    """Return a Secret with a new password, the URL with it, and a new key for deriving users' passwords.

    Args:
        namespace: namespace of the Secret.
        name: name of the Secret.
        server: host and port of the Redis server.
    """
    password, user_key = secrets.token_hex(_PASSWORD_BYTES), secrets.token_hex(_PASSWORD_BYTES)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": names.labels_outside_release("redis"),
        },
        "type": "Opaque",
        "stringData": {"password": password, "url": f"redis://:{password}@{server}/0", "user-key": user_key},
    }


async def create_if_missing(api: KubernetesApi, secret: dict[str, Any]) -> bool:
    """Create a Secret unless one of this name exists, and return whether it was created.

    Raises:
        ApiError: it cannot be created.
    """
    try:
        await api.create(secret)
    except ApiError as error:
        if error.conflict:
            return False
        raise
    return True


async def _run(secret: dict[str, Any]) -> int:
    api = await KubernetesApi.connect()
    name = "{namespace}/{name}".format(**secret["metadata"])
    try:
        created = await create_if_missing(api, secret)
    except ApiError as error:
        logger.error("Secret %s could not be created: %s", name, error)
        return 1
    finally:
        await api.close()
    logger.info("Created Secret %s." if created else "Secret %s exists already.", name)
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Create the Secret, and exit with 0 if it exists then."""
    parser = argparse.ArgumentParser(
        prog="rollout_operator.cluster.admin_secret",
        description="Create the Secret with the administrator's password of a Redis server, if it does not exist.",
    )
    parser.add_argument("secret", type=namespaced_name, metavar="NAMESPACE/NAME", help="the Secret")
    parser.add_argument("server", metavar="HOST:PORT", help="the Redis server")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(arguments)
    namespace, name = options.secret
    configure_logs(as_json=True, level=options.log_level)
    sys.exit(asyncio.run(_run(admin_secret(namespace, name, options.server))))


if __name__ == "__main__":
    main()
