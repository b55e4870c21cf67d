"""Objects as YAML as people write it, with the reason of each permission above its rule."""

from collections.abc import Iterable
from typing import Final

import yaml

from core.models.base import JsonDict
from nodeagent.runtime.permissions import Permission, Scope

GENERATED: Final = "# Generated from client/install by `make manifests`: do not edit.\n"

_EXPRESSION: Final = ("{{ ", " }}")


def build_file(objects: Iterable[JsonDict], *, about: str = "", permissions: Iterable[Permission] = ()) -> str:
    """Return the text of a file with these objects; the rules of roles are `permissions`, in their order."""
    permissions = tuple(permissions)
    reasons = {
        kind: iter([one.reason for one in permissions if one.scope is scope])
        for kind, scope in (("Role", Scope.OWN_NAMESPACE), ("ClusterRole", Scope.CLUSTER))
    }
    header = "".join(f"# {line}\n" for line in about.splitlines())
    documents = [_build_document(item, reasons.get(str(item["kind"]), iter(()))) for item in objects]
    return f"{GENERATED}{header}" + "---\n".join(documents)


def dump(value: object) -> str:
    """Return a value as YAML in block style."""
    # Expressions of the chart must not be folded.
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)
    return text


def _build_document(item: JsonDict, reasons: Iterable[str]) -> str:
    """Return an object as YAML, each rule of a role below its reason."""
    if "rules" not in item:
        return dump(item)
    parts = [dump({key: value for key, value in item.items() if key != "rules"}), "rules:\n"]
    for rule, reason in zip(item["rules"], reasons, strict=True):
        text = f"  # {reason}\n" + "".join(f"  {line}\n" for line in dump([rule]).splitlines())
        parts.append(_guard(text, *rule.get("resourceNames", ())))
    return "".join(parts)


def _guard(text: str, *names: str) -> str:
    """Return the rule for a single object; if the chart's values name it, only where they do."""
    for name in names:
        if name.startswith(_EXPRESSION[0]):
            expression = name.removeprefix(_EXPRESSION[0]).removesuffix(_EXPRESSION[1])
            return f"  {{{{- if {expression} }}}}\n{text}  {{{{- end }}}}\n"
    return text


class _Dumper(yaml.SafeDumper):
    """Block style with indented lists, as people write manifests."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - its signature
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - its signature
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_list(dumper: yaml.SafeDumper, items: list[object]) -> yaml.SequenceNode:
    plain = all(isinstance(item, str) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)
