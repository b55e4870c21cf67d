"""Which ConfigMaps are valid."""

import pytest

from core.errors import ConfigError
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Request, Response
from nodeagent.config.parse import read_config
from tests.support.scripted import answer, rejection, scripted_client, stored


def _config_map(**fields: object) -> Response:
    return answer(stored(CONFIG_MAPS, metadata={"name": "agent-config"}, **fields))


async def _read(response: Response) -> str:
    seen: list[Request] = []

    def script(request: Request) -> Response:
        seen.append(request)
        return response

    parsed = await read_config(scripted_client(script), "velero", "agent-config")
    assert [request.path for request in seen] == ["/api/v1/namespaces/velero/configmaps/agent-config"]
    return parsed.config.priority_class_name


async def test_the_only_key_of_the_config_map_is_read_whatever_its_name() -> None:
    assert await _read(_config_map(data={"any.json": '{"priorityClassName": "low"}'})) == "low"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (rejection(404, "not found"), "ConfigMap velero/agent-config does not exist"),
        (rejection(403, "may not"), "cannot be read.*403"),
        (_config_map(), "exactly one key.*found: none"),
        (_config_map(data={"b": "{}", "a": "{}"}), "exactly one key.*found: a, b"),
        (_config_map(data={"a": "[1]"}), "ConfigMap velero/agent-config: .*not a JSON object"),
    ],
    ids=["missing", "forbidden", "empty", "two keys", "list"],
)
async def test_an_unusable_config_map_is_rejected(response: Response, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        await _read(response)


async def test_no_name_means_all_defaults_and_no_request() -> None:
    def script(request: Request) -> Response:
        raise AssertionError(request)

    assert (await read_config(scripted_client(script), "velero", "")).warnings == []
