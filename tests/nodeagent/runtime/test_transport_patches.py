"""Each patch of kubernetes_asyncio and asyncio is still needed, and still works.

A failing test here means that an upgrade made a patch unnecessary, or broke it: see
`nodeagent/runtime/transport.py`.
"""

import subprocess
import sys
from asyncio.sslproto import SSLProtocol
from pathlib import Path

import pytest

from nodeagent.runtime.transport import _patch_connection_limit, _patch_session, _patch_tls_buffer

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[3]
_COUNT = "sum('kubernetes_asyncio.client' in name for name in sys.modules)"


def _python(code: str) -> str:
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_generated_code_is_loaded_without_the_patch_only() -> None:
    """It takes 20 MiB per agent."""
    assert int(_python(f"import sys, nodeagent.runtime.transport; print({_COUNT})")) < 10
    assert int(_python(f"import sys, kubernetes_asyncio.config; print({_COUNT})")) > 500


def test_the_library_looks_up_the_needed_classes_in_the_emptied_package() -> None:
    code = """
import nodeagent.runtime.transport, kubernetes_asyncio.client as client
for name in ("ApiClient", "Configuration"):
    delattr(client, name)
import importlib, kubernetes_asyncio.config.kube_config as module
try:
    importlib.reload(module).new_client_from_config
    module._get_kube_config_loader, module.client.Configuration
except (AttributeError, ImportError) as e:
    print(type(e).__name__)
"""
    assert _python(code) in {"AttributeError", "ImportError"}


def test_tls_buffers_are_large_without_the_patch_only() -> None:
    assert int(_python("from asyncio.sslproto import SSLProtocol; print(SSLProtocol.max_size)")) >= 256 * 1024
    _patch_tls_buffer()
    assert SSLProtocol.max_size == 32 * 1024


async def test_sessions_have_a_limit_the_environment_and_no_keepalive_without_the_patch_only() -> None:
    from kubernetes_asyncio.client.api_client import ApiClient  # noqa: PLC0415 - after the patches
    from kubernetes_asyncio.client.configuration import Configuration  # noqa: PLC0415 - after the patches

    configuration = Configuration()
    library = ApiClient(configuration).rest_client.pool_manager
    assert configuration.connection_pool_maxsize == 100
    assert library.trust_env
    assert vars(library.connector)["_socket_factory"] is None
    await library.close()
    _patch_connection_limit(configuration)
    session = _patch_session(configuration)
    assert session.connector is not None
    assert (session.connector.limit, session.trust_env) == (0, False)
    assert vars(session.connector)["_socket_factory"] is not None
    await session.close()
