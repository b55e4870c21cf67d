"""The cases: which object is distorted, where, and into what; or which answers are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints, is_typeddict

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from core.kube import resources
from core.models.names import (
    CONFIG_ANNOTATION,
    COPIES_ANNOTATION,
    COPY_LABEL,
    MOVER_LOST_ANNOTATION,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
    OWNER_UID_LABEL,
    PENDING_REASON_ANNOTATION,
    SELECTED_NODE_ANNOTATION,
)
from exposer.manifests import SOURCE_ANNOTATION, VOLUME_ANNOTATION
from tests.fuzz.distorter import ObjectKey, Path_, paths_in, replace_at
from tests.fuzz.values import TEXTS_BY_FIELD, Raw, from_schema, hostile, hostile_answers, hostile_texts
from tests.fuzz.world import INITIAL
from tests.support.objects import JsonDict

CASES_PER_ROUND: Final = 12
_CRDS: Final = Path(__file__).parents[2] / "deploy" / "crds"
RESOURCES: Final = resources.BY_KIND
_PLURALS: Final = sorted(resource.plural for resource in RESOURCES.values())
_ANNOTATIONS: Final = (
    *(OUTCOME_ANNOTATION, MOVER_LOST_ANNOTATION, PENDING_REASON_ANNOTATION, CONFIG_ANNOTATION),
    *(COPIES_ANNOTATION, SELECTED_NODE_ANNOTATION, SOURCE_ANNOTATION, VOLUME_ANNOTATION),
)
_MARKS: Final = (
    *(("metadata", "annotations", name) for name in _ANNOTATIONS),
    *(("metadata", "labels", name) for name in (NODE_LABEL, OWNER_UID_LABEL, COPY_LABEL)),
)
_OUTCOME: Final = {
    "phase": "Completed",
    "keptAt": "2026-11-21T12:00:00Z",
    "message": "m",
    "result": {"snapshotID": "s", "source": {"byPath": "/x"}, "target": {"byPath": "/x"}, "totalBytes": 5},
    "pvName": "pv-1",
    "reclaimPolicy": "Retain",
}
_LOSS: Final = {"since": "2026-11-21T12:00:00Z", "last": "2026-11-21T12:00:00Z", "times": 1, "killed": 1, "pod": "uid"}
_SOURCE: Final = {"snapshotUid": "u", "content": "c", "contentUid": "u", "size": "1Gi", "volumeMode": "Filesystem"}
_PROGRESS: Final = {"totalBytes": 9, "doneBytes": 3, "bytesPerSecond": 1, "sentBytes": 1}
_DOCUMENT: Final = {"loadConcurrency": {"globalConfig": 3, "perNodeConfig": []}, "podResources": {"cpuLimit": "1"}}


@dataclass(frozen=True)
class Case:
    """An object, of which `value` is put at `path`; None: the field is null."""

    key: ObjectKey
    path: Path_
    value: Any

    def distort(self, obj: JsonDict) -> Any:
        """Return the distorted `obj`."""
        return replace_at(obj, self.path, self.value)


@dataclass(frozen=True)
class Round:
    """Cases at the same time, each about another object; `body` is what reads of `plural` get instead, if any."""

    cases: tuple[Case, ...]
    relist: bool
    plural: str = ""
    body: bytes = b""

    @property
    def examples(self) -> int:
        """The number of malformed objects and answers."""
        return len(self.cases) + bool(self.plural)


@cache
def schemas_of(kind: str) -> JsonDict:
    """Return the schemas of the fields of a custom resource, by name."""
    for file in _CRDS.glob("*.velero.io.yaml"):
        spec = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        if spec["names"]["kind"] == kind:
            return spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return {}


def _paths_of(form: Any) -> Iterator[Path_]:
    """Yield every path of a form; the first item stands for all of a list."""
    arguments = get_args(form)
    if is_typeddict(form):
        for key, field in get_type_hints(form).items():
            yield (key,)
            for path in _paths_of(field):
                yield (key, *path)
    elif get_origin(form) is list and arguments:
        yield (0,)
        for path in _paths_of(arguments[0]):
            yield (0, *path)


def _texts(whole: JsonDict) -> SearchStrategy[str]:
    """Return JSON texts like that of `whole`, with one part replaced."""
    paths = [(), *paths_in(whole)]

    def build(path: Path_, value: Any) -> str:
        changed = replace_at(whole, path, value)
        if isinstance(value, Raw):
            text = json.dumps(replace_at(whole, path, "@raw@"))
            return text.replace('"@raw@"', value.text.decode(errors="replace"))
        return json.dumps(changed)

    flat = hostile.filter(lambda value: isinstance(value, Raw) or not _has_raw(value))
    return st.builds(build, st.sampled_from(paths), flat)


def _has_raw(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_raw, value.values()))
    return any(map(_has_raw, value)) if isinstance(value, list) else isinstance(value, Raw)


any_text: Final = st.one_of(
    *(_texts(whole) for whole in (_OUTCOME, _LOSS, _SOURCE, _PROGRESS, _DOCUMENT)), hostile_texts
)


@cache
def _cases_of(key: ObjectKey) -> SearchStrategy[Case]:
    """Return the cases of one object."""
    paths = sorted({*paths_in(INITIAL[key]), *_paths_of(RESOURCES[key[0]].form)}, key=repr)
    texts = [path for path in paths if path[-1] in {"message", "data", "operationTimeout"} or path[:2] == ("data", "a")]
    strategies = [
        st.builds(Case, st.just(key), st.sampled_from(paths), hostile),
        st.builds(Case, st.just(key), st.sampled_from([*_MARKS, *texts]), any_text),
    ]
    schema = schemas_of(key[0])
    paths += [(part, name) for part in ("spec", "status") for name in schema.get(part, {}).get("properties", {})]
    strategies += [
        st.builds(Case, st.just(key), st.just(path), TEXTS_BY_FIELD[str(path[-1])])
        for path in paths
        if path[-1] in TEXTS_BY_FIELD
    ]
    strategies += [
        st.builds(Case, st.just(key), st.just((part,)), from_schema(schema[part]))
        for part in ("spec", "status")
        if part in schema
    ]
    return st.one_of(strategies)


_ROUNDS: Final = st.builds(
    lambda cases, relist, answer: Round(tuple(cases), relist, *answer),
    st.lists(
        st.sampled_from(sorted(INITIAL)).flatmap(_cases_of),
        min_size=CASES_PER_ROUND,
        max_size=CASES_PER_ROUND,
        unique_by=lambda case: case.key,
    ),
    st.booleans(),
    st.one_of(*[st.just(("", b""))] * 3, st.tuples(st.sampled_from(_PLURALS), hostile_answers)),
)


def rounds(number: int) -> SearchStrategy[list[Round]]:
    """Return lists of that many rounds."""
    return st.lists(_ROUNDS, min_size=number, max_size=number)
