"""The settings of exposers for a configuration document."""

import json

from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.expose_settings import build_expose_settings
from nodeagent.config.parse import parse_config
from tests.support.objects import JsonDict


def build_settings(document: JsonDict, template: AgentTemplate, *, cache_limit_mib: int = 5000) -> ExposeSettings:
    """Return the settings for `document` in a cluster that has the configured priority class."""
    config = parse_config(json.dumps(document)).config
    return build_expose_settings(
        ExposeSettings(template), config, priority_class=config.priority_class_name, cache_limit_mib=cache_limit_mib
    )
