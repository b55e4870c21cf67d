"""The tests mirror the layout of the product; the table of tiers in CONTRIBUTING.md."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support import tiers

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("core", "exposer", "nodeagent", "client", "datamover")

_TESTED_ELSEWHERE: Final = {
    "datamover/data_path/one_open_runs.py": "tests/datamover/flows/test_block_mover.py",
    "datamover/data_path/snapshot_runs.py": "tests/datamover/flows/test_resume.py",
    "core/clock.py": "tests/core/models/test_units.py",
    "core/kube/types.py": "tests/core/kube/test_resources_forms.py",
    "core/models/names.py": "tests/core/models/test_units.py",
    "core/snapshot_contract.py": "tests/core/test_mover_specs.py",
    "nodeagent/runtime/lease.py": "tests/nodeagent/leader/test_election.py",
    "core/version.py": "tests/nodeagent/test_main.py",
    "datamover/__main__.py": "tests/datamover/test_main.py",
    "datamover/storage/token_requests.py": "tests/datamover/storage/test_token_files.py",
    "datamover/pod/file_relay.py": "tests/datamover/pod/test_file_stream.py",
    "client/backups/files.py": "tests/client/cli/test_backup_files.py",
    "client/verifications/read_back.py": "tests/client/verifications/test_verify.py",
    "datamover/data_path/in_place_preview.py": "tests/datamover/flows/test_in_place_preview.py",
    "datamover/data_path/restore.py": "tests/datamover/flows/test_roundtrip.py",
    "datamover/kopia/client_config.py": "tests/datamover/kopia/test_repository.py",
    "datamover/runtime/cancellation.py": "tests/datamover/flows/test_cancel.py",
    "datamover/runtime/signals.py": "tests/datamover/test_main.py",
    "exposer/model.py": "tests/exposer/test_expose_run.py",
    "client/cli/collection_commands.py": "tests/client/cli/test_backup.py",
    "client/session.py": "tests/client/verifications/test_scratch.py",
    "client/mover_jobs.py": "tests/client/cli/test_backup_delete.py",
    "client/cli/run_schedule.py": "tests/client/cli/test_schedule.py",
    "client/backups/deletion_report.py": "tests/client/backups/test_delete.py",
    "nodeagent/coverage/cluster.py": "tests/nodeagent/coverage/test_selection.py",
    "nodeagent/cli.py": "tests/nodeagent/config/test_check.py",
    "client/cli/install_flags.py": "tests/client/cli/test_install.py",
    "nodeagent/config/keys.py": "tests/nodeagent/config/test_parse.py",
    "nodeagent/config/value_types.py": "tests/nodeagent/config/test_parse.py",
    "nodeagent/leader/context.py": "tests/nodeagent/leader/test_dispatcher.py",
    "nodeagent/leader/maintenance/jobs.py": "tests/nodeagent/leader/maintenance/test_steps.py",
    "nodeagent/leader/maintenance/controller.py": "tests/nodeagent/leader/maintenance/test_steps.py",
    "nodeagent/leader/admission/writer.py": "tests/nodeagent/leader/admission/test_admission_pass.py",
    "nodeagent/leader/maintenance/restore_tests.py": "tests/nodeagent/leader/maintenance/test_verifications.py",
    "nodeagent/leader/repositories/init_pod.py": "tests/nodeagent/leader/repositories/test_controller.py",
    "nodeagent/maintenance/restore_tests.py": "tests/nodeagent/maintenance/test_verification.py",
    "nodeagent/node/data_path_steps.py": "tests/nodeagent/flows/test_retries.py",
    "nodeagent/node/expose_steps.py": "tests/nodeagent/node/test_cache.py",
    "nodeagent/node/mover_events.py": "tests/nodeagent/node/test_progress.py",
    "nodeagent/runtime/settings.py": "tests/nodeagent/test_main.py",
    "client/install/daemonset.py": "tests/client/install/test_manifests.py",
    "client/install/options.py": "tests/client/install/test_manifests.py",
    "client/permissions.py": "tests/deploy/test_rbac.py",
    "client/volume_check_plan.py": "tests/client/test_volume_check.py",
    "client/cli/version.py": "tests/integration/test_uninstall.py",
    "nodeagent/runtime/http.py": "tests/nodeagent/runtime/test_transport.py",
    "nodeagent/runtime/permissions.py": "tests/deploy/test_rbac.py",
}
"""Modules that serve one neighbor, and the file that tests them through it."""


def test_every_module_has_tests_at_its_path_or_where_the_table_says() -> None:
    missing = []
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            module = path.relative_to(_ROOT)
            if path.name == "__init__.py" or module.as_posix() == "nodeagent/__main__.py":
                continue
            folder = _ROOT / "tests" / module.parent
            if not any([*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")]):
                missing.append(module.as_posix())
    assert [module for module in missing if module not in _TESTED_ELSEWHERE] == []
    assert [module for module in _TESTED_ELSEWHERE if module not in missing] == [], "has tests at its path now"


def test_the_files_of_the_table_exist() -> None:
    assert [file for file in _TESTED_ELSEWHERE.values() if not (_ROOT / file).is_file()] == []


def test_no_test_file_passes_400_lines() -> None:
    """A larger file tests several things: split it."""
    files = [path for path in (_ROOT / "tests").rglob("*.py") if "recordings" not in path.parts]
    assert [str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


_MAKEFILE = (_ROOT / "Makefile").read_text(encoding="utf-8")
_SECTION = _MAKEFILE.partition("# -- tests --")[2].partition("# -- measurements --")[0]
_ROWS = {
    target: row.split("|")
    for row in (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    if row.startswith("| `make ")
    for target in re.findall(r"`make ([a-z-]+)`", row.split("|")[1])
}
_TARGETS = {"unit": "unit", "integration": "integration", "cluster": "cluster-test", "thorough": "test-slow"}


def test_every_tier_has_a_row() -> None:
    assert set(_ROWS) == set(re.findall(r"(?m)^([a-z-]+):.* ## ", _SECTION)) - {"format"}


def test_the_table_says_which_tiers_need_root() -> None:
    needing = set(re.findall(r"(?m)^([a-z-]+):.* ## .*\(root", _SECTION))
    assert {target for target, cells in _ROWS.items() if cells[2].rstrip().endswith("; root")} == needing


@pytest.mark.parametrize("tier", _TARGETS)
def test_the_table_counts_the_tests(tier: str, request: pytest.FixtureRequest) -> None:
    stated, found = int(_ROWS[_TARGETS[tier]][3].replace(",", "")), request.config.stash[tiers.COUNTS][tier]
    whole = request.config.args_source is not pytest.Config.ArgsSource.ARGS and not request.config.option.keyword
    assert (0.9 if whole else 0) * stated <= found <= 1.1 * stated


def test_the_integration_tier_collects_every_folder_that_has_its_tests() -> None:
    folders = re.findall(r"tests/\S+", re.findall(r"(?m)^integration_folders = (.*)", _MAKEFILE)[0])
    files = (_ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if re.search(r"pytest\.mark\.integration", file.read_text(encoding="utf-8"))]
    elsewhere = [file for file in marked if not any(file.is_relative_to(_ROOT / folder) for folder in folders)]
    assert {file.parent.name for file in elsewhere} <= {"benchmarks"}  # which make test-slow has


def test_files_that_may_take_long_exist() -> None:
    assert [file for file in tiers.EXPECTED if not (_ROOT / file).exists()] == []
